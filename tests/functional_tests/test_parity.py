"""Flags off is stock: the wheel alone and the wheel under the layers train bitwise alike.

The wheel alone is told by hand what the CPU device sets by itself.
"""

import pytest
import torch

from tests.functional_tests import cases

BY_HAND = {
    "--distributed-backend": "gloo",
    "--transformer-impl": "local",
    "--no-persist-layer-norm": True,
    "--no-gradient-accumulation-fusion": True,
    "--no-masked-softmax-fusion": True,
    "--no-rope-fusion": True,
}
PIPELINE = dict(pipeline_model_parallel_size=2, num_layers_per_virtual_pipeline_stage=1)
MOE = dict(
    num_experts=4, moe_router_topk=2, moe_token_dispatcher_type="alltoall", moe_aux_loss_coeff=1e-2
)
MODELS = {
    "dense_pp1": (1, {}),
    "dense_pp2_vpp2": (2, PIPELINE),
    "moe_pp1": (1, MOE),
    "moe_pp2_vpp2": (2, {**MOE, **PIPELINE}),
}
ITERATIONS = 6


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Folders of the runs, of the bare wheel and of the wheel under the layers."""
    folders = {}
    for kind in ("bare", "layered"):
        folder = folders[kind] = tmp_path_factory.mktemp(kind)
        runs = {}
        for name, (world_size, flags) in MODELS.items():
            runs[name] = {
                **cases.arguments(None, **flags, save=folder / name, ckpt_format="torch"),
                "--save-interval": ITERATIONS,
                "--train-iters": ITERATIONS,
                "WORLD_SIZE": world_size,
                **(BY_HAND if kind == "bare" else {}),
            }
        print(cases.run(runs, folder, bare=kind == "bare"))
    return folders


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.timeout(900)
def test_losses_and_parameters_equal_the_bare_wheels(trained, name):
    bare, layered = trained["bare"], trained["layered"]
    losses = cases.losses(bare, name)
    assert len(losses) == ITERATIONS
    assert losses[-1] < losses[0] - 0.1
    assert cases.losses(layered, name) == losses
    for rank in range(MODELS[name][0]):
        expected = cases.parameters(bare / name, rank, ITERATIONS)
        found = cases.parameters(layered / name, rank, ITERATIONS)
        assert found.keys() == expected.keys() and len(found) > 10
        for parameter, value in expected.items():
            assert torch.equal(found[parameter], value), parameter
