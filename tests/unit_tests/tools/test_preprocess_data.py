"""tools/preprocess_data.py on the real wheel: what it writes reads back, with every tokenizer, or nothing is written."""

import base64
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.training import arguments, global_vars
from tools.preprocess_data import main, parse_args, preprocess
from tools.text_inputs import DataError

TOOL = Path(__file__).resolve().parents[3] / 'tools' / 'preprocess_data.py'
BYTES = ('--tokenizer-type', 'ByteLevelTokenizer')
EOD, PAD = 256, 257
SAMPLES = [
    'def f(x):\n\treturn x  # two  spaces\n',
    'über 漢字 🙂 e\u0301',
    '\x00\x01 </s> <s>',
    ' ',
]


def run(folder, *inputs, flags=(*BYTES, '--append-eod')):
    """Runs in this process; returns the summary. The output's prefix is folder/out/data."""
    prefix = str(folder / 'out' / 'data')
    return preprocess(parse_args(['--input', *map(str, inputs), '--output-prefix', prefix, *flags]))


def documents(folder, key='text'):
    """The documents of the dataset in ``folder``, as lists of ids."""
    dataset = IndexedDataset(str(folder / 'out' / f'data_{key}_document'))
    numpy.testing.assert_array_equal(dataset.document_indices, range(len(dataset) + 1))
    return [dataset[i].tolist() for i in range(len(dataset))]


def bytes_and_eod(*texts):
    return [[*text.encode(), EOD] for text in texts]


def jsonl(path, *values):
    path.write_text(''.join(json.dumps(value) + '\n' for value in values))
    return path


def outputs(folder):
    return sorted(path.name for path in (folder / 'out').glob('*')) if folder.exists() else []


def test_mixed_inputs_come_back_in_order_without_the_empty_ones(tmp_path):
    lines = jsonl(tmp_path / 'a.jsonl', {'text': 'one'}, {'text': ''}, {'text': 'zwei ü'})
    (tmp_path / 'tree' / 'sub').mkdir(parents=True)
    (tmp_path / 'tree' / 'sub' / 'b.py').write_text('b = "漢字"\n')
    (tmp_path / 'tree' / 'sub' / '__init__.py').write_text('')
    (tmp_path / 'tree' / 'z.py').write_bytes(b'z = 1\r\n')
    (tmp_path / 'note.txt').write_text('two\n\nlines')
    done = run(tmp_path, tmp_path / 'note.txt', lines, tmp_path / 'tree')
    texts = ['two\n\nlines', 'one', 'zwei ü', 'b = "漢字"\n', 'z = 1\r\n']
    assert documents(tmp_path) == bytes_and_eod(*texts)
    size = sum(len(text.encode()) for text in texts)
    assert (done.documents, done.empty, done.bad) == (5, 2, 0)
    assert (done.tokens, done.bytes) == (size + 5, size)
    assert (done.vocab_size, done.eod, done.dtype) == (258, EOD, 'uint16')
    assert done.prefixes == [str(tmp_path / 'out' / 'data_text_document')]
    assert outputs(tmp_path) == ['data_text_document.bin', 'data_text_document.idx']


def test_without_append_eod_documents_are_the_bytes_alone(tmp_path):
    run(tmp_path, jsonl(tmp_path / 'a.jsonl', {'text': 'ab'}, {'text': 'ü'}), flags=BYTES)
    assert documents(tmp_path) == [[97, 98], [0xC3, 0xBC]]


def test_each_json_key_gets_its_own_dataset(tmp_path):
    lines = jsonl(tmp_path / 'a.jsonl', {'q': 'a', 'a': 'b'}, {'q': '', 'a': 'c'})
    flags = (*BYTES, '--append-eod', '--json-keys', 'q', 'a')
    assert run(tmp_path, lines, flags=flags).empty == 1
    assert documents(tmp_path, 'q') == bytes_and_eod('a')
    assert documents(tmp_path, 'a') == bytes_and_eod('b', 'c')
    (tmp_path / 'note.txt').write_text('x')
    with pytest.raises(DataError, match="--json-keys .*a text file holds one text"):
        run(tmp_path, lines, tmp_path / 'note.txt', flags=flags)


@settings(max_examples=20, deadline=None)
@given(texts=st.lists(st.text(st.characters(exclude_categories=['Cs'])), max_size=8).filter(any))
def test_any_unicode_survives(tmp_path_factory, texts):
    folder = tmp_path_factory.mktemp('any')
    run(folder, jsonl(folder / 'a.jsonl', *({'text': text} for text in texts)))
    assert documents(folder) == bytes_and_eod(*filter(None, texts))


