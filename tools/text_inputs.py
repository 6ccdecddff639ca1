"""The inputs of tools/preprocess_data.py: which files they are, their records, and each record's texts.

A record is a line of a JSONL file or the whole of a text file.
"""

import json
from pathlib import Path
from typing import Iterator, NamedTuple, Sequence

JSONL_SUFFIXES = ('.jsonl', '.ndjson', '.json')
FORMATS = ('auto', 'jsonl', 'text', 'tree')


class DataError(ValueError):
    """The input cannot be made into a dataset; the message names the file, the line and what to do."""


class Record(NamedTuple):
    """A line of a JSONL file (``line`` from 1), or a text file still to be read (``line`` 0, ``raw`` None)."""

    path: str
    line: int = 0
    raw: bytes | None = None


def list_files(names: Sequence[str], kind: str, patterns: Sequence[str]) -> list[tuple[Path, bool]]:
    """The files that ``names`` stand for, in order, each with whether it is JSONL.

    Args:
        names: files and folders.
        kind: one of ``FORMATS``; "auto": a folder is a tree, JSONL_SUFFIXES tell JSONL, and the rest is text.
        patterns: globs that choose the files of a tree.

    Raises:
        DataError: an input is missing, is not of the given kind, or is a tree without a matching file.
    """
    files: list[tuple[Path, bool]] = []
    for name in names:
        path = Path(name)
        if not path.exists():
            raise DataError(f'--input {name}: no such file or folder')
        guess = 'tree' if path.is_dir() else 'jsonl' if path.suffix in JSONL_SUFFIXES else 'text'
        one = guess if kind == 'auto' else kind
        if (one == 'tree') != path.is_dir():
            what = 'a folder' if path.is_dir() else 'a file'
            raise DataError(f'--input {name}: {what}, which --input-format {kind} does not take')
        if one == 'tree':
            files += [(file, False) for file in _tree(path, patterns)]
        else:
            files.append((path, one == 'jsonl'))
    return files


def _tree(root: Path, patterns: Sequence[str]) -> list[Path]:
    found = {file for pattern in patterns for file in root.rglob(pattern) if file.is_file()}
    shown = [f for f in found if not any(p.startswith('.') for p in f.relative_to(root).parts)]
    if not shown:
        raise DataError(f'--input {root}: no file in it matches --patterns {" ".join(patterns)}')
    return sorted(shown, key=lambda file: file.relative_to(root).as_posix())


def read_records(files: Sequence[tuple[Path, bool]]) -> Iterator[Record]:
    """The records of ``list_files``'s files. Text files are left to whoever encodes them, in parallel."""
    for path, is_jsonl in files:
        if is_jsonl:
            with open(path, 'rb') as stream:
                for number, raw in enumerate(stream, 1):
                    yield Record(str(path), number, raw)
        else:
            yield Record(str(path))


def texts_of(record: Record, raw: bytes, keys: Sequence[str]) -> dict[str, str]:
    """The texts in ``raw``, the record's bytes, by key; a text file's is the first key's, a blank line's are empty.

    Raises:
        DataError: "PATH:LINE: why"; not UTF-8, not JSON, no object, a key missing or not a string.
    """
    where = f'{record.path}:{record.line}'
    try:
        text = raw.decode('utf-8-sig')
    except UnicodeDecodeError as error:
        # A text file's line is that of the byte.
        line = record.line or error.object.count(b'\n', 0, error.start) + 1
        byte = error.object[error.start]
        raise DataError(
            f'{record.path}:{line}: not UTF-8 (byte 0x{byte:02x}: {error.reason})'
        ) from None
    if not record.line:
        return {keys[0]: text}
    if not text.strip():
        return dict.fromkeys(keys, '')
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f'{where}: invalid JSON ({error.msg}, column {error.colno})') from None
    except (ValueError, RecursionError) as error:  # a number too long, brackets too deep
        raise DataError(f'{where}: JSON that cannot be read ({error})') from None
    if not isinstance(value, dict):
        raise DataError(f'{where}: a JSON {type(value).__name__}, expected an object')
    for key in keys:
        if key not in value:
            raise DataError(f'{where}: no key {key!r} (--json-keys), only {sorted(value)}')
        if not isinstance(value[key], str):
            kind = type(value[key]).__name__
            raise DataError(f'{where}: key {key!r} holds a {kind}, expected a string')
        try:
            value[key].encode()
        except UnicodeEncodeError:
            raise DataError(f'{where}: key {key!r} holds half a surrogate pair, no text') from None
    return {key: value[key] for key in keys}
