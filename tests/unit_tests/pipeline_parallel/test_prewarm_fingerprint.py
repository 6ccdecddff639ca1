"""That passes through real model chunks leave no trace, wherever one looks; and that one would see it."""

import functools
import re
from types import SimpleNamespace

import pytest
import torch

from megatron.core.pipeline_parallel import prewarm_state
from megatron.core.transformer.cuda_graphs import CudaGraphManager
from megatron.core.transformer.moe import moe_logging
from megatron.core.transformer.moe.moe_utils import RandomSTEShared
from tests.unit_tests.pipeline_parallel.fingerprint import differences, fingerprint
from tests.unit_tests.pipeline_parallel.model_chunks import (
    CASES,
    Boom,
    build,
    iteration,
    model_of,
    passes,
    raise_boom,
)

pytestmark = pytest.mark.usefixtures("fresh_process")

# What may differ afterwards, and why that is harmless.
ALLOWED = {
    r"router\.(expert_bias|qb_beta|qb_beta_accum)$": "fp32 in place of the bf16 that Float16Module "
    "makes of it: so every first forward leaves it",
    r"router\.input_jitter$": "a sampler between constant bounds, made on first use",
    r"token_dispatcher\.(?!_comm_manager|config)": "what a forward leaves for its own combine; each writes it anew",
    r"(Yarn)?RotaryEmbedding\.forward$": "a cache of constants",
    r"_GLOBAL_MEMORY_BUFFER\.buffer": "scratch",
    r"hadamard\._report_fallback$": "said once",
    r"PipelineOffloadManager\.OFFLOAD_MGR": "a manager that manages nothing, as the first forward makes it",
}


def unexpected(before, after):
    """Differences that ALLOWED does not explain."""
    return [
        difference
        for difference in differences(before, after)
        if not any(re.search(pattern, difference[0]) for pattern in ALLOWED)
    ]


@functools.cache
def trace(case):
    """Fingerprints before and after the passes of a case's chunks."""
    moe_logging.destroy_moe_metrics_tracker()
    chunks = build(case)
    before = fingerprint(chunks)
    with prewarm_state.preserved(chunks):
        passes(chunks)
    return before, fingerprint(chunks)


@pytest.mark.parametrize("case", CASES)
def test_passes_leave_no_trace(case):
    assert unexpected(*trace(case)) == []


@pytest.mark.parametrize(
    "case", ["moe", "recompute", "quantile", "biased", "replay", "alltoall", "dsa mtp"]
)
def test_passes_between_iterations_leave_no_trace(case):
    """Trackers hold values, scales are bound, buckets know how often their parameters are used."""
    chunks = build(case)
    iteration(chunks)
    before = fingerprint(chunks)
    with prewarm_state.preserved(chunks):
        passes(chunks)
    assert unexpected(before, fingerprint(chunks)) == []


def test_every_allowance_is_needed():
    paths = {path for case in CASES for path, _, _ in differences(*trace(case))}
    assert [
        pattern for pattern in ALLOWED if not any(re.search(pattern, path) for path in paths)
    ] == []


LEFT_BY = {
    ("rng", "moe"): ["generator of torch"],
    ("configs", "dsa mtp"): ["config._dsa_index_share_topk_holder"],
    ("configs", "stubs"): ["PagedStashManager.STASH_MGR"],
    ("parameter_gathering", "dsa mtp"): ["param_gather_dispatched"],
    ("gradients", "moe"): ["main_grad", "per_param_grad_ready_counts"],
    ("gradients", "not wrapped"): ["weight.grad"],
    ("buffers", "moe"): ["router.local_tokens_per_expert", "router.ga_steps"],
    ("buffers", "quantile"): ["router.qb_beta_count"],
    ("fp8", "stubs"): ["fp8_meta['scaling_fwd'].amax_history", "fp8_meta['scaling_fwd'].scale"],
    ("module_attributes", "stubs"): ["decoder.input_tensor", "_comm_manager.over_budget"],
    ("loss_scales", "dsa mtp"): [
        f"{name}.main_loss_backward_scale"
        for name in ("MoEAuxLossAutoScaler", "DSAIndexerLossAutoScaler", "MTPLossAutoScaler")
    ],
    ("trackers", "dsa mtp"): [
        "_MOE_METRICS_TRACKER",
        "DSAIndexerLossLoggingHelper.tracker['values']",
        "MTPLossLoggingHelper.tracker['loss_values']",
    ],
    ("routing", "biased"): ["RandomSTEShared._cache[2]"],
    ("routing", "replay"): ["router_replay.recorded_topk_idx"],
}


