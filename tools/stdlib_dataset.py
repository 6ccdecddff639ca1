"""Makes a dataset of the Python standard library's own sources: real text that every machine has.

    python tools/stdlib_dataset.py --output data/stdlib

The folder then holds stdlib_text_document.bin and .idx (one document per file, byte-level tokens) and stats.json. A
second run finds them and returns at once, unless Python or the settings have changed.
"""

import argparse
import json
import math
import os
import platform
import sys
import sysconfig
from pathlib import Path
from typing import Any, Iterator

import numpy

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

# Installed packages are not the standard library; test files hold odd encodings and long tables.
EXCLUDED_FOLDERS = ('site-packages', 'dist-packages', 'test', 'tests', 'idle_test')
TOKENIZER_FLAGS = ('--tokenizer-type', 'ByteLevelTokenizer', '--append-eod')
STATS = 'stats.json'


def source_files(root: Path) -> list[Path]:
    """The .py files under ``root`` that are UTF-8 and in no excluded folder, in the order of their paths."""

    def walk() -> Iterator[Path]:
        for folder, subfolders, names in os.walk(root):
            subfolders[:] = [name for name in subfolders if name not in EXCLUDED_FOLDERS]
            yield from (Path(folder, name) for name in names if name.endswith('.py'))

    files = sorted(walk(), key=lambda path: path.relative_to(root).as_posix())
    return [path for path in files if _is_utf8(path)]


def _is_utf8(path: Path) -> bool:
    try:
        path.read_bytes().decode()
    except UnicodeDecodeError:
        return False
    return True


def unigram_entropy(counts: numpy.ndarray) -> float:
    """Entropy in nats of the distribution of ``counts``, [vocab]: the least loss of a model that ignores context."""
    p = counts[counts > 0] / counts.sum()
    return float(-(p * numpy.log(p)).sum())


def read_stats(output: Path, settings: dict[str, Any]) -> dict[str, Any] | None:
    """The statistics of the dataset in ``output`` if it is whole and was made with ``settings``; else None."""
    path = output / STATS
    if not path.is_file():
        return None
    stats = json.loads(path.read_text())
    parts = [output / name for name in stats['files']]
    whole = all(p.is_file() and p.stat().st_size == stats['files'][p.name] for p in parts)
    return stats if whole and stats['settings'] == settings else None


def build(output: Path, root: Path) -> tuple[dict[str, Any], bool]:
    """Makes the dataset of the sources under ``root`` in the folder ``output``, or finds it there.

    Returns:
        What stats.json holds: ``documents``, ``tokens``, ``bytes``, ``vocab_size``, ``eod``, ``ln_vocab`` and
        ``unigram_entropy`` (nats), ``seconds``, ``settings`` and the ``files`` with their sizes; and whether it was found.

    Raises:
        ValueError: there are no sources under ``root``.
    """
    settings = {
        'python': platform.python_version(),
        'sources': str(root),
        'excluded_folders': list(EXCLUDED_FOLDERS),
        'flags': list(TOKENIZER_FLAGS),
    }
    stats = read_stats(output, settings)
    if stats is not None:
        return stats, True
    # Not at the top: a run that finds its dataset need not import torch.
    from tools import preprocess_data

    files = source_files(root)
    if not files:
        raise ValueError(f'{root}: expected the sources of the standard library, found no .py file')
    # A run that stops half-way must not leave the statistics of other data.
    (output / STATS).unlink(missing_ok=True)
    arguments = [
        '--input-format',
        'text',
        '--output-prefix',
        str(output / 'stdlib'),
        *TOKENIZER_FLAGS,
    ]
    done = preprocess_data.preprocess(
        preprocess_data.parse_args([*arguments, '--input', *map(str, files)])
    )
    (prefix,) = map(Path, done.prefixes)
    data = numpy.memmap(prefix.with_suffix('.bin'), dtype=done.dtype, mode='r')
    stats = {
        'documents': done.documents,
        'tokens': done.tokens,
        'bytes': done.bytes,
        'vocab_size': done.vocab_size,
        'eod': done.eod,
        'ln_vocab': math.log(done.vocab_size),
        'unigram_entropy': unigram_entropy(numpy.bincount(data, minlength=done.vocab_size)),
        'seconds': round(done.seconds, 3),
        'settings': settings,
        'files': {p.name: p.stat().st_size for p in map(prefix.with_suffix, ('.bin', '.idx'))},
    }
    partial = output / f'{STATS}.partial'
    partial.write_text(json.dumps(stats, indent=2) + '\n')
    partial.replace(output / STATS)
    return stats, False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
    parser.add_argument('--output', type=Path, required=True, metavar='FOLDER')
    output = parser.parse_args().output
    stats, found = build(output, Path(sysconfig.get_paths()['stdlib']))
    state = 'found' if found else f'built in {stats["seconds"]:.1f} s'
    print(f'{output}: the sources of Python {stats["settings"]["python"]}, {state}')
    print(
        f'{stats["documents"]:,} documents, {stats["tokens"]:,} tokens; vocabulary of {stats["vocab_size"]} '
        f'(ln {stats["ln_vocab"]:.3f}), unigram entropy {stats["unigram_entropy"]:.3f} nats'
    )


if __name__ == '__main__':
    main()