def test_a_large_vocabulary_is_stored_in_32_bits(tmp_path):
    lines = jsonl(tmp_path / 'a.jsonl', {'text': '1 69999 65536'})
    flags = ('--tokenizer-type', 'NullTokenizer', '--vocab-size', '70000', '--append-eod')
    assert run(tmp_path, lines, flags=flags).dtype == 'int32'
    assert documents(tmp_path) == [[1, 69999, 65536, 69999]]


BAD_LINES = (
    b'{"text": "good"}\n{"text": \n\n{"txt": "a"}\n{"text": "\xff"}\n{"text": 5}\n{"text": "end"}\n'
)


def test_a_bad_line_stops_the_run_and_leaves_nothing(tmp_path):
    path = tmp_path / 'bad.jsonl'
    path.write_bytes(BAD_LINES)
    with pytest.raises(DataError, match=r'bad\.jsonl:2: invalid JSON .*--skip-bad-lines'):
        run(tmp_path, path)
    assert outputs(tmp_path) == []


def test_skipped_bad_lines_are_counted_and_listed(tmp_path):
    path = tmp_path / 'bad.jsonl'
    path.write_bytes(BAD_LINES)
    done = run(tmp_path, path, flags=(*BYTES, '--append-eod', '--skip-bad-lines'))
    assert documents(tmp_path) == bytes_and_eod('good', 'end')
    assert (done.documents, done.empty, done.bad) == (2, 1, 4)
    assert [line.split(':')[1] for line in done.first_bad] == ['2', '4', '5', '6']
    assert 'skipped: 1 empty documents, 4 bad lines\n' in str(done)


def test_only_the_first_ten_bad_lines_are_listed(tmp_path):
    lines = jsonl(tmp_path / 'a.jsonl', {'text': 'x'}, *[{}] * 13)
    done = run(tmp_path, lines, flags=(*BYTES, '--skip-bad-lines'))
    assert done.bad == 13
    assert [line.split(':')[1] for line in done.first_bad] == [str(n) for n in range(2, 12)]
    assert str(done).endswith('\n  and 3 more')


def test_input_of_empty_documents_makes_no_dataset(tmp_path):
    with pytest.raises(DataError, match='holds no document'):
        run(tmp_path, jsonl(tmp_path / 'a.jsonl', {'text': ''}))
    assert outputs(tmp_path) == []


def read_files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def tool(*args, timeout=240):
    """Runs the script in a session of its own, which is killed when it ends or the time is up."""
    process = subprocess.Popen(
        [sys.executable, str(TOOL), *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # all of them have ended
    return process.returncode, out, err


def test_two_workers_write_the_same_files_as_one(tmp_path):
    lines = jsonl(tmp_path / 'a.jsonl', *({'text': f'{n} ü' * (n % 7)} for n in range(100)))
    run(tmp_path, lines)
    flags = (*BYTES, '--append-eod', '--workers', 2)
    code, out, err = tool('--input', lines, '--output-prefix', tmp_path / 'two' / 'data', *flags)
    assert code == 0, err
    assert '85 documents, ' in out and ' documents/s' in out
    assert read_files(tmp_path / 'two') == read_files(tmp_path / 'out')


def test_the_command_ends_with_a_message_and_spares_the_dataset_of_an_earlier_run(
    tmp_path, monkeypatch
):
    lines = jsonl(tmp_path / 'a.jsonl', {'text': 'a'})
    run(tmp_path, lines)
    before = read_files(tmp_path / 'out')
    jsonl(lines, {'text': 'b'}, {'text': 3})
    prefix = str(tmp_path / 'out' / 'data')
    argv = ['preprocess_data.py', '--input', str(lines), '--output-prefix', prefix, *BYTES]
    monkeypatch.setattr(sys, 'argv', argv)
    with pytest.raises(SystemExit, match=r"a\.jsonl:2: key 'text' holds a int") as stopped:
        main()
    assert isinstance(stopped.value.code, str)  # which Python prints, with exit status 1
    assert read_files(tmp_path / 'out') == before


def hugging_face(folder):
    tokenizers = pytest.importorskip('tokenizers', reason='the wheel takes it for this tokenizer')
    transformers = pytest.importorskip('transformers', reason='the wheel takes it, as above')
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=280,
        special_tokens=['<eos>'],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(SAMPLES * 4, trainer)
    whole = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token='<eos>')
    whole.save_pretrained(folder / 'hf')
    return ('--tokenizer-type', 'HuggingFaceTokenizer', '--tokenizer-model', str(folder / 'hf'))


def tiktoken(folder):
    pytest.importorskip('tiktoken', reason='the wheel takes it for this tokenizer')
    pieces = [bytes([n]) for n in range(256)] + [b're', b'tu', b'retu']
    vocabulary = [
        {'rank': rank, 'token_bytes': base64.b64encode(piece).decode(), 'token_str': str(piece)}
        for rank, piece in enumerate(pieces)
    ]
    (folder / 'tik.json').write_text(json.dumps(vocabulary))
    size = ('--vocab-size', str(len(pieces) + 8), '--tiktoken-num-special-tokens', '8')
    model = str(folder / 'tik.json')
    return ('--tokenizer-type', 'TikTokenizer', '--tokenizer-model', model, *size)


def sentence_piece(folder):
    sentencepiece = pytest.importorskip('sentencepiece', reason='the wheel takes it')
    with open(folder / 'sp.model', 'wb') as model:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter([line for text in SAMPLES for line in text.split('\n')] * 4),
            model_writer=model,
            vocab_size=300,
            byte_fallback=True,
            normalization_rule_name='identity',
            hard_vocab_limit=False,
            minloglevel=2,
        )
    model_flags = ('--tokenizer-model', str(folder / 'sp.model'))
    return ('--tokenizer-type', 'GPTSentencePieceTokenizer', *model_flags)


