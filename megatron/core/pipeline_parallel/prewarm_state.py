"""What a synthetic forward and backward pass touches, and how each piece is put back.

Every entry of ``PRESERVED`` is a context manager over the model chunks: it saves on entry and restores, in
place, on exit. ``preserved`` enters them all. The first entry is restored last, so random number generators
come first: whatever the other entries draw is undone with the rest.
"""

import contextlib
import random
from typing import Any, Callable, Iterator

import numpy as np
import torch

from megatron.core.pipeline_parallel.fine_grained_activation_offload import (
    FineGrainedActivationOffloadingInterface,
)
from megatron.core.tensor_parallel import random as checkpointing
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.cuda_graphs import CudaGraphManager, _CudagraphGlobalRecord
from megatron.core.transformer.experimental_attention_variant.dsa import (
    DSAIndexerLossAutoScaler,
    DSAIndexerLossLoggingHelper,
)
from megatron.core.transformer.module import GraphableMegatronModule, MegatronModule
from megatron.core.transformer.moe import moe_logging
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, RandomSTEShared
from megatron.core.transformer.moe.router_replay import RouterReplay
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler, MTPLossLoggingHelper

Chunks = list[Any]  # of torch.nn.Module; DistributedDataParallel's own methods among its attributes

# Plain attributes of modules that a pass changes. Transformer Engine overwrites main_grad in the first
# microbatch and adds to it later, so is_first_microbatch counts in bf16 too.
MODULE_ATTRIBUTES = (
    "training",
    "input_tensor",
    "is_first_microbatch",
    "current_microbatch",
    "current_max_attn_logits",
)
# Schedules of these are recorded over whole iterations, which a single pass is not.
OFFLOADING = "fine_grained_activation_offloading"
FLAGS_OFF = ("moe_paged_stash", OFFLOADING)
_ABSENT = object()


@contextlib.contextmanager
def preserved(chunks: Chunks) -> Iterator[None]:
    """Whatever the body's passes through ``chunks`` change is as before when it is left, by any way."""
    inside_checkpoint = checkpointing.IS_CHECKPOINTING  # stays set when a recomputed forward raises
    with contextlib.ExitStack() as stack:
        for preserve in PRESERVED.values():
            stack.enter_context(preserve(chunks))
        try:
            yield
        finally:
            checkpointing.IS_CHECKPOINTING = inside_checkpoint
            torch.cuda.synchronize()


@contextlib.contextmanager
def rng(chunks: Chunks) -> Iterator[None]:
    """Generators of Python, NumPy, torch on the CPU and the device, and the tracker's.

    The tracker holds states as bytes, or, for CUDA graphs, as generators that others hold too: those
    are written in place, for ``get_states`` would hand out the very same objects.
    """
    tracker = get_cuda_rng_tracker()
    states = {name: _state_of(value) for name, value in tracker.states_.items()}
    python, numpy_, cpu, cuda = (
        random.getstate(),
        np.random.get_state(),
        torch.get_rng_state(),
        torch.cuda.get_rng_state(),
    )
    try:
        yield
    finally:
        for name, state in states.items():
            if isinstance(tracker.states_[name], torch.Generator):
                tracker.states_[name].set_state(state)
            else:
                tracker.states_[name] = state
        random.setstate(python)
        np.random.set_state(numpy_)
        torch.cuda.set_rng_state(cuda)
        torch.set_rng_state(cpu)


def _state_of(value: torch.Generator | torch.Tensor) -> torch.Tensor:
    return value.get_state() if isinstance(value, torch.Generator) else value.clone()


