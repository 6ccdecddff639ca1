"""Each piece of state around a synthetic pass: real chunks on the CPU, stubs only for what needs a GPU."""

import contextlib
import copy
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from megatron.core.extensions import transformer_engine
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from megatron.core.pipeline_parallel import prewarm_state
from megatron.core.pipeline_parallel.fine_grained_activation_offload import (
    FineGrainedActivationOffloadingInterface,
    PipelineOffloadManager,
)
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.cuda_graphs import _CudagraphGlobalRecord
from megatron.core.transformer.experimental_attention_variant.dsa import (
    DSAIndexerLossAutoScaler,
    DSAIndexerLossLoggingHelper,
)
from megatron.core.transformer.moe import moe_logging
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, RandomSTEShared
from megatron.core.transformer.moe.paged_stash import PagedStashManager
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler, MTPLossLoggingHelper
from tests.unit_tests.pipeline_parallel.fingerprint import differences, fingerprint
from tests.unit_tests.pipeline_parallel.model_chunks import (
    Boom,
    build,
    delayed_scaling,
    graph_manager,
    iteration,
    model_of,
    passes,
    raise_boom,
)

pytestmark = pytest.mark.usefixtures("fresh_process")


@pytest.mark.parametrize("kind", ["bytes", "generators"])
@pytest.mark.parametrize("fails", [False, True])
def test_generators_draw_on_as_if_nothing_had_been_drawn(monkeypatch, kind, fails):
    """The tracker's states are bytes, or generators that CUDA graphs and Transformer Engine hold too."""
    device = torch.Generator()
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda *_: device.get_state())
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, *_: device.set_state(state))
    tracker = get_cuda_rng_tracker()
    names = list(tracker.states_)
    if kind == "generators":
        monkeypatch.setattr(tracker, "states_", {name: torch.Generator() for name in names})

    def seed():
        random.seed(1)
        np.random.seed(2)
        torch.manual_seed(3)
        device.manual_seed(4)
        for number, name in enumerate(names):
            if kind == "generators":
                tracker.states_[name].manual_seed(number)
            else:
                tracker.states_[name] = torch.Generator().manual_seed(number).get_state()

    def draw():
        drawn = [random.random(), np.random.rand(), torch.rand(()).item()]
        drawn.append(torch.rand((), generator=device).item())
        for name in names:
            if kind == "generators":
                drawn.append(torch.rand((), generator=tracker.states_[name]).item())
            else:
                with tracker.fork(name):
                    drawn.append(torch.rand(()).item())
        return drawn

    seed()
    expected = draw()
    assert len(set(expected)) == len(expected)  # no two of them are one
    seed()
    held = dict(tracker.states_)
    with contextlib.suppress(Boom), prewarm_state.preserved([]):
        draw()
        if fails:
            raise_boom()
    if kind == "generators":
        assert all(tracker.states_[name] is held[name] for name in names)
    assert draw() == expected


def test_router_buffers_hold_their_values():
    (chunk,) = chunks = build("moe", ["middle"])
    router = model_of(chunk).decoder.layers[1].mlp.router
    bias = [0.5, -0.25, 3.0, 0.0]
    router.expert_bias.copy_(torch.tensor(bias))
    router.local_tokens_per_expert.copy_(torch.tensor([3, 1, 4, 1]))
    router.ga_steps.fill_(7)
    assert router.expert_bias.dtype == torch.bfloat16
    with prewarm_state.preserved(chunks):
        passes(chunks)
        router.expert_bias.add_(1)  # a pass writes it in no case; an optimizer step would
        assert router.local_tokens_per_expert.sum() > 9
    assert router.expert_bias.dtype == torch.float32 and router.expert_bias.tolist() == bias
    assert router.local_tokens_per_expert.tolist() == [3, 1, 4, 1]
    assert router.ga_steps == 7


def test_buffers_that_a_pass_makes_stay():
    module = torch.nn.Module()
    module.register_buffer("table", torch.arange(4.0))
    module.register_buffer("later", None)
    with prewarm_state.preserved([module]):
        module.register_buffer("table", torch.arange(8.0))
        module.register_buffer("other", torch.ones(2))
        module.later = torch.ones(2)
    assert module.table.tolist() == list(range(8)) and module.other.tolist() == [1, 1]
    assert module.later is None and "later" in module._buffers


