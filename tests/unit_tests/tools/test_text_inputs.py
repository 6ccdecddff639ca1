"""tools/text_inputs.py: which files an input stands for, and what is said of a record that holds no text."""

import json

import pytest

from tools.text_inputs import DataError, Record, list_files, read_records, texts_of


def write(path, data):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def test_a_tree_gives_its_visible_matches_in_the_order_of_their_paths(tmp_path):
    for name in (
        'b.py',
        'a/z.py',
        'a.py',
        'a/.hidden.py',
        '.git/hook.py',
        'a/note.md',
        'a/table.csv',
    ):
        write(tmp_path / name, b'x')
    files = list_files([str(tmp_path)], 'auto', ['*.py', '*.md', 'z.*'])
    assert [str(file.relative_to(tmp_path)) for file, _ in files] == [
        'a.py',
        'a/note.md',
        'a/z.py',
        'b.py',
    ]


def test_files_are_told_apart_by_their_names_and_keep_their_order(tmp_path):
    names = ['z.jsonl', 'a.json', 'm.ndjson', 'b.txt', 'README']
    paths = [write(tmp_path / name, b'') for name in names]
    assert list_files(list(map(str, paths)), 'auto', []) == list(
        zip(paths, [True, True, True, False, False])
    )
    assert list_files([str(paths[3])], 'jsonl', []) == [(paths[3], True)]
    assert list_files([str(paths[0])], 'text', []) == [(paths[0], False)]


def test_unusable_inputs_are_named(tmp_path):
    file, folder = str(write(tmp_path / 'tree/a.txt', b'x')), str(tmp_path / 'tree')
    for name, kind, message in [
        (str(tmp_path / 'gone.txt'), 'auto', r'gone\.txt: no such file'),
        (folder, 'auto', r'tree: no file in it matches --patterns \*\.py \*\.md'),
        (folder, 'jsonl', 'tree: a folder, which --input-format jsonl does not take'),
        (file, 'tree', r'a\.txt: a file, which --input-format tree does not take'),
    ]:
        with pytest.raises(DataError, match=message):
            list_files([name], kind, ['*.py', '*.md'])


def test_records_are_the_lines_of_jsonl_and_whole_text_files(tmp_path):
    lines = write(tmp_path / 'a.jsonl', b'one\r\ntwo\x0bstill two\nlast')
    text = write(tmp_path / 'b.txt', b'a\nb\n')
    assert list(read_records([(text, False), (lines, True)])) == [
        Record(str(text), 0, None),
        Record(str(lines), 1, b'one\r\n'),
        Record(str(lines), 2, b'two\x0bstill two\n'),
        Record(str(lines), 3, b'last'),
    ]


def test_text_is_kept_as_it_is_but_for_a_byte_order_mark():
    raw = '\ufefftab\there\r\nüber 漢字 🙂\n\n'.encode()
    assert texts_of(Record('a.txt'), raw, ['text']) == {'text': 'tab\there\r\nüber 漢字 🙂\n\n'}


def test_a_line_gives_each_key_and_a_blank_one_empty_texts():
    line = json.dumps({'text': 'a\nb', 'title': 'ü', 'n': 1}).encode() + b'\n'
    assert texts_of(Record('a.jsonl', 3), line, ['title', 'text']) == {'title': 'ü', 'text': 'a\nb'}
    assert texts_of(Record('a.jsonl', 4), b' \n', ['title', 'text']) == {'title': '', 'text': ''}


@pytest.mark.parametrize(
    'line, reason',
    [
        (b'{"text": "a"', r"invalid JSON \(Expecting ',' delimiter, column 13\)"),
        (b'{"text": "a"} {"text": "b"}', r'invalid JSON \(Extra data, column 15\)'),
        (b'{"text": "\xe9"}', r'not UTF-8 \(byte 0xe9: '),
        (b'["a"]', 'a JSON list, expected an object'),
        (b'{"txt": "a", "id": 7}', r"no key 'text' \(--json-keys\), only \['id', 'txt'\]"),
        (b'{"text": null}', "key 'text' holds a NoneType, expected a string"),
        (b'{"text": ["a"]}', "key 'text' holds a list, expected a string"),
        (b'{"text": "\\ud83d"}', "key 'text' holds half a surrogate pair"),
        (b'{"text": "a", "n": ' + b'9' * 5000 + b'}', 'JSON that cannot be read'),
        (b'[' * 200_000, 'JSON that cannot be read'),
    ],
)
def test_a_bad_line_is_named_by_file_number_and_reason(line, reason):
    with pytest.raises(DataError, match=rf'^corpus\.jsonl:17: {reason}'):
        texts_of(Record('corpus.jsonl', 17), line, ['text'])


def test_a_text_file_that_is_not_utf8_is_named_by_the_line_of_the_byte():
    raw = b'\xef\xbb\xbf\n\n\xff'  # the mark is not part of the line count, nor does it shift it
    with pytest.raises(DataError, match=r'^a\.txt:3: not UTF-8 \(byte 0xff: '):
        texts_of(Record('a.txt'), raw, ['text'])
