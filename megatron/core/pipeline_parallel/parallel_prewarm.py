"""Pipeline prewarm: every stage compiles its kernels at once, before the first iteration.

In the first iteration of a pipeline each stage waits for the one before it, and only then compiles what its
model chunks need, so the waits add up along the pipeline. ``prewarm`` runs one synthetic forward and backward
through every local chunk on all ranks at the same time, without the pipeline's own communication, and puts
back all that these passes touched: training goes on bit for bit as if they had not been.
"""

import contextlib
import copy
import dataclasses
import datetime
import inspect
import logging
import time
from typing import Any, Callable, Iterator, Sequence

import torch
from torch.utils._pytree import tree_leaves

from megatron.core import parallel_state
from megatron.core.distributed import distributed_data_parallel
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.prewarm_communicators import (
    exchange_once,
    reduce_once,
    reduced_groups,
)
from megatron.core.pipeline_parallel.prewarm_inputs import (
    Microbatch,
    Packing,
    chunk_inputs,
    generator_of,
)
from megatron.core.pipeline_parallel.prewarm_rendezvous import Rendezvous
from megatron.core.pipeline_parallel.prewarm_state import preserved
from megatron.core.pipeline_parallel.startup_timeline import Span, Timeline
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_attr_wrapped_model, log_single_rank, unwrap_model

logger = logging.getLogger(__name__)

SKIPPABLE = ("collectives", "p2p", "evaluation")


def prewarm(
    model: Sequence[torch.nn.Module] | torch.nn.Module,
    config: Any,
    *,
    seq_length: int,
    micro_batch_size: int,
    num_microbatches: int = 1,
    packing: Packing | None = None,
    attention_mask: bool = False,
    evaluation_micro_batch_size: int | None = None,
    skip: Sequence[str] = (),
    unsupported: str | None = None,
    timeout: datetime.timedelta = datetime.timedelta(minutes=10),
    timeline: Timeline | None = None,
    progress: Callable[[str], None] | None = None,
) -> Timeline | None:
    """Compiles all that the local model chunks need for their first iteration, on every rank at once.

    All ranks of the run call it, with equal arguments but for ``model`` and ``timeline``, between
    iterations. Parameters, optimizer, buffers, generators, trackers and loss scales are afterwards
    as before; gradient buffers are zeroed. Without pipeline parallelism it compiles all the same.

    Args:
        model: This rank's chunks, as training calls them (wrapped in DistributedDataParallel or not).
        config: The ModelParallelConfig that the schedules are given.
        seq_length: Tokens of a sample, or of a pack, over all context-parallel ranks.
        micro_batch_size: Samples of a microbatch.
        num_microbatches: Microbatches of an iteration, for the scales of auxiliary losses.
        packing: How sequences are packed; None if they are not. With
            ``config.sequence_packing_scheduler`` it follows from the config.
        attention_mask: Whether data loaders make a dense attention mask.
        evaluation_micro_batch_size: Warms the pass without gradients too; None leaves it out.
        skip: Steps to leave out, of SKIPPABLE.
        unsupported: Why this rank cannot be warmed, if the caller knows a reason.
        timeout: Longest time of one step, and for which ranks that are done wait for the others.
        timeline: Where to record what was done.
        progress: Called with a line when a step is done.

    Returns:
        the timeline, or None if some rank gave a reason not to run, which rank 0 logs.

    Raises:
        PrewarmError: a rank failed; on all ranks, naming rank, stage, chunk and cause.
        ValueError: ``skip`` names a step that does not exist.
    """
    if unknown := sorted(set(skip) - set(SKIPPABLE)):
        raise ValueError(f"skip={unknown}: no such steps; expected some of {', '.join(SKIPPABLE)}")
    chunks: list[torch.nn.Module]
    chunks = [model] if isinstance(model, torch.nn.Module) else list(model)
    groups = get_attr_wrapped_model(chunks[0], "pg_collection", allow_none=True)
    groups = groups or ProcessGroupCollection.use_mpu_process_groups()
    rendezvous = Rendezvous(stage=groups.pp.rank(), timeout=timeout)
    timeline = timeline or Timeline(rendezvous.rank, rendezvous.stage)
    reasons = rendezvous.agree(unsupported or _unsupported(chunks, config))
    if reasons:
        rank, reason = min(reasons.items())
        message = f"pipeline prewarm is skipped, on all ranks: {reason} (rank {rank})"
        log_single_rank(logger, logging.WARNING, message)
        return None
    all_groups = groups  # a model's own may be only those that it needs itself
    if parallel_state.model_parallel_is_initialized():
        all_groups = ProcessGroupCollection.use_mpu_process_groups()
    config = copy.copy(config)
    config.timers = None
    microbatch = Microbatch(seq_length, micro_batch_size, packing, attention_mask)
    if getattr(config, "sequence_packing_scheduler", None):
        tokens = config.max_seqlen_per_dp_cp_rank * config.context_parallel_size
        entries = (config.thd_max_packed_sequences or 1) + 1
        microbatch = Microbatch(tokens, 1, Packing(entries, padded=True))
    warmer = _Warmer(chunks, config, groups, num_microbatches, rendezvous, timeline, progress)
    with timeline.watch_compilations(), rendezvous.guard():
        # Communicators first: all ranks are here, and their memory is still to be had.
        if "collectives" not in skip and torch.distributed.is_initialized():
            with warmer.step("collectives"):
                for name, group in reduced_groups(all_groups, config, chunks[0]).items():
                    rendezvous.step(f"collectives over {name}")
                    reduce_once(group)
        if "p2p" not in skip and groups.pp.size() > 1:
            with warmer.step("p2p"):
                exchange_once(groups, config)
        with preserved(chunks):
            for index in range(len(chunks)):
                warmer.train(index, microbatch)
            if evaluation_micro_batch_size is not None and "evaluation" not in skip:
                scheduled = getattr(config, "sequence_packing_scheduler", None)
                size = 1 if scheduled else evaluation_micro_batch_size
                evaluated = dataclasses.replace(microbatch, micro_batch_size=size)
                for index in range(len(chunks)):
                    warmer.evaluate(index, evaluated)
        done = time.time()
    timeline.spans.append(Span("other stages", "wait", done, time.time(), "prewarm"))
    return timeline


