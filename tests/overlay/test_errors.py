"""Each of the loader's errors, on the installed wheel: its type, and that it names the culprit and the way out."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.overlay.layer_trees import ROOT, LayerTree, error_of, json_of, python, stock_root

INSTALL = "import megatron.overlay\nmegatron.overlay.install('cuda')\n"
SCALER = "megatron.core.optimizer.grad_scaler"


@pytest.fixture
def tree(tmp_path):
    return LayerTree(tmp_path / "tree")


def fake_wheel(folder: Path, version: str) -> Path:
    """A folder for PYTHONPATH on which megatron-core is installed in another version."""
    info = folder / f"megatron_core-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Name: megatron-core\nVersion: {version}\n")
    return folder


def test_the_error_is_no_import_error():
    """Megatron-LM takes an ImportError for a missing optional package, and carries on."""
    from megatron.overlay import OverlayError

    assert issubclass(OverlayError, RuntimeError) and not issubclass(OverlayError, ImportError)


def test_install_after_a_megatron_import():
    script = "from megatron.core import jit\nprint(jit.enable_jit_fuser.__code__.co_filename)\n"
    done = python("-c", script + INSTALL)
    assert done.stdout == f"{stock_root()}/core/jit.py\n", "before install all is stock"
    assert (
        "OverlayError: megatron.overlay.install() came too late: megatron.core was" in done.stderr
    )
    assert "python -m megatron.overlay run SCRIPT" in done.stderr


def test_unknown_device():
    with pytest.raises(ValueError, match="device='tpu': expected 'auto', 'cuda' or 'cpu'"):
        __import__("megatron.overlay").overlay.install("tpu")


def test_megatron_core_missing(tmp_path):
    """Without site-packages nothing but the standard library and this repository is there."""
    done = python("-S", "-c", INSTALL, cwd=tmp_path)
    assert done.returncode == 1
    assert "OverlayError: megatron-core is not installed" in done.stderr
    assert "pip install megatron-core==0.19.2" in done.stderr


def test_wrong_version(tmp_path):
    path = [fake_wheel(tmp_path, "0.20.0")]
    error = error_of(INSTALL, path=path)
    assert "megatron-core 0.20.0 is installed, but the layers are pinned to 0.19.2" in error
    assert "check --against 0.20.0" in error
    script = "import sys, json\nsys.modules['torch'] = None\n" + INSTALL
    done = python("-c", script, path=path, MEGATRON_OVERLAY_ALLOW_DRIFT="1")
    assert (
        "RuntimeWarning: MEGATRON_OVERLAY_ALLOW_DRIFT=1: megatron-core 0.20.0 is installed"
        in done.stderr
    )
    assert "import of torch halted" in done.stderr, "it went on to the device"


OLD = "import sys; sys.version_info = (3, 11, 7, 'final', 0)\n"


def old_pythons() -> list[str]:
    """Interpreters of this machine that are too old, by whatever name."""
    found = [shutil.which(f"python3.{minor}") for minor in (8, 9, 10, 11)]
    found += [str(path) for path in Path.home().glob(".pyenv/versions/3.*/bin/python3")]
    probe = "import sys; sys.exit(sys.version_info >= (3, 12))"
    return [
        one
        for one in found
        if one and not subprocess.run([one, "-c", probe], timeout=60).returncode
    ]


def test_python_below_3_12():
    error = error_of(OLD + "import megatron.overlay")
    assert "OverlayError: Python 3.11.7 is too old: megatron-core's wheel" in error
    assert "python3.12 or python3.13" in error


def test_really_old_pythons_say_so_too():
    """And do not fail over what only a newer Python can parse or import."""
    pythons = old_pythons()
    if not pythons:
        pytest.skip("this machine has no Python below 3.12")
    for interpreter in pythons:
        done = python("-m", "megatron.overlay", "list", interpreter=interpreter)
        assert done.stderr.splitlines()[-1].startswith(
            "megatron.overlay.errors.OverlayError: Python 3."
        )


def test_target_symbol_gone(tree):
    layer = tree.add(SCALER, "class GradScaler(upstream.GradScaler):\n    pass\n")
    tree.pin_file.write_text('megatron-core = "0.19.2"\n')
    error = error_of(INSTALL, trees=[tree])
    assert f"{layer} takes over upstream.GradScaler, but" in error
    assert "grad_scaler.py does not define GradScaler: the target is gone" in error


def pinned(tree: LayerTree) -> str:
    tree.add(
        SCALER,
        "class DynamicGradScaler(upstream.DynamicGradScaler):\n    def update(self, x): pass\n",
    )
    tree.pin()
    text = tree.pin_file.read_text()
    assert text.count("\n\"") == 2, "the class, and the method"
    return text


def test_target_method_gone(tree):
    text = pinned(tree)
    tree.pin_file.write_text(text.replace("DynamicGradScaler.update", "DynamicGradScaler.refresh"))
    error = error_of(INSTALL, trees=[tree])
    assert "DynamicGradScaler.refresh: the target of" in error and "is gone from" in error
    assert "DynamicGradScaler.update:" in error and "it is not pinned" in error


def test_target_module_gone(tree):
    text = pinned(tree)
    tree.pin_file.write_text(text.replace(SCALER, "megatron.core.optimizer.scaler"))
    error = error_of(INSTALL, trees=[tree])
    assert "megatron.core.optimizer.scaler: pinned (DynamicGradScaler, " in error
    assert f"but gone from {stock_root()} or from {tree.root}" in error


def test_layer_gone(tree):
    pinned(tree)
    (tree.root / "core/optimizer/grad_scaler.py").unlink()
    error = error_of(INSTALL, trees=[tree])
    assert f"{SCALER}: pinned (DynamicGradScaler, DynamicGradScaler.update), but gone" in error


def test_digest_differs(tree):
    text = pinned(tree)
    line = next(line for line in text.splitlines() if "update" in line)
    drifted = f'"DynamicGradScaler.update" = "{"0" * 16}"'
    tree.pin_file.write_text(text.replace(line, drifted))
    error = error_of(INSTALL, trees=[tree])
    assert f"{SCALER}: DynamicGradScaler.update: changed in {stock_root()}" in error
    assert "megatron-core (0.19.2 is pinned)" in error
    assert "python -m megatron.overlay refresh" in error


def test_drift_can_be_allowed(tree):
    text = pinned(tree)
    tree.pin_file.write_text(text.replace(' = "', ' = "0'))
    tree.pin_file.write_text(tree.pin_file.read_text().replace("00.19.2", "0.19.2"))
    script = INSTALL + f"import json\nfrom {SCALER} import DynamicGradScaler as x\n"
    script += "print(json.dumps(x.update.__code__.co_filename))"
    options = {"trees": [tree], "MEGATRON_OVERLAY_ALLOW_DRIFT": "1"}
    assert json_of("-W", "ignore", "-c", script, **options).startswith(str(tree.root))
    error = error_of("import warnings\nwarnings.simplefilter('error')\n" + INSTALL, **options)
    assert "RuntimeWarning: MEGATRON_OVERLAY_ALLOW_DRIFT=1: the layers do not fit" in error
    assert "DynamicGradScaler.update: changed in" in error


def test_order_of_definitions_differs(tree):
    layer = tree.add(
        SCALER,
        """
        class DynamicGradScaler(upstream.DynamicGradScaler): pass
        class MegatronGradScaler(upstream.MegatronGradScaler): pass
        """,
    )
    tree.pin_file.write_text('megatron-core = "0.19.2"\n')
    error = error_of(INSTALL, trees=[tree], MEGATRON_OVERLAY_ALLOW_DRIFT="1")
    assert f"{layer} defines DynamicGradScaler, MegatronGradScaler in this order;" in error
    assert "grad_scaler.py defines MegatronGradScaler, DynamicGradScaler" in error


def test_two_trees_claim_one_symbol(tree, tmp_path):
    pinned(tree)
    other = LayerTree(tmp_path / "other")
    pinned(other)
    error = error_of(INSTALL, trees=[tree, other])
    assert f"two layers claim DynamicGradScaler of {SCALER}: {tree.root}" in error
    assert f"and {other.root}" in error


def test_one_file_claims_a_symbol_twice(tree):
    pinned(tree)
    layer = tree.root / "core/optimizer/grad_scaler.py"
    layer.write_text(
        layer.read_text() + "class DynamicGradScaler(upstream.DynamicGradScaler): pass\n"
    )
    error = error_of(INSTALL, trees=[tree])
    assert f"two layers claim DynamicGradScaler: {layer} defines it twice" in error


def test_two_trees_bring_one_new_module(tree, tmp_path):
    other = LayerTree(tmp_path / "other")
    for one in (tree, other):
        one.add("megatron.core.brand_new", "", header="")
        one.pin()
    error = error_of(INSTALL, trees=[tree, other])
    assert "two trees bring megatron.core.brand_new, which the wheel has not" in error


def test_layer_that_is_not_pinned(tree):
    tree.pin()
    layer = tree.add(SCALER, "class ConstantGradScaler(upstream.ConstantGradScaler): pass\n")
    error = error_of(INSTALL, trees=[tree])
    assert f"{SCALER}: ConstantGradScaler: {layer} takes it over, but it is not pinned" in error


@pytest.mark.parametrize(
    "content, message",
    [
        (None, "upstream.toml is missing: it pins the layers beside it"),
        ("<<<<<<< HEAD\n", "upstream.toml is no pin (TOMLDecodeError("),
        ('["megatron.core.x"]\n', "upstream.toml is no pin (KeyError('megatron-core'))"),
    ],
)
def test_no_pin(tree, content, message):
    layer = tree.add(SCALER, "class ConstantGradScaler(upstream.ConstantGradScaler): pass\n")
    if content is not None:
        tree.pin_file.write_text(content)
    error = error_of(INSTALL, trees=[tree])
    assert message in error and "python -m megatron.overlay refresh" in error
    tree.pin()
    assert layer.is_file() and "ConstantGradScaler" in tree.pin_file.read_text()


def test_a_tree_that_does_not_exist(tree):
    tree.root.rmdir()
    error = error_of(INSTALL, trees=[tree])
    assert error.endswith(
        f"OverlayError: MEGATRON_OVERLAY_PATH names {tree.root}, which is no folder."
    )


def test_another_megatron_put_on_the_path_too_late(tmp_path):
    """Layered modules would be the wheel's, and all others the newcomer's."""
    shutil.copytree(stock_root() / "core/datasets", tmp_path / "megatron/core/datasets")
    (tmp_path / "megatron/core/__init__.py").touch()
    script = (
        INSTALL
        + f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\nimport megatron.core.datasets.utils\n"
    )
    error = error_of(script)
    assert (
        f"datasets/utils.py for the layers, and {tmp_path}/megatron/core/datasets/utils.py by"
        in error
    )


def test_layer_of_a_package(tree):
    (tree.root / "core/optimizer").mkdir(parents=True)
    (tree.root / "core/optimizer/__init__.py").touch()
    tree.pin_file.write_text('megatron-core = "0.19.2"\n')
    error = error_of(INSTALL, trees=[tree])
    assert f"{tree.root}/core/optimizer/__init__.py: megatron.core.optimizer is a package" in error
    assert "an __init__ cannot be layered" in error


def test_an_init_file_in_our_own_tree(tmp_path):
    """It would hide the wheel's whole megatron.core."""
    shutil.copytree(ROOT / "megatron", tmp_path / "megatron")
    (tmp_path / "megatron/core/__init__.py").touch()
    error = error_of(INSTALL, root=tmp_path)
    assert "megatron/core/__init__.py: megatron.core is a package of the wheel" in error


