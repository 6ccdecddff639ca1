"""Turns text into Megatron-LM's indexed dataset (.bin and .idx), which --data-path reads.

    python tools/preprocess_data.py --input corpus.jsonl notes.txt src/ --output-prefix data/corpus \\
        --tokenizer-type ByteLevelTokenizer --append-eod --workers 2

An input is, unless --input-format says otherwise,
- JSONL if its name ends in .jsonl, .ndjson or .json: each line an object, a document under each of --json-keys;
- a source tree if it is a folder: one document per file that matches --patterns, in the order of the paths,
  hidden files and folders left out;
- else plain text: one document.

Each key gives <output-prefix>_<key>_document.bin and .idx; text files count as the one key's. The tokenizer's
flags are the training loop's own, and so is the tokenizer built from them. Flags that Megatron-LM's tool of the
same name has mean what they mean there.
"""

import argparse
import contextlib
import multiprocessing
import os
import sys
import time
import warnings
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Generator, Iterator, NamedTuple, Sequence

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import megatron.overlay

megatron.overlay.install('cpu')

import numpy
from tqdm import tqdm

from tools.text_inputs import FORMATS, DataError, Record, list_files, read_records, texts_of

with warnings.catch_warnings():
    # Which GPU libraries are missing is no concern of this tool.
    warnings.simplefilter('ignore', UserWarning)
    from megatron.core.datasets.indexed_dataset import (
        DType,
        IndexedDatasetBuilder,
        get_bin_path,
        get_idx_path,
    )
    from megatron.core.tokenizers.utils.build_tokenizer import SP_TOKENIZERS, build_tokenizer
    from megatron.training.arguments import _add_tokenizer_args

# These make conversations or images into tokens, not documents.
OTHER_TOKENIZERS = ('MultimodalTokenizer', 'NullMultimodalTokenizer', 'SFTTokenizer')
MODEL_TOKENIZERS = ('HuggingFaceTokenizer', 'TikTokenizer', *SP_TOKENIZERS)
LISTED_BAD_LINES = 10


class Encoded(NamedTuple):
    """What became of a record. ``documents``: key -> tokens, [n]; ``error``: why there are none."""

    documents: dict[str, numpy.ndarray]
    empty: int
    text_bytes: int
    raw_bytes: int
    error: str | None = None


@dataclass
class Summary:
    """What a run wrote and skipped. ``prefixes``: for --data-path; ``bytes``: of the text as UTF-8."""

    prefixes: list[str]
    vocab_size: int
    eod: int | None
    dtype: str
    documents: int = 0
    tokens: int = 0
    bytes: int = 0
    empty: int = 0
    bad: int = 0
    first_bad: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def __str__(self) -> str:
        lines = [f'wrote {prefix}.bin and .idx ({self.dtype})' for prefix in self.prefixes]
        lines += [
            f'{self.documents:,} documents, {self.tokens:,} tokens from {self.bytes:,} bytes of text',
            f'{self.seconds:.1f} s: {self.documents / self.seconds:,.1f} documents/s, '
            f'{self.tokens / self.seconds:,.0f} tokens/s',
            f'skipped: {self.empty:,} empty documents, {self.bad:,} bad lines',
            *(f'  {line}' for line in self.first_bad),
        ]
        more = self.bad - len(self.first_bad)
        return '\n'.join([*lines, f'  and {more:,} more'] if more else lines)


class Encoder:
    """Turns records into tokens. It is sent to the workers, so it builds its tokenizer where it is first used."""

    def __init__(self, args: argparse.Namespace, dtype: type[numpy.number], eod: int | None):
        self.args, self.dtype = args, dtype
        self.end = [eod] if args.append_eod else []

    @cached_property
    def tokenizer(self) -> Any:
        return build_tokenizer(self.args)

    def encode(self, record: Record) -> Encoded:
        raw = Path(record.path).read_bytes() if record.raw is None else record.raw
        try:
            texts = texts_of(record, raw, self.args.json_keys)
        except DataError as error:
            return Encoded({}, 0, 0, len(raw), str(error))
        ids = {key: self.tokenizer.tokenize(text) if text else [] for key, text in texts.items()}
        documents = {
            key: numpy.array([*tokens, *self.end], self.dtype)
            for key, tokens in ids.items()
            if tokens
        }
        text_bytes = sum(len(texts[key].encode()) for key in documents)
        return Encoded(documents, len(ids) - len(documents), text_bytes, len(raw))


_encoder: Encoder  # of this worker process


def _start_worker(encoder: Encoder) -> None:
    global _encoder
    _encoder = encoder


def _encode(record: Record) -> Encoded:
    return _encoder.encode(record)


def _encode_all(
    encoder: Encoder, records: Iterator[Record], workers: int
) -> Generator[Encoded, None, None]:
    """Encodes in the records' order: in this process if there is one worker, else in spawned ones."""
    if workers == 1:
        yield from map(encoder.encode, records)
        return
    context = multiprocessing.get_context('spawn')
    with context.Pool(workers, _start_worker, (encoder,)) as pool:
        yield from pool.imap(_encode, records, chunksize=16)


