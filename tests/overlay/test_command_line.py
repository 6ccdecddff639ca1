"""``python -m megatron.overlay``: what its commands say and write, and how they run somebody's script."""

import json
import os
import shutil
import subprocess
import sys
import zipfile

import pytest

from tests.overlay.layer_trees import LayerTree, json_of, python, stock_root

SCALER = "megatron.core.optimizer.grad_scaler"
LAYER = '''"""Layer of megatron/core/optimizer/grad_scaler.py.

Same as upstream but for:
- DynamicGradScaler: forgets nothing.
"""
from megatron.overlay import upstream_of

upstream = upstream_of(__name__)


class DynamicGradScaler(upstream.DynamicGradScaler):
    def update(self, found_inf):
        super().update(found_inf)
'''


@pytest.fixture
def tree(tmp_path):
    tree = LayerTree(tmp_path / "tree")
    tree.add(SCALER, LAYER, header="")
    tree.add("megatron.core.brand_new", "", header="")
    tree.pin()
    return tree


def overlay(*arguments, **options):
    return python("-m", "megatron.overlay", *arguments, **options)


def test_list(tree):
    done = overlay("list", trees=[tree])
    assert done.returncode == 0, done.stderr
    block = done.stdout[done.stdout.index(SCALER) :].splitlines()
    assert block[:4] == [
        SCALER,
        f"  layer: {tree.root}/core/optimizer/grad_scaler.py",
        "  takes over: DynamicGradScaler, DynamicGradScaler.update",
        "  - DynamicGradScaler: forgets nothing.",
    ]
    assert done.stdout.count("megatron.core.jit\n  layer: ") == 1, "our own layers too"
    assert "megatron.core.brand_new" in done.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    "symbol", ["DynamicGradScaler.update", f"{SCALER}.DynamicGradScaler.update"]
)
def test_why(tree, symbol):
    done = overlay("why", symbol, trees=[tree])
    assert done.returncode == 0, done.stderr
    head, stock, layer, pin, *bullets = done.stdout.splitlines()
    assert head == f"{SCALER}.DynamicGradScaler.update"
    file, line = stock.split("stock: ")[1].split(":")
    text = open(file).read().splitlines()[int(line) - 1]
    assert text == "class DynamicGradScaler(MegatronGradScaler):"
    assert layer.endswith("/core/optimizer/grad_scaler.py:11")
    assert pin.endswith(" of 0.19.2") and pin.split()[1] in tree.pin_file.read_text()
    assert bullets == ["  - DynamicGradScaler: forgets nothing."]


def test_why_not():
    done = overlay("why", "ConstantGradScaler")
    assert done.returncode == 1
    assert done.stdout.startswith(
        "ConstantGradScaler: no layer takes over a symbol of this name: it is stock"
    )


def test_why_offers_what_was_perhaps_meant():
    assert "Layered: WrappedTorchNorm" in overlay("why", "TorchNorm").stdout


