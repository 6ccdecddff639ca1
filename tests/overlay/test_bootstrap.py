"""tools/bootstrap.sh with fake interpreters and a fake pip: which Python it takes, and when it installs again."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BASH = shutil.which('bash') or '/bin/bash'

# How a fake interpreter gets unfit: run before the script's own probe.
OLD = 'import sys; sys.version_info = (3, 11, 7)'
TOO_NEW = 'import sys; sys.version_info = (3, 14, 0)'
NO_VENV = 'import sys; sys.modules["ensurepip"] = None'
FIT = 'import sys; sys.version_info = (3, 12, 1)'

SHIM = 'echo "pyenv: python3.12: command not found" >&2; exit 127'


def executable(path: Path, body: str) -> Path:
    """A bash script at `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'#!{BASH}\n{body}\n')
    path.chmod(0o755)
    return path


def interpreter(path: Path, state: str) -> Path:
    """A Python at `path` that answers `-c CODE` as one in `state` would."""
    return executable(path, f"exec '{sys.executable}' -c '{state}; exec(sys.argv[1])' \"$2\"")


@pytest.fixture
def find_python(tmp_path):
    """Runs the search with nothing on the path but tmp_path/bin and tmp_path/bin2."""

    def run(**extra: str) -> subprocess.CompletedProcess[str]:
        environment = {'PATH': f'{tmp_path}/bin:{tmp_path}/bin2', 'HOME': str(tmp_path), **extra}
        command = [BASH, str(ROOT / 'tools/bootstrap.sh'), '--find-python']
        return subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60
        )

    return run


def test_takes_python312_from_the_path(find_python, tmp_path):
    good = interpreter(tmp_path / 'bin/python3.12', FIT)
    interpreter(tmp_path / 'bin/python3.13', FIT)
    found = find_python()
    assert (found.returncode, found.stdout, found.stderr) == (0, f'{good}\n', '')


@pytest.mark.parametrize('state', [OLD, TOO_NEW, NO_VENV])
def test_passes_over_an_unfit_python3(find_python, tmp_path, state):
    interpreter(tmp_path / 'bin/python3', state)
    good = interpreter(tmp_path / 'bin2/python3', FIT)
    assert find_python().stdout == f'{good}\n'


def test_passes_over_a_shim_that_fails_and_looks_further_down_the_path(find_python, tmp_path):
    executable(tmp_path / 'bin/python3.12', SHIM)
    good = interpreter(tmp_path / 'bin2/python3.12', FIT)
    assert find_python().stdout == f'{good}\n'


@pytest.mark.parametrize('root', ['.pyenv', 'elsewhere'])
def test_looks_into_pyenv_behind_its_shims(find_python, tmp_path, root):
    executable(tmp_path / 'bin/python3.12', SHIM)
    interpreter(tmp_path / root / 'versions/3.11.9/bin/python', OLD)
    good = interpreter(tmp_path / root / 'versions/3.13.2/bin/python', FIT)
    extra = {} if root == '.pyenv' else {'PYENV_ROOT': str(tmp_path / root)}
    assert find_python(**extra).stdout == f'{good}\n'


def test_lets_uv_install_one_when_there_is_no_other(find_python, tmp_path):
    interpreter(tmp_path / 'bin/python3', OLD)
    good = tmp_path / 'uv/python3.12'
    interpreter(tmp_path / 'hidden', FIT)
    executable(
        tmp_path / 'bin/uv',
        f"""case "$*" in
            "python find"*) [ -f '{good}' ] && echo '{good}' ;;
            "python install 3.12") echo uv-was-here; '{shutil.which("mkdir")}' '{good.parent}'
                '{shutil.which("cp")}' '{tmp_path}/hidden' '{good}' ;;
            *) exit 9 ;;
        esac""",
    )
    found = find_python()
    assert (found.returncode, found.stdout) == (0, f'{good}\n')
    assert 'uv-was-here' in found.stderr
    again = find_python()
    assert (again.stdout, again.stderr) == (f'{good}\n', '')


def test_without_any_says_what_was_tried_and_what_to_install(find_python, tmp_path):
    interpreter(tmp_path / 'bin/python3', OLD)
    interpreter(tmp_path / 'bin/python3.13', NO_VENV)
    executable(tmp_path / 'bin/python3.12', SHIM)
    found = find_python()
    assert (found.returncode, found.stdout) == (1, '')
    assert f'{tmp_path}/bin/python3: it is Python 3.11\n' in found.stderr
    assert f'{tmp_path}/bin/python3.12: pyenv: python3.12: command not found\n' in found.stderr
    assert 'ensurepip' in found.stderr and 'install python3.' in found.stderr
    for advice in ('apt install python3.12', 'brew install', 'uv python install', 'pyenv install'):
        assert advice in found.stderr


def test_the_variable_PYTHON_decides_alone(find_python, tmp_path):
    interpreter(tmp_path / 'bin/python3.12', FIT)
    chosen = interpreter(tmp_path / 'mine/python', FIT)
    assert find_python(PYTHON=str(chosen)).stdout == f'{chosen}\n'

    unfit = interpreter(tmp_path / 'mine/old', OLD)
    found = find_python(PYTHON=str(unfit))
    assert (found.returncode, found.stdout) == (1, '')
    assert f'PYTHON={unfit} cannot be used: it is Python 3.11.' in found.stderr

    missing = find_python(PYTHON=str(tmp_path / 'none'))
    assert (missing.returncode, missing.stdout) == (1, '')
    assert f'PYTHON={tmp_path}/none cannot be used' in missing.stderr


@pytest.fixture
def checkout(tmp_path):
    """A checkout whose Python makes venvs of fake interpreters; their pip only writes its arguments to `pip.log`.

    pip fails once for every file `fail` that it finds, as an install cut off would.
    """
    root = tmp_path / 'check out'
    (root / 'tools').mkdir(parents=True)
    shutil.copy(ROOT / 'tools/bootstrap.sh', root / 'tools')
    (root / 'requirements.txt').write_text('torch==2.11.0\n')
    inside_venv = executable(
        tmp_path / 'venv_python',
        f"""[ "$1" = -c ] && exec '{sys.executable}' -c '{FIT}; exec(sys.argv[1])' "$2"
        [ "$1" = -S ] || [ "$3" = --version ] && exit 0
        echo "${{@:3}}" >> '{tmp_path}/pip.log'
        if [ -f '{tmp_path}/fail' ]; then rm '{tmp_path}/fail'; exit 1; fi""",
    )
    base = executable(
        tmp_path / 'base_python',
        f"""[ "$1" = -c ] && exec '{sys.executable}' -c '{FIT}; exec(sys.argv[1])' "$2"
        [ "$2" = venv ] || exit 9
        mkdir -p "$3/bin" "$3/lib/python3.12/site-packages"
        cp '{inside_venv}' "$3/bin/python"
        echo "VIRTUAL_ENV='$3'" > "$3/bin/activate" """,
    )

    def bootstrap(root: Path = root) -> tuple[int, list[str]]:
        """Exit status, and the pip calls that were made."""
        log = tmp_path / 'pip.log'
        log.write_text('')
        done = subprocess.run(
            [BASH, str(root / 'tools/bootstrap.sh')],
            env={**os.environ, 'PYTHON': str(base)},
            capture_output=True,
            text=True,
            timeout=60,
        )
        return done.returncode, log.read_text().splitlines()

    return root, bootstrap


def full_install(root: Path) -> list[str]:
    """The pip calls of one whole installation."""
    editable = f'install --quiet --no-deps --no-build-isolation --editable {root}'
    return [f'install -r {root}/requirements.txt', editable]


def test_installs_once_and_again_when_the_requirements_change(checkout):
    root, bootstrap = checkout
    assert bootstrap() == (0, full_install(root))
    assert bootstrap() == (0, [])
    (root / 'requirements.txt').write_text('torch==2.12.0\n')
    assert bootstrap() == (0, full_install(root))
    assert bootstrap() == (0, [])


def test_an_install_that_failed_is_finished_by_the_next_call(checkout, tmp_path):
    root, bootstrap = checkout
    (tmp_path / 'fail').touch()
    assert bootstrap() == (1, full_install(root)[:1])
    assert bootstrap() == (0, full_install(root))

    # The same when an environment that was whole is being updated, and then the update is taken back.
    before = (root / 'requirements.txt').read_text()
    (root / 'requirements.txt').write_text('torch==2.12.0\n')
    (tmp_path / 'fail').touch()
    assert bootstrap()[0] == 1
    (root / 'requirements.txt').write_text(before)
    assert bootstrap() == (0, full_install(root))


def test_a_package_cut_off_by_a_kill_is_installed_again(checkout, tmp_path):
    root, bootstrap = checkout
    (tmp_path / 'fail').touch()
    bootstrap()
    packages = root / '.venv/lib/python3.12/site-packages'
    for name in ('whole-1.0', 'half-2.0'):
        (packages / f'{name}.dist-info').mkdir()
        (packages / f'{name}.dist-info/METADATA').touch()
    (packages / 'whole-1.0.dist-info/INSTALLER').touch()
    assert bootstrap()[0] == 0
    assert [path.name for path in packages.iterdir()] == ['whole-1.0.dist-info']


def test_an_environment_that_no_longer_runs_is_made_anew(checkout):
    root, bootstrap = checkout
    bootstrap()
    (root / '.venv/left').touch()
    executable(root / '.venv/bin/python', 'exit 127')
    assert bootstrap() == (0, full_install(root))
    assert not (root / '.venv/left').exists()
    assert bootstrap() == (0, [])


def test_a_checkout_that_was_moved_gets_a_new_environment(checkout):
    root, bootstrap = checkout
    bootstrap()
    moved = root.rename(root.with_name('moved'))
    assert bootstrap(moved) == (0, full_install(moved))
    assert f"'{moved}/.venv'" in (moved / '.venv/bin/activate').read_text()
