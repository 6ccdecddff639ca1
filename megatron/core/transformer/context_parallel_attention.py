"""Attention over a sequence that is split over context parallel ranks, in plain PyTorch.

Each rank holds two chunks of the sequence, one from its front and one from its back, so that causal
attention costs every rank the same (the zigzag of ``get_batch_on_this_cp_rank``):

    chunks of the sequence     0 1 2 3       context parallel size 2
    rank 0 holds               0     3
    rank 1 holds                 1 2

Queries stay where they are. Keys and values are gathered, and put into the sequence's order; each of the
rank's chunks then attends to those keys that its mask leaves it. Gradients of keys and values go back by
a reduce-scatter. This is what Transformer Engine calls ``cp_comm_type="all_gather"``. Its other kinds trade
memory for messages, and give the same result.

Results differ from those of one rank by rounding alone: the chunks are matrices of other sizes, whose sums
run in another order, and the gradients of keys are summed over the ranks last.
"""

from typing import Optional

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.sequence_attention import sequence_attention


def context_parallel_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cp_group: ProcessGroup,
    *,
    causal: bool,
    softmax_scale: float,
    attention_mask: Optional[Tensor] = None,
    dropout_p: float = 0.0,
    window_size: Optional[tuple[int, int]] = None,
    softmax_offset: Optional[Tensor] = None,
) -> Tensor:
    """Attention of this rank's queries to the keys of the whole sequence.

    Args:
        query: [s / cp, b, n, d], floating point: this rank's two chunks.
        key: [s / cp, b, n_kv, d]; n is a multiple of n_kv (grouped-query attention).
        value: [s / cp, b, n_kv, d_v].
        cp_group: The ranks that hold the sequence; all of them must call this together.
        causal: A token attends to itself and to what comes before it in the sequence. Otherwise it
            attends to the whole sequence.
        softmax_scale: Factor of the scores.
        attention_mask: Bool [1 or b, 1, s / cp, s], True where a query does not attend to a key, on top of
            `causal`: rows as in `query`, columns in the sequence's order. Not read with a window.
        dropout_p: Probability of dropping an attention weight, drawn from the current RNG state. As
            upstream seeds them, ranks of one context parallel group draw alike.
        window_size: Tokens (left, right) of itself that a token attends to, in place of `causal`.
        softmax_offset: [n], a logit per head that takes part in the softmax and has no value.

    Returns:
        [s / cp, b, n * d_v], in the dtype of `query`, tokens in its order.

    Raises:
        ValueError: Tokens that are not two chunks of one sequence; a mask of another shape.
    """
    tokens, cp_size = query.size(0), cp_group.size()
    if tokens % 2 or key.size(0) != tokens:
        raise ValueError(
            f"query has {tokens} tokens and key {key.size(0)}, expected one even number with context "
            f"parallelism: give the sequence a length that {2 * cp_size} divides. Cross-attention and "
            "key-value caches are for a context parallel size of 1."
        )
    if attention_mask is not None and attention_mask.shape[2:] != (tokens, tokens * cp_size):
        raise ValueError(
            f"attention_mask has shape {list(attention_mask.shape)}, expected [1 or b, 1, {tokens}, "
            f"{tokens * cp_size}]: this rank's rows of the whole sequence's mask."
        )
    key, value = (_gather_sequence(x, cp_group) for x in (key, value))

    chunk = tokens // 2
    outputs = []
    # The chunk's number in the sequence, for this rank's first and second.
    for i, number in enumerate((cp_group.rank(), 2 * cp_size - 1 - cp_group.rank())):
        rows = slice(i * chunk, (i + 1) * chunk)
        start, end = number * chunk, (number + 1) * chunk
        # Keys from `low` to `high`: beyond, the mask lets none of the chunk's queries look.
        low, high = 0, end if causal else key.size(0)
        if window_size is not None:
            low, high = max(0, start - window_size[0]), min(key.size(0), end + window_size[1])
        outputs.append(
            sequence_attention(
                query[rows],
                key[low:high],
                value[low:high],
                causal=causal,
                softmax_scale=softmax_scale,
                dropout_p=dropout_p,
                window_size=window_size,
                softmax_offset=softmax_offset,
                q_start=start - low,
                attention_mask=(
                    None if attention_mask is None else attention_mask[:, :, rows, low:high]
                ),
            )
        )
    return torch.cat(outputs).flatten(2)


def _gather_sequence(x: Tensor, cp_group: ProcessGroup) -> Tensor:
    """Gathers [s / cp, ...] of every rank to [s, ...] in the sequence's order."""
    chunks = gather_from_sequence_parallel_region(x, group=cp_group).chunk(2 * cp_group.size())
    # Front chunks come in rising order and back chunks in falling order, in turns.
    return torch.cat(chunks[0::2] + chunks[1::2][::-1])