class _Warmer:
    """Runs the passes of one rank."""

    def __init__(self, chunks, config, groups, num_microbatches, rendezvous, timeline, progress):
        self.chunks = chunks
        self.config = config
        self.groups = groups
        self.num_microbatches = num_microbatches
        self.rendezvous = rendezvous
        self.timeline = timeline
        self.progress = progress or (lambda text: None)

    @contextlib.contextmanager
    def step(self, name: str, chunk: int | None = None) -> Iterator[None]:
        """Names what this rank does, for errors and for the timeline."""
        self.rendezvous.step(name)
        start = time.time()
        with self.timeline.span(name, phase="prewarm", chunk=chunk, synchronize=True):
            yield
        self.progress(f"{name}, {time.time() - start:.1f} s")

    def train(self, index: int, microbatch: Microbatch) -> None:
        """One forward and one backward of chunk ``index``; every output gets a gradient."""
        self.chunks[index].train()
        generator = generator_of(self.groups, index, self.config.sequence_parallel)
        with self.step(f"chunk {index} forward", index):
            output = self._forward(index, microbatch, generator)
        with self.step(f"chunk {index} backward", index):
            outputs = [leaf for leaf in tree_leaves(output) if torch.is_tensor(leaf)]
            outputs = [leaf for leaf in outputs if leaf.requires_grad]  # none in a frozen chunk
            gradients = [None if leaf.dim() == 0 else _noise(leaf, generator) for leaf in outputs]
            if outputs:
                torch.autograd.backward(outputs, gradients)

    def evaluate(self, index: int, microbatch: Microbatch) -> None:
        """One forward of chunk ``index`` as evaluation runs it."""
        self.chunks[index].eval()
        generator = generator_of(self.groups, index, self.config.sequence_parallel)
        with self.step(f"chunk {index} evaluation", index), torch.no_grad():
            self._forward(index, microbatch, generator)

    def _forward(self, index: int, microbatch: Microbatch, generator: torch.Generator) -> Any:
        chunk = self.chunks[index]
        states, inputs = chunk_inputs(chunk, self.config, microbatch, generator)

        def loss(output):
            kept = inputs["labels"].numel()
            return output.float().sum(), torch.tensor(kept, device=output.device), {}

        output, _ = schedules.forward_step(
            lambda _, model: (model(**inputs), loss),
            None,
            chunk,
            self.num_microbatches,
            states,
            [],
            self.config,
            self.groups.cp.size(),
            is_first_microbatch=True,
            is_last_stage=unwrap_model(chunk).post_process,
        )
        return output


def _unsupported(chunks: list[torch.nn.Module], config: Any) -> str | None:
    """Why these chunks cannot be warmed, or None."""
    for chunk in chunks:
        model = unwrap_model(chunk)
        parameters = inspect.signature(model.forward).parameters
        needed = {"input_ids", "position_ids", "attention_mask", "labels"}
        parts = ("pre_process", "post_process", "decoder", "vocab_size", "set_input_tensor")
        if not needed <= set(parameters) or not all(hasattr(model, part) for part in parts):
            return f"{type(model).__name__} is neither a GPT nor a hybrid model"
        if "fsdp" in type(chunk).__module__.lower() or "fsdp" in type(chunk).__name__.lower():
            return (
                f"{type(chunk).__name__} shards parameters; only DistributedDataParallel is warmed"
            )
        if getattr(model, "position_embedding_type", None) == "mrope":
            return "position_embedding_type=mrope takes positions of images too"
        for name, module in chunk.named_modules():
            hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
            if foreign := [
                hook for hook in hooks if inspect.getmodule(hook) is not distributed_data_parallel
            ]:
                return f"a forward hook on {name or 'the model'} would see the passes: {foreign[0]}"
    for field, harmless, reason in (
        ("hybrid_context_parallel", False, "its batches change their context-parallel size"),
        ("delay_wgrad_compute", False, "weight gradients put off would be left in their queues"),
        ("cpu_offloading", False, "its offloading handler counts layers over whole iterations"),
        ("gtp_weight_remat_size", 1, "the first forward links its weights in order"),
        ("expert_gtp_weight_remat_size", 1, "the first forward links its weights in order"),
        ("config_logger_dir", "", "every forward writes files there"),
    ):
        value = getattr(config, field, harmless)
        if value != harmless and value is not None:
            return f"{field}={value!r}: {reason}"
    return None


def _noise(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return 1e-3 * torch.randn(like.shape, generator=generator, device=like.device, dtype=like.dtype)
