"""The loader on the installed wheel: one tree of several layers, looked at from a process of its own.

The layered modules are such as no feature of the fork touches.
"""

import pytest

from tests.overlay.layer_trees import HEADER, ROOT, LayerTree, json_of, python, stock_root

LAYERS = {
    "megatron.core.optimizer.grad_scaler": """
        class MegatronGradScaler(upstream.MegatronGradScaler):
            def __init__(self, initial_scale: float):
                if initial_scale == 13.0:
                    raise ValueError("unlucky")
                super().__init__(2 * initial_scale)

        class DynamicGradScaler(upstream.DynamicGradScaler):
            name = "layer"

            def __init__(self, *args):
                super().__init__(*args)

        class NewGradScaler(ConstantGradScaler):
            pass
        """,
    "megatron.core.fusions.fused_bias_gelu": """
        def bias_gelu(bias, y):
            return upstream.bias_gelu(bias, y) + 100.0
        """,
    "megatron.core.fusions.fused_softmax": """
        class FusedScaleMaskSoftmax(upstream.FusedScaleMaskSoftmax):
            def forward(self, *args, **kwargs):
                return 2 * super().forward(*args, **kwargs)
        """,
    "megatron.core.inference.inference_request": """
        from dataclasses import dataclass

        @dataclass(kw_only=True)
        class InferenceRequest(upstream.InferenceRequest):
            color: str = "red"
        """,
    "megatron.training.config.resilience_config": '''
        from dataclasses import dataclass

        @dataclass(kw_only=True)
        class StragglerDetectionConfig(upstream.StragglerDetectionConfig):
            """Stragglers."""

            straggler_patience: int = 5
            """Windows to wait before a straggler is reported."""
        ''',
    "megatron.core.brand_new": "from .fusions import fused_bias_gelu as sibling\n",
    "megatron.core.brand_new_package.inside": "from ..brand_new import sibling\n",
}