def test_a_yarn_table_fits_what_the_module_says_of_it():
    """On one of two context-parallel ranks 16 positions are 8 rows, and so are 8 of a pack."""
    rope = YarnRotaryEmbedding(
        8,
        original_max_position_embeddings=16,
        use_cpu_initialization=True,
        cp_group=SimpleNamespace(size=lambda: 2, rank=lambda: 0),
    )
    with prewarm_state.preserved([rope]):
        cos, _ = rope.get_cached_cos_sin(8, packed_seq=True)
        expected = cos.clone()
    assert torch.equal(rope.get_cached_cos_sin(8, packed_seq=True)[0], expected)


@pytest.mark.parametrize("overlap", [False, True])
def test_gradients_and_their_buckets(monkeypatch, overlap):
    started = []
    monkeypatch.setattr(
        _ParamAndGradBucketGroup, "start_grad_sync", lambda *_: started.append("a reduction")
    )
    chunks = build("moe", ["last"], overlap_grad_reduce=overlap)
    parameters = list(chunks[0].parameters())
    with prewarm_state.preserved(chunks):
        passes(chunks)
        assert any(parameter.main_grad.any() for parameter in parameters)
    assert started == []
    for parameter in parameters:
        assert parameter.grad is None
        assert not parameter.grad_added_to_main_grad
        assert parameter.main_grad.view(torch.uint8).count_nonzero() == 0  # no -0.0 either
    for group in chunks[0].bucket_groups + chunks[0].expert_parallel_bucket_groups:
        assert group.golden_per_param_grad_ready_counts == group.per_param_grad_ready_counts == {}
        assert group.is_first_batch and group.is_last_microbatch
        assert group.grad_reduce_handle is None and not group.grad_reduce_finished


def test_gradients_that_were_there():
    chunks = build("not wrapped", ["last"])
    parameters = list(chunks[0].parameters())
    kept = [torch.zeros_like(parameter) for parameter in parameters]
    for parameter, grad in zip(parameters, kept):
        parameter.grad = grad
    with prewarm_state.preserved(chunks):
        passes(chunks)
        assert any(parameter.grad.any() for parameter in parameters)
    for parameter, grad in zip(parameters, kept):
        assert parameter.grad is grad and not grad.any()


def test_the_first_iteration_counts_uses_of_parameters_as_ever():
    def golden(prewarmed):
        moe_logging.destroy_moe_metrics_tracker()
        chunks = build("moe", ["middle"])
        if prewarmed:
            with prewarm_state.preserved(chunks):
                passes(chunks)
        iteration(chunks)
        groups = chunks[0].bucket_groups
        return [list(group.golden_per_param_grad_ready_counts.values()) for group in groups]

    counts = golden(prewarmed=False)
    assert all(counts) and golden(prewarmed=True) == counts


def test_a_mark_that_captured_graphs_left_on_a_parameter_stays():
    """zero_grad_buffer() then leaves these marks as the passes set them."""
    (chunk,) = chunks = build("moe", ["middle"])
    chunk.config.cuda_graph_impl = "transformer_engine"
    first, second, third, *_ = chunk.parameters()
    first.grad_added_to_main_grad, second.grad_added_to_main_grad = True, False
    del third.grad_added_to_main_grad
    with prewarm_state.preserved(chunks):
        first.grad_added_to_main_grad = False
        second.grad_added_to_main_grad = third.grad_added_to_main_grad = True
    assert first.grad_added_to_main_grad and not second.grad_added_to_main_grad
    assert not hasattr(third, "grad_added_to_main_grad")


def test_parameters_are_not_gathered(monkeypatch):
    gathered = []
    monkeypatch.setattr(
        _ParamAndGradBucketGroup, "start_param_sync", lambda *_, **__: gathered.append("gather")
    )
    chunks = build("dsa mtp", ["first", "last"])
    hooks = [len(chunk.remove_forward_pre_hook_handles) for chunk in chunks]
    assert all(hooks)
    with prewarm_state.preserved(chunks):
        assert not any(chunk.remove_forward_pre_hook_handles for chunk in chunks)
        passes(chunks)
    assert gathered == []
    assert [len(chunk.remove_forward_pre_hook_handles) for chunk in chunks] == hooks
    for chunk in chunks:
        assert not any(group.param_gather_dispatched for group in chunk.bucket_groups)
        chunk.disable_forward_pre_hook(param_sync=False)  # as the training loop does, with asserts