@contextlib.contextmanager
def buffers(chunks: Chunks) -> Iterator[None]:
    """Registered buffers: router biases and token counts, and whatever else a module keeps.

    Copied back into the same tensor: the router's first forward turns its bias from bf16 to fp32. A buffer
    that a pass registered anew is a table computed from the configuration, and its module says of what kind.
    """
    saved = [
        (module, name, buffer, None if buffer is None else buffer.detach().clone())
        for module in _modules(chunks)
        for name, buffer in module._buffers.items()
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for module, name, buffer, value in saved:
                if value is None:
                    module._buffers[name] = None
                elif buffer is not None and module._buffers.get(name) is buffer:
                    buffer.copy_(value)


@contextlib.contextmanager
def gradients(chunks: Chunks) -> Iterator[None]:
    """``grad`` and ``main_grad``, and the bookkeeping of their buckets.

    Inside, no bucket counts its parameters as ready, so none communicates. Gradient buffers are left
    zeroed, as every iteration finds them.
    """
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
    saved = [
        (parameter, parameter.grad, getattr(parameter, "grad_added_to_main_grad", _ABSENT))
        for parameter in parameters
    ]
    for parameter in parameters:
        parameter.grad = None
    with contextlib.ExitStack() as stack:
        for chunk in chunks:
            if hasattr(chunk, "no_sync"):
                stack.enter_context(chunk.no_sync())
        try:
            yield
        finally:
            for chunk in chunks:
                if hasattr(chunk, "zero_grad_buffer"):
                    chunk.zero_grad_buffer()
            for parameter, grad, added in saved:
                parameter.grad = grad
                _put_back(parameter, "grad_added_to_main_grad", added)


@contextlib.contextmanager
def parameter_gathering(chunks: Chunks) -> Iterator[None]:
    """The hooks that gather parameters before each module's forward are off inside, as in iteration 1."""
    hooked = [chunk for chunk in chunks if getattr(chunk, "remove_forward_pre_hook_handles", None)]
    for chunk in hooked:
        chunk.disable_forward_pre_hook(param_sync=False)
    try:
        yield
    finally:
        for chunk in hooked:
            chunk.enable_forward_pre_hook()


@contextlib.contextmanager
def module_attributes(chunks: Chunks) -> Iterator[None]:
    """MODULE_ATTRIBUTES, the embedding's deferred gradient inputs, and the dispatchers' overflow flags."""
    modules = _modules(chunks)
    saved = [
        (module, name, vars(module).get(name, _ABSENT))
        for module in modules
        for name in MODULE_ATTRIBUTES
    ]
    lists = [
        (module_list, list(module_list))
        for module in modules
        for name in ("embedding_activation_buffer", "grad_output_buffer")
        if isinstance(module_list := vars(module).get(name), list)
    ]
    managers = [
        getattr(vars(module).get("token_dispatcher"), "_comm_manager", None) for module in modules
    ]
    found = [getattr(manager, "over_budget", None) for manager in managers]
    flags = [(flag, flag.clone()) for flag in found if flag is not None]
    try:
        yield
    finally:
        for module, name, value in saved:
            _put_back(module, name, value)
        for module_list, elements in lists:
            module_list[:] = elements
        for flag, value in flags:
            flag.copy_(value)


@contextlib.contextmanager
def configs(chunks: Chunks) -> Iterator[None]:
    """Attributes of every config that a module holds, FLAGS_OFF among them.

    DSA's shared top-k indices hang on the config when neither a mask nor packed parameters carry them.
    """
    found = {
        id(module.config): module.config for module in _modules(chunks) if hasattr(module, "config")
    }
    saved = [(config, dict(vars(config))) for config in found.values()]
    offloads = any(attributes.get(OFFLOADING) for _, attributes in saved)
    if offloads:  # layers took the flag over when they were made
        FineGrainedActivationOffloadingInterface.disable_offload()
    for config, attributes in saved:
        for name in FLAGS_OFF:
            if attributes.get(name):
                setattr(config, name, False)
        for name in attributes:
            if name.startswith("_dsa_index_share"):
                delattr(config, name)  # a dictionary that a pass would write into
    try:
        yield
    finally:
        for config, attributes in saved:
            vars(config).clear()
            vars(config).update(attributes)
        if offloads:
            FineGrainedActivationOffloadingInterface.enable_offload()


@contextlib.contextmanager
def loss_scales(chunks: Chunks) -> Iterator[None]:
    """The scales that auxiliary losses take in backward: bound once, then written in place."""
    scalers = (MoEAuxLossAutoScaler, DSAIndexerLossAutoScaler, MTPLossAutoScaler)
    name = "main_loss_backward_scale"
    scales = [(scaler, getattr(scaler, name)) for scaler in scalers]
    saved = [
        (scaler, scale, scale.clone() if torch.is_tensor(scale) else None)
        for scaler, scale in scales
    ]
    try:
        yield
    finally:
        for scaler, scale, value in saved:
            if value is not None:
                scale.copy_(value)
            setattr(scaler, name, scale)


@contextlib.contextmanager
def trackers(chunks: Chunks) -> Iterator[None]:
    """What is logged at the end of an iteration: MoE, DSA indexer and multi-token prediction losses.

    Some are reduced over the pipeline only where they hold values: one left on a single stage would
    make that reduction wait for ever.
    """
    moe = moe_logging._MOE_METRICS_TRACKER
    moe_logging.set_moe_metrics_tracker(moe_logging.MoEMetricsTracker())
    dicts = (DSAIndexerLossLoggingHelper.tracker, MTPLossLoggingHelper.tracker)
    saved = [
        {
            key: (value, value.clone() if torch.is_tensor(value) else None)
            for key, value in tracker.items()
        }
        for tracker in dicts
    ]
    try:
        yield
    finally:
        moe_logging._MOE_METRICS_TRACKER = moe
        for tracker, entries in zip(dicts, saved):
            tracker.clear()
            for key, (value, copy) in entries.items():
                if copy is not None:
                    value.copy_(copy)
                tracker[key] = value


@contextlib.contextmanager
def routing(chunks: Chunks) -> Iterator[None]:
    """Biases that random routing draws once and keeps, and what routers record to be replayed."""
    cache = dict(RandomSTEShared._cache)
    replays = [
        (
            replay,
            {
                key: list(value) if isinstance(value, list) else value
                for key, value in vars(replay).items()
            },
        )
        for replay in RouterReplay.global_router_replay_instances
    ]
    for replay, _ in replays:
        replay.clear_router_replay_action()  # routes of synthetic tokens are no routes of training's
    try:
        yield
    finally:
        RandomSTEShared._cache.clear()
        RandomSTEShared._cache.update(cache)
        for replay, attributes in replays:
            vars(replay).clear()
            vars(replay).update(attributes)


@contextlib.contextmanager
def fp8(chunks: Chunks) -> Iterator[None]:
    """Scales and amax histories of Transformer Engine's delayed scaling; other recipes keep none.

    Those that the first pass makes are set to what they are made with: scale 1, history 0. In place,
    because the buffers that reduce them over ranks hold views.
    """
    modules = [module for module in _modules(chunks) if isinstance(_fp8_meta(module), dict)]
    saved = {
        (index, key): (state.scale.clone(), state.amax_history.clone())
        for index, module in enumerate(modules)
        for key, state in _delayed_scaling(module)
    }
    try:
        yield
    finally:
        with torch.no_grad():
            for index, module in enumerate(modules):
                for key, state in _delayed_scaling(module):
                    scale, history = saved.get((index, key), (torch.tensor(1.0), torch.tensor(0.0)))
                    state.scale.copy_(scale)
                    state.amax_history.copy_(history)


def _fp8_meta(module: torch.nn.Module) -> Any:
    return getattr(module, "fp8_meta", None)


def _delayed_scaling(module: torch.nn.Module) -> list[tuple[str, Any]]:
    return [
        (key, state)
        for key, state in _fp8_meta(module).items()
        if torch.is_tensor(getattr(state, "amax_history", None)) and torch.is_tensor(state.scale)
    ]


@contextlib.contextmanager
def cuda_graphs(chunks: Chunks) -> Iterator[None]:
    """No CUDA graph is recorded, captured or replayed inside: what would call one runs eagerly."""
    observing = _CudagraphGlobalRecord._saved_tensors_observer is not None
    _CudagraphGlobalRecord._disable_saved_tensors_observer()
    replaced: list[tuple[type, str, Any]] = [
        (CudaGraphManager, "__call__", _call_eagerly),
        (GraphableMegatronModule, "_should_call_te_cudagraph", lambda self, *args, **kwargs: False),
    ]
    saved = [(owner, name, vars(owner)[name]) for owner, name, _ in replaced]
    for owner, name, value in replaced:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in saved:
            setattr(owner, name, value)
        if observing:
            _CudagraphGlobalRecord._enable_saved_tensors_observer()


def _call_eagerly(manager: Any, module: Any, args: tuple, kwargs: dict, cache_key: Any = None):
    """Stands for ``CudaGraphManager.__call__``: what it does where no graph may be used."""
    if manager.func is not None:
        return manager.func(*args, **kwargs)
    return super(MegatronModule, module).__call__(*args, **kwargs)


def _modules(chunks: Chunks) -> list[torch.nn.Module]:
    return [module for chunk in chunks for module in chunk.modules()]


def _put_back(owner: Any, name: str, value: Any) -> None:
    if value is not _ABSENT:
        setattr(owner, name, value)
    elif name in vars(owner):
        delattr(owner, name)


PRESERVED: dict[str, Callable[[Chunks], contextlib.AbstractContextManager[None]]] = {
    "rng": rng,
    "configs": configs,
    "cuda_graphs": cuda_graphs,
    "parameter_gathering": parameter_gathering,
    "gradients": gradients,
    "buffers": buffers,
    "fp8": fp8,
    "module_attributes": module_attributes,
    "loss_scales": loss_scales,
    "trackers": trackers,
    "routing": routing,
}