FACTS = """
import json, megatron.overlay
megatron.overlay.install("cpu")
megatron.overlay.install("cpu")
import argparse, importlib, inspect, pickle, sys, traceback
import torch
import megatron.core.brand_new_package.inside
import megatron.core.fusions.fused_bias_gelu as gelu
from megatron.core.fusions import fused_softmax
from megatron.core.inference.inference_request import InferenceRequest, VLMInferenceRequest
from megatron.core.optimizer import grad_scaler, optimizer
from megatron.core.transformer import mlp
from megatron.core.transformer.enums import AttnMaskType
from megatron.training.arguments import add_megatron_arguments
from megatron.overlay import upstream_of

facts = {"finders": sum(type(f).__module__.startswith("megatron") for f in sys.meta_path)}
dynamic = grad_scaler.DynamicGradScaler(8.0, 1.0, 2.0, 0.5, 10, 1)
old = upstream_of("megatron.core.optimizer.grad_scaler")
facts["scale"] = dynamic.scale.item()
facts["new scale"] = grad_scaler.NewGradScaler(3.0).scale.item()
facts["mro"] = [c.__module__ + "." + c.__qualname__ for c in type(dynamic).__mro__]
facts["names elsewhere"] = optimizer.MegatronGradScaler is grad_scaler.MegatronGradScaler

one, bias = torch.zeros(1), torch.ones(1)
facts["gelu"] = [f(bias, one).item() for f in (gelu.bias_gelu, upstream_of(gelu.__name__).bias_gelu)]
facts["gelu in a stock class"] = gelu.GeLUFunction.apply(one, bias).item()
facts["gelu by its name in mlp"] = mlp.bias_gelu_impl(one, bias).item()
facts["sibling"] = megatron.core.brand_new_package.inside.sibling is gelu

softmax = fused_softmax.FusedScaleMaskSoftmax(
    False, False, AttnMaskType.causal, False, lambda x, mask: x.masked_fill(mask, -1e4), True, None
)
facts["softmax"] = softmax(torch.zeros(1, 1, 2, 2), None).tolist()

facts["request"] = VLMInferenceRequest(
    request_id=1, prompt="p", num_img_embeddings_per_tile=1, imgs=None, num_tiles=None,
    decoder_seq_length=None, color="blue",
).color
facts["request module"] = InferenceRequest.__module__

parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
option = parser._option_string_actions["--straggler-patience"]
facts["option"] = [option.help, option.default, option.type is int]
facts["stock option"] = parser._option_string_actions["--straggler-ctrlr-port"].help

facts["sources"] = {
    name: [inspect.getsource(thing).splitlines()[0], inspect.getsourcefile(thing)]
    for name, thing in {
        "stock function": gelu.bias_gelu_back,
        "layered function": gelu.bias_gelu,
        "function taken over": upstream_of(gelu.__name__).bias_gelu,
        "stock class": grad_scaler.ConstantGradScaler,
        "layered class": grad_scaler.DynamicGradScaler,
        "class taken over": old.DynamicGradScaler,
        "new class": grad_scaler.NewGradScaler,
        "class of an untouched module": mlp.MLP,
    }.items()
}

def frames(function):
    try:
        function()
    except Exception as error:
        return [(f.filename, f.line) for f in traceback.extract_tb(error.__traceback__)[1:]]

facts["trace of stock"] = frames(lambda: grad_scaler.DynamicGradScaler(-1.0, 1, 2, 0.5, 1, 1))[-1]
facts["trace of the layer"] = frames(lambda: grad_scaler.ConstantGradScaler(13.0))[-1]

things = {
    "layered function": gelu.bias_gelu, "function taken over": upstream_of(gelu.__name__).bias_gelu,
    "stock function": gelu.bias_gelu_back, "layered class": grad_scaler.DynamicGradScaler,
    "class taken over": old.DynamicGradScaler,
}
facts["pickled"] = {name: pickle.loads(pickle.dumps(thing)) is thing for name, thing in things.items()}
again = pickle.loads(pickle.dumps(dynamic))
facts["pickled instance"] = [type(again) is type(dynamic), again.scale.item()]

torch.manual_seed(1)
x = torch.randn(5)
facts["compiled"] = {
    f"{function.__qualname__} by {backend}": torch.equal(
        torch.compile(function, backend=backend, fullgraph=True)(*arguments), function(*arguments)
    )
    for backend in ("eager", "aot_eager")
    for function, arguments in ((gelu.bias_gelu, (x, x)), (gelu.bias_gelu_back, (x, x, x)))
}

before = gelu.bias_gelu
importlib.reload(gelu)
facts["reloaded"] = [gelu.bias_gelu(bias, one).item(), gelu.bias_gelu is not before]
facts["stock file"] = gelu.__file__
print(json.dumps(facts))
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    tree = LayerTree(tmp_path_factory.mktemp("tree"))
    for module, source in LAYERS.items():
        tree.add(module, source, header="" if "brand_new" in module else HEADER)
    (tree.root / "core/brand_new_package/__init__.py").touch()
    tree.pin()
    return tree


@pytest.fixture(scope="module")
def facts(tree, tmp_path_factory):
    folder = tmp_path_factory.mktemp("elsewhere")
    return json_of("-W", "ignore", "-c", FACTS, trees=[tree], cwd=folder, timeout=200)


def layer_file(tree, module):
    return str(tree.root.joinpath(*module.split(".")[1:])) + ".py"


def stock_file(module):
    return str(stock_root().joinpath(*module.split(".")[1:])) + ".py"


SCALER, GELU = list(LAYERS)[:2]


def test_classes(facts):
    assert facts["scale"] == 16.0
    assert facts["new scale"] == 6.0, "stock's ConstantGradScaler inherits from the layer's base"
    names = "DynamicGradScaler upstream.DynamicGradScaler MegatronGradScaler upstream.MegatronGradScaler"
    assert facts["mro"] == [f"{SCALER}.{name}" for name in names.split()] + [
        "abc.ABC",
        "builtins.object",
    ]


def test_a_module_class_with_two_argument_super(facts):
    assert facts["softmax"] == [[[[2.0, 0.0], [1.0, 1.0]]]]


def test_functions(facts):
    layered, stock = facts["gelu"]
    assert stock == pytest.approx(0.8412, abs=1e-4)
    assert layered == pytest.approx(100.8412, abs=1e-4)
    assert facts["gelu in a stock class"] == layered


def test_names_imported_by_stock_modules_are_the_layers(facts):
    assert facts["names elsewhere"]
    assert facts["gelu by its name in mlp"] == pytest.approx(100.8412, abs=1e-4)


def test_dataclass_fields(facts):
    assert facts["request"] == "blue"
    assert facts["request module"] == "megatron.core.inference.inference_request"


def test_megatrons_argument_factory_reads_a_layered_config(facts):
    assert facts["option"] == ["Windows to wait before a straggler is reported.", 5, True]
    assert facts["stock option"].startswith("Port number to toggle StragglerDetector")


def test_new_modules_and_packages_with_relative_imports(facts):
    assert facts["sibling"]


def test_installed_twice_is_installed_once(facts):
    assert facts["finders"] == 1


def test_sources(tree, facts):
    scaler, gelu = stock_file(SCALER), stock_file(GELU)
    assert facts["sources"] == {
        "stock function": ["@jit_fuser", gelu],
        "layered function": ["def bias_gelu(bias, y):", layer_file(tree, GELU)],
        "function taken over": ["@jit_fuser", gelu],
        "stock class": ["class ConstantGradScaler(MegatronGradScaler):", scaler],
        "layered class": [
            "class DynamicGradScaler(upstream.DynamicGradScaler):",
            layer_file(tree, SCALER),
        ],
        "class taken over": ["class DynamicGradScaler(MegatronGradScaler):", scaler],
        "new class": ["class NewGradScaler(ConstantGradScaler):", layer_file(tree, SCALER)],
        "class of an untouched module": [
            "class MLP(MegatronModule):",
            stock_file("megatron.core.transformer.mlp"),
        ],
    }


def test_tracebacks(tree, facts):
    assert facts["trace of stock"] == [stock_file(SCALER), "assert initial_scale > 0.0"]
    assert facts["trace of the layer"] == [layer_file(tree, SCALER), 'raise ValueError("unlucky")']


def test_pickle(facts):
    assert list(facts["pickled"].values()) == [True] * 5, facts["pickled"]
    assert facts["pickled instance"] == [True, 16.0]


def test_torch_compile(facts):
    assert facts["compiled"] == dict.fromkeys(
        [f"bias_gelu{back} by {how}" for how in ("eager", "aot_eager") for back in ("", "_back")],
        True,
    )


def test_reload(facts):
    value, is_new = facts["reloaded"]
    assert value == pytest.approx(100.8412, abs=1e-4) and is_new
    assert facts["stock file"] == stock_file(GELU)


CHILDREN = """
import json, multiprocessing, sys
def work(scaler):
    import os, torch
    from megatron.core.optimizer import grad_scaler
    active = sys.modules["megatron.overlay.cpu"].active()
    return scaler.name, scaler.scale.item(), active, len(grad_scaler.NewGradScaler.__mro__), os.getpid()