@pytest.mark.parametrize("entry, case", LEFT_BY)
def test_each_entry_is_needed(monkeypatch, entry, case):
    monkeypatch.delitem(prewarm_state.PRESERVED, entry)
    chunks = build(case, ["middle", "last"])
    before = fingerprint(chunks)
    with prewarm_state.preserved(chunks):
        passes(chunks)
    paths = [path for path, _, _ in unexpected(before, fingerprint(chunks))]
    for left in LEFT_BY[entry, case]:
        assert any(left in path for path in paths)


def test_every_entry_is_covered():
    """Graphs are by tests of their own, in test_prewarm_state.py."""
    assert {entry for entry, _ in LEFT_BY} == prewarm_state.PRESERVED.keys() - {"cuda_graphs"}


@pytest.mark.parametrize("name", prewarm_state.MODULE_ATTRIBUTES)
def test_each_module_attribute_is_needed(monkeypatch, name):
    others = tuple(other for other in prewarm_state.MODULE_ATTRIBUTES if other != name)
    monkeypatch.setattr(prewarm_state, "MODULE_ATTRIBUTES", others)
    chunks = build("stubs", ["middle"])
    before = fingerprint(chunks)
    with prewarm_state.preserved(chunks):
        passes(chunks)
    found = {path.rsplit(".", 1)[-1] for path, _, _ in unexpected(before, fingerprint(chunks))}
    assert found >= {name}


@pytest.mark.parametrize(
    "case, where",
    [
        ("moe", "forward"),
        ("moe", "backward"),
        ("dsa mtp", "forward"),
        ("dsa mtp", "backward"),
        ("dsa mtp", "evaluation"),
        ("stubs", "forward"),
        ("stubs", "evaluation"),
        ("recompute", "evaluation"),
        ("recompute", "forward"),
        ("recompute", "backward"),
    ],
)
def test_a_pass_that_fails_leaves_no_trace(case, where):
    chunks = build(case)

    def fail(module, inputs, output):
        output = output[0] if isinstance(output, tuple) else output
        if where == "backward" and output.requires_grad:
            output.register_hook(raise_boom)
        elif where == "evaluation" and not module.training or where == "forward":
            raise_boom()

    model_of(chunks[1]).decoder.layers[1].mlp.register_forward_hook(fail)
    before = fingerprint(chunks)
    with pytest.raises(Boom), prewarm_state.preserved(chunks):
        passes(chunks)
    left = unexpected(before, fingerprint(chunks))
    # The layer that failed keeps its input until its next forward.
    assert [path for path, _, _ in left if ".mlp_norm_manager" not in path] == []


def set_global(module, monkeypatch):
    monkeypatch.setattr(moe_logging, "steps", 1, raising=False)


def fill_dict_of_a_class(module, monkeypatch):
    monkeypatch.setitem(RandomSTEShared._cache, 3, torch.ones(1))


def override_a_method(module, monkeypatch):
    monkeypatch.setattr(CudaGraphManager, "__call__", lambda *args: None)


def append_to_a_list_in_a_closure(module, monkeypatch):
    module.hook.__closure__[0].cell_contents.append(1)


def flip_a_sign_of_zero(module, monkeypatch):
    module.weight.data[0, 0] = -0.0


def mark_a_parameter(module, monkeypatch):
    module.weight.mark = True


def add_a_gradient(module, monkeypatch):
    module.weight.grad = torch.zeros(2, 2)


def change_a_plain_object(module, monkeypatch):
    module.plain.rows[0]["length"] += 1


def unshare_a_tensor(module, monkeypatch):
    module.plain.view = module.plain.view.clone()


def add_a_hook(module, monkeypatch):
    module.register_forward_hook(print)


def change_mode(module, monkeypatch):
    module.eval()


@pytest.mark.parametrize(
    "change",
    [
        set_global,
        fill_dict_of_a_class,
        override_a_method,
        append_to_a_list_in_a_closure,
        flip_a_sign_of_zero,
        mark_a_parameter,
        add_a_gradient,
        change_a_plain_object,
        unshare_a_tensor,
        add_a_hook,
        change_mode,
    ],
)
def test_a_fingerprint_shows(monkeypatch, change):
    module, seen = torch.nn.Linear(2, 2, bias=False), []
    torch.nn.init.zeros_(module.weight)
    module.hook = lambda: seen
    module.plain = SimpleNamespace(rows=[{"length": 1}], view=module.weight.data[0])
    before = fingerprint([module])
    assert differences(before, fingerprint([module])) == []
    change(module, monkeypatch)
    assert differences(before, fingerprint([module])) != []
