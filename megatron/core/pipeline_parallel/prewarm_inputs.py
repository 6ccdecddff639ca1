"""Synthetic inputs of a model chunk, as its pipeline stage would receive them."""

import inspect
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.utils import unwrap_model


@dataclass(frozen=True)
class Packing:
    """How the run packs sequences.

    Attributes:
        entries: Entries of a microbatch's cu_seqlens; None if they vary. Two mean one sequence.
        padded: Whether the padded offsets are given too, as a tensor of their own.
    """

    entries: int | None = None
    padded: bool = False


@dataclass(frozen=True)
class Microbatch:
    """What every microbatch of the run looks like.

    Attributes:
        seq_length: Tokens of a sample, or of a pack, over all context-parallel ranks.
        micro_batch_size: Samples. Packs are laid end to end in one row.
        packing: None for unpacked sequences.
        attention_mask: Whether data loaders make a dense mask.
    """

    seq_length: int
    micro_batch_size: int
    packing: Packing | None = None
    attention_mask: bool = False


VARYING = 5  # entries of a pack whose number of documents varies: four sequences


def generator_of(groups: Any, chunk: int, sequence_parallel: bool) -> torch.Generator:
    """A private generator: equal on the ranks that see equal inputs, different on all others.

    Args:
        groups: ProcessGroupCollection with pp, dp_cp and tp.
        chunk: The model chunk's index on its stage.
        sequence_parallel: Then tensor-parallel ranks hold different tokens.
    """
    seed = 0
    ranks = [groups.pp.rank(), groups.dp_cp.rank(), chunk]
    for part in [*ranks, groups.tp.rank() if sequence_parallel else 0]:
        seed = seed * 65537 + part + 1
    return torch.Generator(device=_device()).manual_seed(seed % 2**63)


def chunk_inputs(
    chunk: torch.nn.Module, config: Any, microbatch: Microbatch, generator: torch.Generator
) -> tuple[torch.Tensor | None, dict[str, Any]]:
    """What ``chunk`` takes in training.

    Values are random: equal ones would send every token to the same experts.

    Args:
        chunk: A GPT or hybrid model chunk, wrapped or not.
        config: ModelParallelConfig of the run.
        microbatch: The run's microbatches.
        generator: On the chunk's device.

    Returns:
        hidden states [s / cp (/ tp with sequence parallelism), b, h] of ``config.pipeline_dtype``, None
        for the first chunk; and keyword arguments of the chunk's forward: ``input_ids``,
        ``position_ids``, ``labels`` int64 and ``loss_mask`` float [b, s / cp], ``attention_mask`` bool
        [b, 1, s / cp, s], each None where the chunk's stage has none.
    """
    model = unwrap_model(chunk)
    rows, length = microbatch.micro_batch_size, microbatch.seq_length
    if microbatch.packing is not None:
        rows, length = 1, rows * length
    local = length // config.context_parallel_size
    prediction = getattr(model, "mtp_process", False)

    def integers(size: int) -> torch.Tensor:
        return torch.randint(size, (rows, local), generator=generator, device=_device())

    inputs: dict[str, Any] = dict.fromkeys(
        ("input_ids", "position_ids", "attention_mask", "labels", "loss_mask")
    )
    if model.pre_process or prediction:
        inputs["input_ids"] = integers(model.vocab_size)
        inputs["position_ids"] = torch.arange(local, device=_device()).repeat(rows, 1)
    if model.post_process:
        inputs["labels"] = integers(model.vocab_size)
        inputs["loss_mask"] = torch.ones(rows, local, device=_device())
    holds_data = model.pre_process or model.post_process or prediction
    if microbatch.attention_mask and microbatch.packing is None and holds_data:
        mask = torch.ones(local, length, dtype=torch.bool, device=_device()).triu(1)
        inputs["attention_mask"] = mask.repeat(rows, 1, 1, 1)
    if microbatch.packing is not None:
        inputs["packed_seq_params"] = packed_seq_params(chunk, config, microbatch)
    takes = inspect.signature(model.forward).parameters
    inputs = {name: value for name, value in inputs.items() if name in takes}
    if model.pre_process:
        return None, inputs
    hidden = local // (config.tensor_model_parallel_size if config.sequence_parallel else 1)
    if getattr(config, "mtp_standalone", False) and model.post_process and not prediction:
        hidden *= (
            1 + config.mtp_num_layers
        )  # the prediction's outputs come along, one behind the other
    states = torch.randn(
        (hidden, rows, config.hidden_size),
        generator=generator,
        device=_device(),
        dtype=config.pipeline_dtype or config.params_dtype,
    )
    return states.requires_grad_(), inputs


def packed_seq_params(
    chunk: torch.nn.Module, config: Any, microbatch: Microbatch
) -> PackedSeqParams:
    """Several sequences of unequal length that fill the microbatch; one if its cu_seqlens has two entries.

    As in real self-attention batches, one tensor serves q and kv, and another both padded ones.
    """
    packing = microbatch.packing
    assert packing is not None
    tokens = microbatch.micro_batch_size * microbatch.seq_length
    entries = packing.entries or VARYING
    # Zigzag splitting needs two equal parts of every sequence on every rank.
    part = 2 * config.context_parallel_size
    offsets = _offsets(tokens, entries, part if tokens % part == 0 else 1)
    tensors: dict[str, Any] = {}
    if getattr(config, "sequence_packing_scheduler", None):
        tensors = _static_offsets(chunk, microbatch)
    if not tensors:
        real = torch.empty(entries, dtype=torch.int32, device=_device())
        padded = torch.empty_like(real) if packing.padded else None
        tensors = {f"cu_seqlens_{name}": real for name in ("q", "kv")}
        tensors |= {f"cu_seqlens_{name}_padded": padded for name in ("q", "kv")}
    for tensor in tensors.values():
        if tensor is not None:
            tensor.copy_(torch.tensor(offsets, dtype=torch.int32))
    longest = max(end - start for start, end in zip(offsets, offsets[1:]))
    return PackedSeqParams(qkv_format="thd", **tensors, max_seqlen_q=longest, max_seqlen_kv=longest)


def _static_offsets(chunk: torch.nn.Module, microbatch: Microbatch) -> dict[str, torch.Tensor]:
    """The cu_seqlens of fixed capacity that the chunk's layers take; nothing for a chunk without layers."""
    from megatron.core.transformer.transformer_layer import TransformerLayer

    for layer in chunk.modules():
        if isinstance(layer, TransformerLayer):
            inputs = layer.get_layer_static_inputs(
                microbatch.seq_length, microbatch.micro_batch_size, for_pipeline_prewarm=True
            )
            return {name: inputs[name] for name in inputs if name.startswith("cu_seqlens")}
    return {}


def _offsets(tokens: int, entries: int, part: int) -> list[int]:
    """``entries`` offsets from 0 to ``tokens`` in multiples of ``part``, with growing distances.

    Where there are more sequences than parts, the last ones are empty.
    """
    sequences, parts = entries - 1, tokens // part
    used = min(sequences, parts)
    weights = list(range(1, used + 1))
    shares = [1 + (parts - used) * weight // sum(weights) for weight in weights]
    shares[-1] += parts - sum(shares)
    offsets = [0, *accumulate(share * part for share in shares)]
    return offsets + [tokens] * (entries - len(offsets))


def _device() -> torch.device:
    current = torch.cuda.current_device()
    return current if isinstance(current, torch.device) else torch.device("cuda", current)