LOSS_SCALES = (MoEAuxLossAutoScaler, DSAIndexerLossAutoScaler, MTPLossAutoScaler)


def test_loss_scales_that_were_never_set():
    unset = [scaler.main_loss_backward_scale for scaler in LOSS_SCALES]
    chunks = build("dsa mtp", ["last"])
    with prewarm_state.preserved(chunks):
        passes(chunks)
        assert [scaler.main_loss_backward_scale.tolist() for scaler in LOSS_SCALES] == [[0.5]] * 3
    assert unset[:2] == [None, None]
    for scaler, scale in zip(LOSS_SCALES, unset):
        assert scaler.main_loss_backward_scale is scale


def test_loss_scales_that_are_set():
    scales = [torch.full((1,), value) for value in (3.0, 4.0, 5.0)]
    for scaler, scale in zip(LOSS_SCALES, scales):
        scaler.main_loss_backward_scale = scale
    chunks = build("dsa mtp", ["last"])
    with pytest.raises(Boom), prewarm_state.preserved(chunks):
        passes(chunks)
        raise_boom()
    for scaler, scale, value in zip(LOSS_SCALES, scales, (3.0, 4.0, 5.0)):
        assert scaler.main_loss_backward_scale is scale and scale.tolist() == [value]


@pytest.mark.parametrize("scaler", LOSS_SCALES[:2])
@pytest.mark.parametrize("preserved", [True, False])
def test_a_scale_that_a_backward_makes_up_does_not_stay(scaler, preserved):
    """It has no dimension, and what iteration 1 sets has one: copying that into it raises."""
    with prewarm_state.preserved([]) if preserved else contextlib.nullcontext():
        x = torch.ones(2, requires_grad=True)
        scaler.apply(x * 1, x.sum()).sum().backward()
        assert scaler.main_loss_backward_scale.shape == ()
    with contextlib.nullcontext() if preserved else pytest.raises(RuntimeError):
        for value in (1.0, 2.0):
            scaler.set_loss_scale(torch.full((1,), value))
        assert scaler.main_loss_backward_scale.tolist() == [2.0]


def test_trackers_that_are_empty_stay_so():
    """A stage on which one holds values reduces them over the pipeline, and waits for the others."""
    chunks = build("dsa mtp", ["last"])
    with prewarm_state.preserved(chunks):
        passes(chunks)
        assert moe_logging.get_moe_metrics_tracker().metrics.keys() >= {"z_loss"}
        assert DSAIndexerLossLoggingHelper.tracker["values"].any()
        assert MTPLossLoggingHelper.tracker["loss_values"].any()
    assert moe_logging._MOE_METRICS_TRACKER is None
    assert DSAIndexerLossLoggingHelper.tracker == MTPLossLoggingHelper.tracker == {}


def test_trackers_that_hold_values():
    dicts = (DSAIndexerLossLoggingHelper.tracker, MTPLossLoggingHelper.tracker)
    for tracker, names in zip(
        dicts, (["values"], ["loss_values", "total_values", "cumulative_total_values"])
    ):
        tracker.update({name: torch.full((3,), 7.0) for name in names}, reduce_group="a group")
    tracker = moe_logging.get_moe_metrics_tracker()
    tracker.record("z_loss", torch.tensor(2.0), layer_number=1, num_layers=3)
    held = [dict(entries) for entries in dicts]
    chunks = build("dsa mtp", ["last"])
    with prewarm_state.preserved(chunks):
        passes(chunks)
    assert moe_logging._MOE_METRICS_TRACKER is tracker
    assert tracker.metrics.keys() == {"z_loss"}
    assert tracker.metrics["z_loss"].values.tolist() == [2, 0, 0]
    for entries, before in zip(dicts, held):
        assert entries.keys() == before.keys() and entries["reduce_group"] == "a group"
        for name, value in entries.items():
            assert value is before[name]
            assert value == "a group" or value.tolist() == [7, 7, 7]


def test_recordings_over_iterations_are_off_inside():
    chunks = build("offload", ["middle", "last"])
    for chunk in chunks:
        chunk.config.moe_paged_stash = True
    configs = [
        module.config for chunk in chunks for module in chunk.modules() if "config" in vars(module)
    ]
    before = [dict(vars(config)) for config in configs]
    flags = ("moe_paged_stash", "fine_grained_activation_offloading")
    with pytest.raises(Boom), prewarm_state.preserved(chunks):
        assert not any(getattr(config, flag) for config in configs for flag in flags)
        passes(chunks)
        raise_boom()
    assert [dict(vars(config)) for config in configs] == before
    assert all(getattr(config, flag) for config in configs for flag in flags)
    assert PagedStashManager.STASH_MGR is None
    manager = PipelineOffloadManager.OFFLOAD_MGR
    assert manager._cached_chunks_forward == [] and manager._stages is None


