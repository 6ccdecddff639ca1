"""A run that is saved and resumed goes on bit for bit as if it had never stopped, dropout included."""

import pytest

from tests.functional_tests import cases
from tests.functional_tests.test_parity import BY_HAND

# case, checkpoint format, further flags
RUNS = {
    "pipeline_torch": ("dense_pp2_vpp2", "torch", {}),
    "pipeline_torch_dist": ("dense_pp2_vpp2", "torch_dist", {}),
    "experts_torch_dist": ("moe_tp2_ep2", "torch_dist", {}),
    "optimizer_bf16_torch_dist": ("distributed_optimizer_bf16", "torch_dist", {}),
    "optimizer_fp32_torch_dist": ("distributed_optimizer_bf16", "torch_dist", dict(bf16=False)),
}
SAVED, LAST = 3, 6


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    runs = {}
    for name, (case, ckpt_format, flags) in RUNS.items():
        common = dict(train_iters=LAST, save_interval=SAVED, ckpt_format=ckpt_format, **flags)
        runs[name] = cases.arguments(case, **common, save=folder / "saved" / name)
        runs[f"{name}_resumed"] = cases.arguments(
            case,
            **common,
            load=folder / "saved" / name,
            ckpt_step=SAVED,
            save=folder / "resumed" / name,
        )
    print(cases.run(runs, folder))
    return folder


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.timeout(900)
def test_resumed_run_equals_the_uninterrupted_one(trained, name):
    uninterrupted = cases.losses(trained, name)
    assert len(uninterrupted) == LAST
    assert cases.losses(trained, f"{name}_resumed") == uninterrupted[SAVED:]


@pytest.mark.timeout(900)
def test_the_bare_wheel_goes_on_from_a_checkpoint_of_the_fork(trained):
    case, ckpt_format, _ = RUNS["pipeline_torch_dist"]
    flags = cases.arguments(
        case,
        train_iters=LAST,
        save_interval=SAVED,
        ckpt_format=ckpt_format,
        load=trained / "saved" / "pipeline_torch_dist",
        ckpt_step=SAVED,
        save=trained / "bare",
    )
    print(cases.run({"bare": {**flags, **BY_HAND}}, trained, bare=True))
    uninterrupted = cases.losses(trained, "pipeline_torch_dist")
    assert cases.losses(trained, "bare") == uninterrupted[SAVED:]