def test_check_finds_a_layer_of_nothing(tmp_path):
    file = tmp_path / "core" / "transformer" / "mpl.py"
    file.parent.mkdir(parents=True)
    file.write_text(
        "from megatron.overlay import upstream_of\n\nupstream = upstream_of(__name__)\n"
    )
    (tmp_path / "upstream.toml").write_text('megatron-core = "0.19.2"\n')
    environment = {**os.environ, "MEGATRON_OVERLAY_PATH": str(tmp_path)}
    command = [sys.executable, "-m", "megatron.overlay", "check"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "mpl.py is a layer, but the wheel has no such file" in done.stdout


def test_check(tree):
    done = overlay("check", trees=[tree])
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"ok     {SCALER}\n" in done.stdout
    assert done.stdout.splitlines()[-1] == "every layer fits the installed wheel"
    tree.pin_file.write_text(tree.pin_file.read_text().replace("Scaler.update", "Scaler.gone"))
    done = overlay("check", trees=[tree])
    assert done.returncode == 1
    block = done.stdout[done.stdout.index(f"BROKEN {SCALER}") :].splitlines()
    assert block[1].startswith("         DynamicGradScaler.gone: the target of ")
    assert block[2].startswith("         DynamicGradScaler.update: ")
    assert "is not pinned" in block[2]
    assert block[-1] == "1 layers do not fit the installed wheel"


def test_check_finds_a_layer_that_cannot_run(tree):
    tree.add(SCALER, LAYER + "x = upstream.gone\n", header="")
    done = overlay("check", trees=[tree])
    assert done.returncode == 1
    assert f"BROKEN {SCALER}\n" in done.stdout and "the target is gone" in done.stdout


def test_check_finds_a_layer_that_is_gone(tree):
    (tree.root / "core/optimizer/grad_scaler.py").unlink()
    done = overlay("check", trees=[tree])
    assert done.returncode == 1
    assert "pinned (DynamicGradScaler, DynamicGradScaler.update), but gone from" in done.stdout


@pytest.fixture
def other_upstream(tree, tmp_path):
    """A folder with the stock files of all layers, and the way to doctor that of grad_scaler."""
    for module in json_of("-c", MODULES, trees=[tree]):
        file = module.replace(".", "/") + ".py"
        (tmp_path / "other" / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(stock_root().parent / file, tmp_path / "other" / file)
    return tmp_path / "other"


MODULES = """
import json
from megatron.overlay import loader
finder = loader.Finder(loader.trees())
print(json.dumps([module for root in finder.roots for module in finder.layers_of(root)]))
"""
CHANGES = {
    "none": (lambda text: text, []),
    "comment": (lambda text: text.replace("    def update(", "    # Why.\n    def update("), []),
    "another class": (lambda text: text.replace("return dict()", "return {}"), []),
    "method": (
        lambda text: text.replace("self._hysteresis_tracker -= 1", "self._hysteresis_tracker -= 2"),
        ["DynamicGradScaler.update: changed in"],
    ),
    "bases": (
        lambda text: text.replace(
            "DynamicGradScaler(MegatronGradScaler)", "DynamicGradScaler(ABC)"
        ),
        ["DynamicGradScaler: changed in"],
    ),
    "class gone": (
        lambda text: text.replace("DynamicGradScaler", "MovingGradScaler"),
        ["takes over upstream.DynamicGradScaler, but"],
    ),
    "file gone": (None, ["pinned (DynamicGradScaler, DynamicGradScaler.update), but gone from"]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_check_against_a_folder(tree, other_upstream, change):
    doctor, expected = CHANGES[change]
    file = other_upstream / "megatron/core/optimizer/grad_scaler.py"
    if doctor is None:
        file.unlink()
    else:
        text = file.read_text()
        assert (doctor(text) != text) == (change != "none")
        file.write_text(doctor(text))
    done = overlay("check", "--against", other_upstream, trees=[tree])
    assert done.returncode == bool(expected), done.stdout + done.stderr
    start = done.stdout.index(f"{SCALER}\n")
    lines = [line for line in done.stdout[start:].splitlines()[1:] if line.startswith("         ")]
    assert len(lines) == len(expected)
    assert all(part in line for part, line in zip(expected, lines))
    verdict = f"{len(expected)} layers do not fit" if expected else "every layer fits"
    assert done.stdout.splitlines()[-1] == f"{verdict} {other_upstream}"


def test_check_against_a_wheel_file(tree, other_upstream, tmp_path):
    """That of a version which is not the pinned one, too."""
    wheel = tmp_path / "megatron_core-9.9.9-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path in other_upstream.rglob("*.py"):
            archive.write(path, path.relative_to(other_upstream))
        archive.writestr(
            "megatron_core-9.9.9.dist-info/METADATA", "Name: megatron-core\nVersion: 9.9.9\n"
        )
    done = overlay("check", "--against", wheel, trees=[tree])
    assert (done.returncode, done.stdout.count("BROKEN")) == (0, 0), done.stdout + done.stderr
    done = overlay("check", "--against", wheel.with_name("nothing.whl"), trees=[tree])
    assert done.returncode == 1 and "nothing.whl: there is no such file or folder" in done.stderr
    done = overlay("check", "--against", "9.9.9", trees=[tree], PIP_NO_INDEX="1")
    assert done.returncode == 1
    assert "9.9.9: neither a path nor a version that pip can fetch" in done.stderr


def test_check_against_is_for_those_who_have_another_version_installed(
    tree, other_upstream, tmp_path
):
    info = tmp_path / "path/megatron_core-9.9.9.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Name: megatron-core\nVersion: 9.9.9\n")
    options = {"trees": [tree], "path": [info.parent]}
    done = overlay("check", **options)
    assert done.returncode == 1
    assert done.stderr.startswith("megatron.overlay: megatron-core 9.9.9 is installed, but")
    assert overlay("check", "--against", other_upstream, **options).returncode == 0


def test_refresh_is_idempotent(tree):
    before = tree.pin_file.read_text()
    done = overlay("refresh", tree.root, trees=[tree])
    assert done.returncode == 0
    assert done.stdout == f"{tree.pin_file}: 2 symbols of megatron-core 0.19.2\n"
    assert tree.pin_file.read_text() == before
    assert before.splitlines()[2] == 'megatron-core = "0.19.2"'


def test_refresh_that_fails_leaves_the_pin(tree):
    before = tree.pin_file.read_text()
    tree.add(SCALER, LAYER + "x = upstream.gone\n", header="")
    done = overlay("refresh", tree.root, trees=[tree])
    assert done.returncode == 1
    assert done.stderr.startswith("megatron.overlay: ") and "Traceback" not in done.stderr
    assert tree.pin_file.read_text() == before


def test_refresh_of_a_tree_that_is_not_in_use(tmp_path):
    done = overlay("refresh", tmp_path)
    assert done.returncode == 1 and "name it in MEGATRON_OVERLAY_PATH" in done.stderr


SCRIPT = """
import json, os, sys
from megatron.core.jit import enable_jit_fuser
import beside
print(json.dumps({
    "argv": sys.argv,
    "name": __name__,
    "file": __file__,
    "main": sys.modules["__main__"].__dict__ is globals(),
    "beside": beside.value,
    "cpu": sys.modules["megatron.overlay.cpu"].active(),
    "layered": enable_jit_fuser.__code__.co_filename,
    "rank": os.environ.get("RANK"),
}))
if "--fail" in sys.argv:
    sys.exit(3)
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "scripts/script.py"
    path.parent.mkdir()
    path.write_text(SCRIPT)
    (path.parent / "beside.py").write_text("value = 7\n")
    return path


def test_run(script):
    done = overlay("run", script, "--device", "cuda", "--fail", "-x", "a b")
    assert done.returncode == 3, done.stderr
    found = json.loads(done.stdout)
    assert found["argv"] == [str(script), "--device", "cuda", "--fail", "-x", "a b"]
    assert (found["name"], found["file"]) == ("__main__", str(script))
    assert found["main"] and found["beside"] == 7
    assert found["cpu"] is False, "the script's own --device says so"
    assert (
        found["layered"].endswith("megatron/core/jit.py")
        and "site-packages" not in found["layered"]
    )


def test_run_of_a_script_in_another_megatron(script):
    """Python would import that one: the layers are checked against it, and not against the wheel."""
    (script.parent / "megatron/core").mkdir(parents=True)
    (script.parent / "megatron/core/__init__.py").touch()
    done = overlay("run", script)
    assert done.returncode == 1
    assert f"but gone from {script.parent}/megatron or from" in done.stderr


def test_run_under_torchrun(script, tmp_path):
    """Each rank gets the layers; run's own --device goes before the script's."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    done = python(
        *launcher,
        "megatron.overlay",
        "run",
        "--device",
        "cpu",
        script,
        "--device",
        "cuda",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert sorted(one["rank"] for one in found) == ["0", "1"]
    assert [one["cpu"] for one in found] == [True, True]
    assert found[0]["argv"] == [str(script), "--device", "cuda"]


def test_a_traceback_of_the_script_is_its_own(script):
    script.write_text("def f():\n    raise KeyError('x')\nf()\n")
    done = overlay("run", "--device", "cuda", script)
    assert done.returncode == 1
    assert done.stderr.endswith(
        f'  File "{script}", line 2, in f\n    raise KeyError(\'x\')\nKeyError: \'x\'\n'
    )
