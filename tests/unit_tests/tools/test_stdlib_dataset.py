"""tools/stdlib_dataset.py on a small tree of its own, and on this Python's."""

import json
import math
import platform
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy
import pytest

from megatron.core.datasets.indexed_dataset import IndexedDataset
from tools import preprocess_data, stdlib_dataset

ROOT = Path(__file__).resolve().parents[3]
EXCLUDED = (
    'site-packages/pip/main.py',
    'dist-packages/apt.py',
    'test/test_os.py',
    'json/tests/test_json.py',
    'idlelib/idle_test/test_run.py',
)


@pytest.fixture
def sources(tmp_path):
    """Two modules that count, aab and b, and files that do not."""
    root = tmp_path / 'lib'
    for name, content in {
        'b.py': b'b',
        'json/tool.py': b'aab',
        'json/__init__.py': b'',
        'json/table.txt': b'text',
        'latin.py': b'# \xe9',
        **dict.fromkeys(EXCLUDED, b'excluded'),
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root


def test_the_sources_are_sorted_and_the_excluded_left_out(sources):
    found = [path.relative_to(sources).as_posix() for path in stdlib_dataset.source_files(sources)]
    assert found == ['b.py', 'json/__init__.py', 'json/tool.py']


def test_the_sources_of_this_python():
    root = Path(sysconfig.get_paths()['stdlib'])
    found = [path.relative_to(root).as_posix() for path in stdlib_dataset.source_files(root)]
    assert {'argparse.py', 'json/decoder.py', 'unittest/case.py'} <= set(found)
    assert not [name for name in found if name.startswith(('test/', 'site-packages/'))]


def test_dataset_and_statistics(sources, tmp_path):
    output = tmp_path / 'out'
    stats, found = stdlib_dataset.build(output, sources)
    assert not found
    dataset = IndexedDataset(str(output / 'stdlib_text_document'))
    assert [dataset[i].tolist() for i in range(len(dataset))] == [[98, 256], [97, 97, 98, 256]]
    assert (stats['documents'], stats['tokens'], stats['bytes']) == (2, 6, 4)
    assert (stats['vocab_size'], stats['eod']) == (258, 256)
    assert stats['ln_vocab'] == pytest.approx(math.log(258))
    assert stats['unigram_entropy'] == pytest.approx(math.log(3))  # a, b and eod, twice each
    assert json.loads((output / 'stats.json').read_text()) == stats


def test_unigram_entropy():
    assert stdlib_dataset.unigram_entropy(numpy.array([0, 7, 0])) == 0.0
    expected = 0.25 * math.log(4) + 0.75 * math.log(4 / 3)
    assert stdlib_dataset.unigram_entropy(numpy.array([30, 0, 10])) == pytest.approx(expected)


def test_a_second_build_finds_the_first_without_importing_torch(sources, tmp_path):
    output = tmp_path / 'out'
    stats, _ = stdlib_dataset.build(output, sources)
    (sources / 'new.py').write_text('new')  # the standard library of one Python does not change
    assert stdlib_dataset.build(output, sources) == (stats, True)
    script = (
        'import sys; from pathlib import Path; from tools import stdlib_dataset\n'
        'print(stdlib_dataset.build(*map(Path, sys.argv[1:]))[1], "torch" in sys.modules)'
    )
    command = [sys.executable, '-c', script, str(output), str(sources)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == 'True False\n'


def truncate(monkeypatch, output):
    data = output / 'stdlib_text_document.bin'
    data.write_bytes(data.read_bytes()[:-2])


def another_python(monkeypatch, output):
    monkeypatch.setattr(platform, 'python_version', lambda: '3.99.0')


def another_tokenizer(monkeypatch, output):
    flags = (*stdlib_dataset.TOKENIZER_FLAGS, '--tokenizer-special-tokens', '<a>')
    monkeypatch.setattr(stdlib_dataset, 'TOKENIZER_FLAGS', flags)


def no_statistics(monkeypatch, output):
    (output / 'stats.json').unlink()


@pytest.mark.parametrize('change', [truncate, another_python, another_tokenizer, no_statistics])
def test_whatever_differs_is_built_anew(change, sources, tmp_path, monkeypatch):
    output = tmp_path / 'out'
    stdlib_dataset.build(output, sources)
    change(monkeypatch, output)
    stats, found = stdlib_dataset.build(output, sources)
    assert not found
    assert (output / 'stdlib_text_document.bin').stat().st_size == 2 * stats['tokens'] == 12
    assert stdlib_dataset.build(output, sources) == (stats, True)


def test_a_failed_build_leaves_no_statistics(sources, tmp_path, monkeypatch):
    output = tmp_path / 'out'
    stdlib_dataset.build(output, sources)
    another_python(monkeypatch, output)

    def fail(args):
        raise OSError('disk full')

    monkeypatch.setattr(preprocess_data, 'preprocess', fail)
    with pytest.raises(OSError, match='disk full'):
        stdlib_dataset.build(output, sources)
    assert not (output / 'stats.json').exists()


def test_a_python_without_sources_is_refused(tmp_path):
    with pytest.raises(ValueError, match='expected the sources of the standard library'):
        stdlib_dataset.build(tmp_path / 'out', tmp_path)