def test_circular_import_of_a_layer(tree):
    """In the wheel's own words it would be an ImportError, which stock code may hide."""
    tree.add("megatron.core.wants_it", f"from {SCALER} import DynamicGradScaler\n", header="")
    layer = tree.add(
        SCALER,
        """
        import megatron.core.wants_it
        class DynamicGradScaler(upstream.DynamicGradScaler): pass
        """,
    )
    tree.pin()
    error = error_of(INSTALL + f"import {SCALER}", trees=[tree])
    assert (
        f"OverlayError: layer {layer} does not import: cannot import name 'DynamicGradScaler'"
        in error
    )
    assert "import it inside the function that uses it" in error


TE = """
import json, sys, warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import megatron.overlay
    megatron.overlay.install("cuda")
    found = []
    for package in sys.argv[1:]:
        try:
            __import__(package)
            found.append("imports")
        except ImportError as error:
            found.append(type(error).__name__)
caught = [w for w in caught if "treated as absent" in str(w.message)]
print(json.dumps([[str(w.message) for w in caught], [w.filename for w in caught], found]))
"""


@pytest.mark.parametrize(
    "files, reason, megatron",
    [
        (
            {"": 'assert False, "no core package"'},
            "AssertionError: no core package",
            ["megatron.core", "megatron.core.models.gpt.gpt_model"],
        ),
        ({"": "", "pytorch": 'raise OSError("libcublas.so.13")'}, "OSError: libcublas.so.13", []),
        ({"": "import a_part_that_is_missing"}, "ModuleNotFoundError: No module named 'a_part", []),
    ],
)
def test_half_installed_transformer_engine(tmp_path, files, reason, megatron):
    for name, source in files.items():
        package = tmp_path / "transformer_engine" / name
        package.mkdir(parents=True, exist_ok=True)
        (package / "__init__.py").write_text(source)
    script = tmp_path / "script.py"
    script.write_text(TE)
    packages = ["transformer_engine.pytorch", "transformer_engine", *megatron]
    said, files, found = json_of(script, *packages, path=[tmp_path])
    assert len(said) == 1 and reason in said[0]
    assert "pip install 'transformer-engine[core_cu13,pytorch]'" in said[0]
    assert files == [str(script)], "the warning points at who called install"
    assert found == ["ModuleNotFoundError"] * 2 + ["imports"] * len(megatron)


def test_whole_transformer_engine_is_left_alone(tmp_path):
    """Also where it copes with a framework of its own that is missing."""
    engine = tmp_path / "transformer_engine"
    for name in ("", "pytorch", "jax"):
        (engine / name).mkdir(parents=True, exist_ok=True)
        (engine / name / "__init__.py").touch()
    (engine / "__init__.py").write_text(
        "from . import pytorch\ntry:\n    from . import jax\nexcept FileNotFoundError:\n    jax = None\n"
    )
    (engine / "jax/__init__.py").write_text("raise FileNotFoundError('no shared object file')")
    script = INSTALL + "import json, sys, transformer_engine as te\n"
    script += "print(json.dumps([te.jax, te.pytorch is sys.modules['transformer_engine.pytorch']]))"
    assert json_of("-W", "error", "-c", script, path=[tmp_path]) == [None, True]


def test_absent_transformer_engine_is_not_mentioned():
    done = python("-W", "error", "-c", INSTALL)
    assert (done.returncode, done.stderr) == (0, "")
