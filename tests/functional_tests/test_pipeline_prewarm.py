"""Pipeline prewarm leaves no trace: losses, logs and checkpoints are bit for bit those of a run without it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron.core.pipeline_parallel.startup_timeline import StartupReport
from tests.functional_tests import cases

ITERATIONS = 4
STAGES = dict(world_size=2, pipeline_model_parallel_size=2)
CHUNKS = dict(STAGES, num_layers_per_virtual_pipeline_stage=1)
EVALUATED = dict(eval_interval=2, eval_iters=1)
DROPOUT = dict(attention_dropout=0.1, hidden_dropout=0.1)
MOE = dict(
    num_experts=4,
    moe_router_topk=2,
    moe_token_dispatcher_type="alltoall",
    moe_router_load_balancing_type="seq_aux_loss",
    moe_aux_loss_coeff=1e-2,
    moe_z_loss_coeff=1e-3,
    moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
)
FULL = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
SELECTIVE = dict(recompute_granularity="selective", recompute_modules="core_attn mlp")
# name: the case of common flags (a folder here, or None), and what is changed of it
RUNS: dict[str, tuple[str | None, dict]] = {
    "dense_pp1": (None, DROPOUT),
    "dense_pp2_vpp2": (None, dict(CHUNKS, **DROPOUT, **EVALUATED, **FULL)),
    "moe_pp1_selective": (None, dict(MOE, **DROPOUT, **SELECTIVE)),
    "moe_pp2_vpp2": (None, dict(CHUNKS, **MOE, **DROPOUT, **EVALUATED)),
    "moe_tp2_ep2": ("moe_tp2_ep2", dict(DROPOUT, moe_input_jitter_eps=0.01)),
    "dense_then_moe_mtp_pp2": (
        None,
        dict(STAGES, **MOE, moe_layer_freq="[0,0,1,1]", mtp_num_layers=1, **EVALUATED),
    ),
    "dsa_pp1_full": ("dsa", dict(DROPOUT, **FULL)),
    "dsa_moe_pp2_vpp2": ("dsa", dict(CHUNKS, **MOE, **DROPOUT, **EVALUATED)),
    "mtp_pp2": ("mtp_pp2", dict(DROPOUT, **FULL)),
    "mtp_alone_pp4": (
        None,
        dict(
            world_size=4,
            pipeline_model_parallel_size=4,
            pipeline_model_parallel_layout="Et|tt|tm|L",
            mtp_num_layers=1,
        ),
    ),
    "packed_pp2_vpp2": ("packed_documents", dict(DROPOUT, **EVALUATED)),
    "packed_moe_pp2": (
        None,
        dict(STAGES, **MOE, dataloader_inter_document_masking=True, micro_batch_size=1, **FULL),
    ),
    "optimizer_bf16": ("distributed_optimizer_bf16", dict(MOE, **DROPOUT, **EVALUATED)),
    "cp2": ("cp2", dict(EVALUATED)),
}
# name: the run that it repeats with a fault, and the fault; its result must differ
CONTROLS = {
    "without_rng": ("dense_pp2_vpp2", "leave out rng"),
    "without_buffers": ("moe_pp1_selective", "leave out buffers"),
    "without_trackers": ("moe_pp1_selective", "leave out trackers"),
}
FAILURE = "pipeline prewarm failed on rank 1 (pipeline stage 1) in chunk 0 backward"


def _arguments(case: str | None, world_size: Any = None, **changes: Any) -> cases.Arguments:
    flags = cases.arguments(case, **changes)
    return flags if world_size is None else {**flags, "WORLD_SIZE": world_size}


def _flags(name: str, folder: Path, **extra) -> cases.Arguments:
    case, changes = RUNS[name]
    saving: dict[str, Any] = dict(
        ckpt_format="torch", save_interval=ITERATIONS, train_iters=ITERATIONS
    )
    return _arguments(case, **changes, **saving, save=folder, **extra)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of all runs, and what their launch printed."""
    folder = tmp_path_factory.mktemp("prewarm")
    runs = {}
    for name in RUNS:
        runs[f"{name}_off"] = _flags(name, folder / "saved" / f"{name}_off")
        runs[f"{name}_on"] = _flags(name, folder / "saved" / f"{name}_on", pipeline_prewarm=True)
    for control, (name, fault) in CONTROLS.items():
        flags = _flags(name, folder / "saved" / control, pipeline_prewarm=True)
        runs[control] = {**flags, "FAULT": fault}
    failing = _flags("dense_pp2_vpp2", folder / "saved" / "failing", pipeline_prewarm=True)
    runs["failing"] = {**failing, "FAULT": "raise on 1 in chunk 0 backward"}
    hooked = _flags("dense_pp2_vpp2", folder / "saved" / "hooked", pipeline_prewarm=True)
    runs["hooked"] = {**hooked, "FAULT": "hook on 1"}
    printed = cases.run(runs, folder)
    print(printed)
    return folder, printed


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.timeout(1800)
def test_everything_is_as_without_prewarm(trained, name):
    folder, _ = trained
    expected, found = _scalars(folder, f"{name}_off"), _scalars(folder, f"{name}_on")
    assert len(expected["lm loss"]) == ITERATIONS
    assert found == expected
    off, on = (_checkpoint(folder, f"{name}_{kind}") for kind in ("off", "on"))
    assert len(off) > 50
    assert _differences(off, on) == []
    assert "pipeline prewarm: chunk 0 forward" in cases.log(folder, f"{name}_on", 0)
    assert "pipeline prewarm" not in cases.log(folder, f"{name}_off", 0)