def test_offloading_is_off_inside_after_its_first_iteration(monkeypatch):
    monkeypatch.setattr(transformer_engine, "cpu_offload", SimpleNamespace())
    chunks = build("offload", ["middle"])
    passes(chunks, evaluation=False)
    FineGrainedActivationOffloadingInterface.reset()
    before = fingerprint(chunks)
    with prewarm_state.preserved(chunks):
        passes(chunks)
    assert [path for path, _, _ in differences(before, fingerprint(chunks)) if "MGR" in path] == []


def test_modules_as_they_were():
    (chunk,) = chunks = build("moe", ["middle"])
    decoder = model_of(chunk).decoder
    decoder.input_tensor = sent = torch.ones(1)
    decoder.layers[0].eval()  # as of a part that is frozen
    with prewarm_state.preserved(chunks):
        passes(chunks)
        assert decoder.input_tensor is not sent
    assert decoder.input_tensor is sent
    assert decoder.training and not decoder.layers[0].mlp.training


def test_embedding_gradients_that_are_put_off():
    """The output layer keeps its inputs and their gradients for the end of the iteration."""
    (chunk,) = chunks = build("moe", ["last"])
    model = model_of(chunk)
    layer, weight = model.output_layer, model.output_layer.weight
    layer.config = copy.copy(layer.config)
    layer.config.defer_embedding_wgrad_compute = True
    layer.gradient_accumulation_fusion = True  # the fused kernel comes at the iteration's end
    for name in ("embedding_activation_buffer", "grad_output_buffer"):
        setattr(model, name, [name])
        setattr(layer, name, getattr(model, name))
    with prewarm_state.preserved(chunks):
        passes(chunks)
        assert len(layer.embedding_activation_buffer) == 3 and len(layer.grad_output_buffer) == 2
        assert weight.grad_added_to_main_grad
    assert layer.embedding_activation_buffer == ["embedding_activation_buffer"]
    assert layer.grad_output_buffer == ["grad_output_buffer"]
    assert layer.grad_output_buffer is model.grad_output_buffer
    assert not weight.grad_added_to_main_grad


def test_biases_of_random_routing_are_drawn_by_training():
    kept = torch.ones(4)
    RandomSTEShared._cache[1] = kept
    chunks = build("biased", ["middle"])
    with prewarm_state.preserved(chunks):
        passes(chunks)
        assert RandomSTEShared._cache.keys() == {1, 2}
    assert list(RandomSTEShared._cache) == [1] and RandomSTEShared._cache[1] is kept


def test_recorded_routes():
    chunks = build("replay", ["middle"])
    (replay,) = RouterReplay.global_router_replay_instances
    replay.set_target_indices(target := torch.zeros(2))
    with prewarm_state.preserved(chunks):
        passes(chunks)
        replay.record_indices(torch.ones(2))
        replay.clear_router_replay_action()
        replay.replay_backward_list.append(replay.replay_backward_list.pop() + 1)
    assert replay.recorded_topk_idx is None and replay.target_topk_idx is target
    assert replay.router_replay_action is RouterReplayAction.RECORD
    assert replay.replay_backward_list == [target]


@pytest.mark.parametrize("action", ["RECORD", "REPLAY_BACKWARD"])
def test_routes_are_neither_recorded_nor_replayed(action):
    """Those of training's tokens are not those of 32 synthetic ones."""
    chunks = build("replay", ["middle"])
    (replay,) = RouterReplay.global_router_replay_instances
    replay.set_target_indices(torch.zeros(2, 2, dtype=torch.long))
    replay.set_static_buffer(torch.full((64, 2), -1))
    replay.set_router_replay_action(RouterReplayAction[action])
    before = fingerprint(chunks)
    with prewarm_state.preserved(chunks):
        passes(chunks)
    left = [path for path, _, _ in differences(before, fingerprint(chunks))]
    assert [path for path in left if "router_replay" in path] == []