def trained_with(monkeypatch, flags):
    """The tokenizer of the stock training loop for ``flags``, built from its own command line; and its arguments."""
    monkeypatch.setattr(sys, 'argv', ['pretrain_gpt.py', *flags])
    args = arguments.parse_args()
    args.rank = 0
    return global_vars.build_tokenizer(args), args


@pytest.mark.parametrize('make', [lambda folder: BYTES, hugging_face, tiktoken, sentence_piece])
def test_the_training_loop_builds_the_same_tokenizer_from_the_same_flags(
    make, tmp_path, monkeypatch
):
    monkeypatch.setenv('HF_HUB_OFFLINE', '1')
    flags = make(tmp_path)
    lines = jsonl(tmp_path / 'a.jsonl', *({'text': text} for text in SAMPLES))
    done = run(tmp_path, lines, flags=(*flags, '--append-eod'))
    trained, _ = trained_with(monkeypatch, flags)
    ids = [trained.tokenize(text) for text in SAMPLES]
    assert documents(tmp_path) == [[*one, trained.eod] for one in ids if one]
    assert done.vocab_size == trained.vocab_size > max(max(one, default=0) for one in ids)
    assert trained.detokenize(ids[1]) == SAMPLES[1]


def test_the_byte_tokenizer_of_the_training_loop(monkeypatch):
    tokenizer, args = trained_with(monkeypatch, BYTES)
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (258, EOD, PAD)
    assert args.padded_vocab_size == 384  # of --make-vocab-size-divisible-by 128
    assert tokenizer.tokenize('\x00é</s>') == [0, 0xC3, 0xA9, *b'</s>']
    assert tokenizer.detokenize([*b'ab', EOD, PAD]) == 'ab'
    _, args = trained_with(monkeypatch, (*BYTES, '--make-vocab-size-divisible-by', '2'))
    assert args.padded_vocab_size == 258
    more = ('--tokenizer-special-tokens', '<a>', '<b>')
    tokenizer, _ = trained_with(monkeypatch, (*BYTES, *more))
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (260, EOD, PAD)
    names = ['<|endoftext|>', '<|pad|>', '<a>', '<b>']
    assert tokenizer._tokenizer.tokens_to_ids(names) == [EOD, PAD, 258, 259]


def test_append_eod_needs_a_tokenizer_that_has_one(tmp_path):
    flags = hugging_face(tmp_path)
    settings_file = tmp_path / 'hf' / 'tokenizer_config.json'
    content = json.loads(settings_file.read_text())
    del content['eos_token']
    settings_file.write_text(json.dumps(content))
    with pytest.raises(DataError, match='HuggingFaceTokenizer has no end-of-document token'):
        lines = jsonl(tmp_path / 'a.jsonl', {'text': 'a'})
        run(tmp_path, lines, flags=(*flags, '--append-eod'))
    assert outputs(tmp_path) == []


@pytest.mark.parametrize(
    'flags, message',
    [
        ((), '--tokenizer-type None: expected one that takes plain text'),
        (('--tokenizer-type', 'SFTTokenizer'), '--tokenizer-type SFTTokenizer: expected one'),
        (('--tokenizer-type', 'TikTokenizer'), 'TikTokenizer needs --tokenizer-model'),
        ((*BYTES, '--workers', '0'), '--workers 0: expected 1 or more'),
    ],
)
def test_wrong_flags_are_refused(flags, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        parse_args(['--input', 'a', '--output-prefix', 'b', *flags])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
