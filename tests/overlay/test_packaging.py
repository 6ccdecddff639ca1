"""The wheel, the sdist and the editable install: what is in them, whose files they leave alone, and that they run."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGED = ('megatron', 'pyproject.toml', 'setup.py', 'README.md', 'LICENSE')
LAYERS = 'megatron/overlay/layers/'

INSTALL = """
import importlib, json, sys
import megatron.overlay
megatron.overlay.install()
from megatron.overlay import upstream_of
layered = importlib.import_module(sys.argv[1])
assert vars(upstream_of(sys.argv[1])), 'no definition was taken over'
new = importlib.import_module(sys.argv[2])
print(json.dumps([megatron.overlay.__file__, new.__file__]))
"""


def run(*command: str | Path, **environment: str) -> str:
    """Standard output of a command run in the root folder, where no project lies."""
    done = subprocess.run(
        [*map(str, command)],
        cwd='/',
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, f'{command}\n{done.stdout}\n{done.stderr}'
    return done.stdout


def pip(*arguments: str | Path) -> None:
    """pip, without a network."""
    run(sys.executable, '-m', 'pip', *arguments, PIP_NO_INDEX='1')


def build_wheel(source: Path, out: Path) -> Path:
    """Builds the wheel of an unpacked source tree or of an sdist."""
    pip('wheel', '--quiet', '--no-deps', '--no-build-isolation', '--wheel-dir', out, source)
    (wheel,) = out.glob('*.whl')
    return wheel


def names(wheel: Path) -> set[str]:
    """The files in a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def tree_files() -> set[str]:
    """The layers and new modules of the repository's tree, relative to the folder megatron."""
    megatron = ROOT / 'megatron'
    return {
        str(path.relative_to(megatron))
        for tree in ('core', 'training')
        for path in (megatron / tree).rglob('*.py')
    }


def sample_modules() -> tuple[str, str]:
    """A module that is a layer, and one that is new; both import quickly."""
    return 'megatron.core.jit', 'megatron.core.transformer.hadamard'


def loaded_from(site: Path) -> list[str]:
    """The loader's and a new module's file, in a process that sees `site` and the environment's packages only.

    Without `site.py`, as the environment holds an editable install of this very repository.
    """
    path = os.pathsep.join([str(site), sysconfig.get_path('purelib')])
    return json.loads(run(sys.executable, '-S', '-c', INSTALL, *sample_modules(), PYTHONPATH=path))


@pytest.fixture(scope='module')
def source(tmp_path_factory) -> Path:
    """A copy of what the package is built from, as building writes into the tree."""
    copy = tmp_path_factory.mktemp('source')
    for name in PACKAGED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns('__pycache__'))
        else:
            shutil.copy(ROOT / name, copy)
    return copy


@pytest.fixture(scope='module')
def wheel(source, tmp_path_factory) -> Path:
    return build_wheel(source, tmp_path_factory.mktemp('wheel'))


def test_wheel_holds_every_layer_and_the_pin(wheel):
    inside = {name.removeprefix(LAYERS) for name in names(wheel) if name.startswith(LAYERS)}
    assert inside == tree_files()
    assert 'megatron/overlay/upstream.toml' in names(wheel)


def test_wheel_leaves_the_files_of_megatron_core_alone(wheel):
    theirs = {str(path) for path in metadata.files('megatron-core') or ()}
    assert 'megatron/core/__init__.py' in theirs
    assert not names(wheel) & theirs
    ours = re.compile(r'megatron/(overlay|rl)/|megatron_overlay-[^/]+\.dist-info/')
    assert [name for name in names(wheel) if not ours.match(name)] == []


def test_wheel_requires_the_pinned_upstream(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith('/METADATA')]
        lines = archive.read(name).decode().splitlines()
    pin = tomllib.loads((ROOT / 'megatron/overlay/upstream.toml').read_text())['megatron-core']
    assert f'Requires-Dist: megatron-core=={pin}' in lines
    assert 'Requires-Python: >=3.12' in lines
    assert f'megatron-core=={pin}' in (ROOT / 'requirements.txt').read_text().split()


def test_wheel_from_the_sdist_is_the_same(source, wheel, tmp_path):
    run(sys.executable, '-m', 'build', '--sdist', '--no-isolation', '--outdir', tmp_path, source)
    (sdist,) = tmp_path.glob('megatron_overlay-*.tar.gz')
    assert names(build_wheel(sdist, tmp_path)) == names(wheel)


def test_a_layer_that_was_deleted_does_not_come_back_from_the_build_folder(source, wheel, tmp_path):
    gone = source / 'megatron/core/gone.py'
    gone.write_text('')
    assert f'{LAYERS}core/gone.py' in names(build_wheel(source, tmp_path / 'with'))
    gone.unlink()
    assert names(build_wheel(source, tmp_path / 'without')) == names(wheel)


def test_installed_wheel_runs(wheel, tmp_path):
    pip('install', '--quiet', '--no-deps', '--target', tmp_path, wheel)
    loader, new = loaded_from(tmp_path)
    assert loader == str(tmp_path / 'megatron/overlay/__init__.py')
    assert new == str(tmp_path / LAYERS / 'core/transformer/hadamard.py')

    path = os.pathsep.join([str(tmp_path), sysconfig.get_path('purelib')])
    listed = run(sys.executable, '-S', '-m', 'megatron.overlay', 'list', PYTHONPATH=path)
    layered, new_module = sample_modules()
    assert f'{layered}\n  layer: {tmp_path / LAYERS}' in listed
    (new_modules,) = re.findall('^new modules: (.*)$', listed, re.MULTILINE)
    assert new_module in new_modules.split(', ')
    run(sys.executable, '-S', '-m', 'megatron.overlay', 'check', PYTHONPATH=path)


def test_editable_install_runs_from_the_tree(source, tmp_path):
    # --ignore-installed: pip must not take the environment's own editable install away.
    options = ('--quiet', '--no-deps', '--no-build-isolation', '--ignore-installed')
    pip('install', *options, '--prefix', tmp_path, '--editable', source)
    site = Path(sysconfig.get_path('purelib', vars={'base': str(tmp_path)}))
    # What site.py makes of the .pth file: one folder to search.
    folders = [line for pth in site.glob('*.pth') for line in pth.read_text().split()]
    assert folders == [str(source)]
    loader, new = loaded_from(source)
    assert loader == str(source / 'megatron/overlay/__init__.py')
    assert new == str(source / 'megatron/core/transformer/hadamard.py')
    assert not (source / LAYERS).exists()