def test_delayed_scaling():
    """Written in place: the buffers that are reduced over ranks are views of it."""
    chunk = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    old, new = chunk
    state = delayed_scaling()
    state.scale.fill_(5)
    state.amax_history[0] = 3
    view, scale = state.amax_history[0], state.scale
    current = SimpleNamespace(scale=torch.ones(3), amax=torch.ones(3))  # keeps no history
    old.fp8_meta = {"recipe": "delayed", "scaling_fwd": state, "scaling_bwd": current}
    new.fp8_meta = {}
    with pytest.raises(Boom), prewarm_state.preserved([chunk]):
        new.fp8_meta["scaling_bwd"] = made = delayed_scaling()
        for changed in (state, made):
            changed.scale.mul_(2)
            changed.amax_history.add_(1)
        current.amax.fill_(9)
        raise_boom()
    assert old.fp8_meta["scaling_fwd"].scale is scale and scale.tolist() == [5, 5, 5]
    assert view.tolist() == [3, 3, 3] and state.amax_history.sum() == 9
    assert new.fp8_meta["scaling_bwd"] is made
    assert made.scale.tolist() == [1, 1, 1] and made.amax_history.count_nonzero() == 0
    assert current.amax.tolist() == [9, 9, 9]


@pytest.mark.parametrize("preserved", [True, False])
def test_local_graphs_are_not_recorded(monkeypatch, preserved):
    if not preserved:
        monkeypatch.delitem(prewarm_state.PRESERVED, "cuda_graphs")
    (chunk,) = chunks = build("moe", ["middle"])
    first, second = model_of(chunk).decoder.layers
    first.cudagraph_manager = whole = graph_manager(chunk.config)
    second.mlp.router.cudagraph_manager = part = graph_manager(chunk.config)
    route = part.func = second.mlp.router.routing
    second.mlp.router.routing = lambda *args, **kwargs: part(second.mlp.router, args, kwargs)
    with prewarm_state.preserved(chunks):
        passes(chunks)
    recorded = [entry[:2] for entry in _CudagraphGlobalRecord.cudagraph_record]
    runners = whole.cudagraph_runners + part.cudagraph_runners
    assert part.func is route
    if preserved:
        assert recorded == runners == []
        assert whole.is_first_microbatch and part.is_first_microbatch
    else:
        assert len(runners) == 2 and len(recorded) == 4


def test_what_a_graph_would_run_gets_all_its_arguments():
    manager = graph_manager(None)
    module = torch.nn.Module()
    manager.func = lambda *args, **kwargs: (args, kwargs)
    with prewarm_state.preserved([]):
        assert manager(module, (1, 2), {"mask": 3}, cache_key="key") == ((1, 2), {"mask": 3})


@pytest.mark.parametrize("preserved", [True, False])
def test_graphs_of_transformer_engine_are_not_replayed(monkeypatch, preserved):
    if not preserved:
        monkeypatch.delitem(prewarm_state.PRESERVED, "cuda_graphs")
    chunks = build("stubs", ["middle"])
    refused = pytest.raises(RuntimeError, match="CUDAGraph requires TransformerEngine")
    with contextlib.nullcontext() if preserved else refused, prewarm_state.preserved(chunks):
        passes(chunks)


@pytest.mark.parametrize("observing", [True, False])
def test_the_observer_of_saved_tensors(observing):
    context = torch.autograd.function.FunctionCtx
    plain = context.save_for_backward
    if observing:
        _CudagraphGlobalRecord._enable_saved_tensors_observer()
    with pytest.raises(Boom), prewarm_state.preserved([]):
        assert context.save_for_backward is plain
        assert _CudagraphGlobalRecord._saved_tensors_observer is None
        raise_boom()
    if observing:
        original, observer = _CudagraphGlobalRecord._saved_tensors_observer
        assert original is plain and context.save_for_backward is observer
    else:
        assert _CudagraphGlobalRecord._saved_tensors_observer is None
        assert context.save_for_backward is plain


def test_an_entry_that_cannot_restore_does_not_keep_the_others_from_it(monkeypatch):
    @contextlib.contextmanager
    def broken(chunks):
        yield
        raise_boom()

    monkeypatch.setitem(prewarm_state.PRESERVED, "broken", broken)
    chunks = build("moe", ["middle"])
    state = torch.get_rng_state()
    with pytest.raises(Boom), prewarm_state.preserved(chunks):
        passes(chunks)
    assert torch.equal(torch.get_rng_state(), state)
    assert moe_logging._MOE_METRICS_TRACKER is None