if __name__ == "__main__":
    from megatron.core.optimizer.grad_scaler import DynamicGradScaler
    import os
    scaler = DynamicGradScaler(8.0, 1.0, 2.0, 0.5, 10, 1)
    found = {}
    for method in sys.argv[1:]:
        with multiprocessing.get_context(method).Pool(1) as pool:
            *found[method], pid = pool.apply_async(work, (scaler,)).get(100)
            assert pid != os.getpid()
    print(json.dumps(found))
"""


def test_child_processes_have_the_layers(tree, tmp_path):
    """A script that knows nothing of the layers starts them; so does the worker of an async checkpoint."""
    methods = ["fork", "spawn", "forkserver"]
    script = tmp_path / "script.py"
    script.write_text(CHILDREN)
    found = json_of(
        *("-W", "ignore", "-m", "megatron.overlay", "run", "--device", "cpu", script, *methods),
        trees=[tree],
        cwd=tmp_path,
    )
    assert found == dict.fromkeys(methods, ["layer", 16.0, True, 6])


FOUND = """
import json
from megatron.overlay import loader
finder = loader.Finder(loader.trees())
finder.verify()
layered = finder.layered("megatron.core.jit")
print(json.dumps([str(source.path) for source in (layered.stock, *layered.layers)]))
"""


@pytest.mark.parametrize(
    "how", ["link", "link and folder", "two clones", "own tree as an extra one"]
)
def test_other_ways_to_the_repository(tmp_path, how):
    """None of them may take a layer for the stock module, or for a second layer."""
    link, root, extra = tmp_path / "link", ROOT, {}
    if how == "two clones":
        (link / "megatron/core").mkdir(parents=True)
        (link / "megatron/core/jit.py").write_text("raise RuntimeError('not the stock module')\n")
    else:
        link.symlink_to(ROOT)
    if how == "link":
        root = link
    if how == "own tree as an extra one":
        extra = {"MEGATRON_OVERLAY_PATH": str(link / "megatron")}
    stock, *layers = json_of("-c", FOUND, path=[link], root=root, **extra)
    assert stock == stock_file("megatron.core.jit")
    assert layers == [str(ROOT / "megatron/core/jit.py")]


def test_pytest_from_another_folder(tmp_path):
    done = python(
        *(
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "--rootdir",
            ROOT,
            "-c",
            ROOT / "pyproject.toml",
        ),
        ROOT / "tests/overlay/test_interleaving.py",
        *("-k", "constants"),
        cwd=tmp_path,
        root=tmp_path,
    )
    assert "1 passed" in done.stdout, done.stdout + done.stderr


def test_layers_ask_for_upstream_only_under_the_loader():
    script = """
import json, sys
import megatron.overlay
try:
    megatron.overlay.upstream_of("megatron.core.jit")
except megatron.overlay.OverlayError as error:
    print(json.dumps(str(error)))
"""
    assert "megatron.overlay is not installed in this process" in json_of("-c", script)