@pytest.mark.parametrize("control", CONTROLS)
@pytest.mark.timeout(1800)
def test_a_piece_of_state_left_out_shows(trained, control):
    folder, _ = trained
    name = CONTROLS[control][0]
    same = _scalars(folder, control) == _scalars(folder, f"{name}_off")
    differences = _differences(_checkpoint(folder, f"{name}_off"), _checkpoint(folder, control))
    assert not same or differences


@pytest.mark.timeout(1800)
def test_a_failure_ends_all_ranks_with_its_name(trained):
    folder, printed = trained
    (line,) = (line for line in printed.splitlines() if line.startswith("failing:"))
    assert "status 1," in line and line.endswith(" 0 ranks killed")
    for rank in range(2):
        assert f"{FAILURE}: ArithmeticError: put in by a test" in cases.log(folder, "failing", rank)
    assert "iteration        1/" not in cases.log(folder, "failing", 1)


@pytest.mark.timeout(1800)
def test_what_one_rank_cannot_do_is_skipped_on_all_with_the_reason(trained):
    folder, _ = trained
    reason = "pipeline prewarm is skipped, on all ranks: a forward hook on the model would see"
    assert reason in cases.log(folder, "hooked", 0)
    assert "prewarm: chunk" not in cases.log(folder, "hooked", 0)
    assert _scalars(folder, "hooked") == _scalars(folder, "dense_pp2_vpp2_off")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Start-up reports, without and with prewarm, of a run that compiles as on a GPU."""
    folder = tmp_path_factory.mktemp("compiled")
    flags = dict(STAGES, **MOE, num_layers=6, moe_layer_freq="[0,1,1,0,1,1]", train_iters=1)
    runs = {}
    for name, prewarm in (("off", False), ("on", True)):
        report = folder / f"{name}.json"
        runs[name] = _arguments(
            None, **flags, pipeline_prewarm=prewarm, pipeline_prewarm_report=report
        )
    environment = {"MEGATRON_OVERLAY_CPU_COMPILE": "aot_eager"}
    print(cases.run(runs, folder, environment=environment))
    for name in runs:
        assert cases.losses(folder, name)
    assert cases.losses(folder, "on") == cases.losses(folder, "off")
    return folder


@pytest.mark.timeout(600)
def test_iteration_1_compiles_nothing_after_prewarm(compiled):
    off, on = (StartupReport.read(compiled / f"{name}.json") for name in ("off", "on"))
    assert (off.prewarm, on.prewarm) == (False, True)
    assert "weighted_swiglu" in " ".join(off.leftovers())  # else nothing is shown here
    assert on.leftovers() == []
    assert "compiled nothing" in cases.log(compiled, "on", 0)
    for timeline in on.timelines:
        names = [compilation.name for compilation in timeline.compilations]
        assert any(name.startswith("swiglu (") for name in names), names
        assert any(name.startswith("weighted_swiglu") for name in names), names


def _scalars(folder: Path, name: str) -> dict[str, list[float]]:
    """Everything that TensorBoard was given, but for times and memory."""
    cases.losses(folder, name)  # fails with the end of the logs
    events = EventAccumulator(str(folder / name)).Reload()
    return {
        tag: [event.value for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
        if "time" not in tag and "mem" not in tag and "throughput" not in tag
    }


def _checkpoint(folder: Path, name: str) -> dict[str, Any]:
    """Every value in every file of the last checkpoint but the arguments, by its path."""
    found: dict[str, Any] = {}
    files = sorted((folder / "saved" / name / f"iter_{ITERATIONS:07d}").rglob("*.pt"))
    assert files, f"{name} saved nothing"
    for file in files:
        state = torch.load(file, weights_only=False)
        if isinstance(state, dict):
            state.pop("args", None)
        _flatten(state, f"{file.parent.name}/{file.name}", found)
    return found


def _flatten(value, path: str, found: dict[str, Any]) -> None:
    if isinstance(value, dict):
        for key, inner in value.items():
            _flatten(inner, f"{path}.{key}", found)
    elif isinstance(value, (list, tuple)):
        for key, inner in enumerate(value):
            _flatten(inner, f"{path}[{key}]", found)
    else:
        found[path] = value


def _differences(expected: dict[str, Any], found: dict[str, Any]) -> list[str]:
    different = sorted(expected.keys() ^ found.keys())
    for path in expected.keys() & found.keys():
        one, other = expected[path], found[path]
        if torch.is_tensor(one) and torch.is_tensor(other):
            same = one.dtype == other.dtype and torch.equal(one, other)
        elif hasattr(one, "tobytes"):
            same = one.tobytes() == other.tobytes()
        elif hasattr(one, "getvalue"):
            same = one.getvalue() == other.getvalue()
        else:
            same = one == other
        if not same:
            different.append(path)
    return different