@contextlib.contextmanager
def _new_dataset(prefix: str, dtype: type[numpy.number]) -> Iterator[IndexedDatasetBuilder]:
    """Yields a builder; ``prefix``.bin and .idx appear when the block has ended well, and nothing otherwise."""
    partial = f'{prefix}.partial-{os.getpid()}'
    builder = IndexedDatasetBuilder(get_bin_path(partial), dtype=dtype)
    try:
        yield builder
        if not builder.sequence_lengths:
            raise DataError(f'{prefix}: the input holds no document, or empty ones only')
        builder.finalize(get_idx_path(partial))
        Path(get_idx_path(prefix)).unlink(missing_ok=True)  # never an old index beside new data
        os.replace(get_bin_path(partial), get_bin_path(prefix))
        os.replace(get_idx_path(partial), get_idx_path(prefix))
    finally:
        builder.data_file.close()
        Path(get_bin_path(partial)).unlink(missing_ok=True)
        Path(get_idx_path(partial)).unlink(missing_ok=True)


def preprocess(args: argparse.Namespace) -> Summary:
    """Writes the datasets that ``args`` (of ``parse_args``) asks for.

    Raises:
        DataError: an input is unusable, or a line is bad and --skip-bad-lines is not given. Nothing is written then.
    """
    files = list_files(args.input, args.input_format, args.patterns)
    if len(args.json_keys) > 1 and not all(is_jsonl for _, is_jsonl in files):
        raise DataError(f'--json-keys {args.json_keys}: a text file holds one text; give one key')
    tokenizer = build_tokenizer(args)
    eod = getattr(tokenizer, 'eod', None)
    if args.append_eod and (eod is None or eod < 0):
        raise DataError(f'--append-eod: this {args.tokenizer_type} has no end-of-document token')
    dtype = DType.optimal_dtype(tokenizer.vocab_size)
    prefixes = {key: f'{args.output_prefix}_{key}_document' for key in args.json_keys}
    summary = Summary(list(prefixes.values()), tokenizer.vocab_size, eod, dtype.__name__)
    Path(args.output_prefix).parent.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    with contextlib.ExitStack() as stack:
        size = sum(path.stat().st_size for path, _ in files)
        bar = stack.enter_context(tqdm(total=size, unit='B', unit_scale=True, disable=None))
        builders = {k: stack.enter_context(_new_dataset(p, dtype)) for k, p in prefixes.items()}
        encoded = _encode_all(Encoder(args, dtype, eod), read_records(files), args.workers)
        for one in stack.enter_context(contextlib.closing(encoded)):
            bar.update(one.raw_bytes)
            if one.error is not None:
                if not args.skip_bad_lines:
                    raise DataError(f'{one.error}. Mend it, or pass over it with --skip-bad-lines')
                summary.bad += 1
                summary.first_bad += [one.error] if summary.bad <= LISTED_BAD_LINES else []
            for key, tokens in one.documents.items():
                builders[key].add_document(tokens, [len(tokens)])
                summary.tokens += len(tokens)
            summary.documents += len(one.documents)
            summary.empty += one.empty
            summary.bytes += one.text_bytes
    summary.seconds = time.perf_counter() - start
    return summary


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the command line. The tokenizer's flags come from the training loop's own parser."""
    title, _, details = (__doc__ or '').partition('\n\n')
    parser = argparse.ArgumentParser(
        description=title, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument_group('input and output').add_argument
    add('--input', nargs='+', required=True, metavar='PATH', help='files and folders')
    add('--input-format', choices=FORMATS, default='auto')
    add('--json-keys', nargs='+', default=['text'], metavar='KEY', help='of the texts in JSONL')
    add('--patterns', nargs='+', default=['*.py'], metavar='GLOB', help='of the files in a tree')
    bad = 'skip and list lines that are not UTF-8, not JSON or lack a key, instead of stopping'
    add('--skip-bad-lines', action='store_true', help=bad)
    add('--output-prefix', required=True, metavar='PATH')
    add(
        '--append-eod', action='store_true', help='end each document with the end-of-document token'
    )
    add('--workers', type=int, default=1, help='processes that tokenize')
    args = _add_tokenizer_args(parser).parse_args(arguments)
    if args.workers < 1:
        parser.error(f'--workers {args.workers}: expected 1 or more')
    if args.tokenizer_type is None or args.tokenizer_type in OTHER_TOKENIZERS:
        parser.error(f'--tokenizer-type {args.tokenizer_type}: expected one that takes plain text')
    if args.tokenizer_type in MODEL_TOKENIZERS and not args.tokenizer_model:
        parser.error(f'--tokenizer-type {args.tokenizer_type} needs --tokenizer-model')
    args.pad_vocab_size = False  # padding is the model's concern
    return args


def main() -> None:
    try:
        print(preprocess(parse_args()))
    except DataError as error:
        sys.exit(f'preprocess_data.py: {error}')


if __name__ == '__main__':
    main()
