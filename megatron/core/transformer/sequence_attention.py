"""Attention within one sequence in plain PyTorch: what packs and split sequences are made of."""

from typing import Optional

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def sequence_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool,
    softmax_scale: float,
    dropout_p: float = 0.0,
    window_size: Optional[tuple[int, int]] = None,
    softmax_offset: Optional[Tensor] = None,
    q_start: int = 0,
    attention_mask: Optional[Tensor] = None,
) -> Tensor:
    """Attention of queries that lie next to each other in one sequence.

    Args:
        query: [s, b, n, d], floating point.
        key: [s_kv, b, n_kv, d]; n is a multiple of n_kv.
        value: [s_kv, b, n_kv, d_v].
        causal: A query attends to the key at its own position and to those before it.
        softmax_scale: Factor of the scores.
        dropout_p: Probability of dropping an attention weight, drawn from the current RNG state.
        window_size: Tokens (left, right) of its own position that a query attends to, in place of `causal`.
        softmax_offset: [n], a logit per head that takes part in the softmax and has no value.
        q_start: Position of the first query, counted from the first key.
        attention_mask: Bool [1 or b, 1, s, s_kv], True where a query does not attend to a key, on top of
            `causal`; not read where there is a window, nor does upstream's attention then.

    Returns:
        [s, b, n, d_v], in the dtype of `query`; zero where a query attends to nothing.
    """
    # [s, b, n, d] -> [b, n, s, d], copied: the CPU's matrix kernels round differently on memory that is
    # aligned differently, and a sequence must give the same bits wherever it lies in the pack.
    query, key, value = (
        x.permute(1, 2, 0, 3).clone(memory_format=torch.contiguous_format)
        for x in (query, key, value)
    )

    # SDPA's own causal mask costs no memory. It has the first query and the first key at one position.
    is_causal = causal and window_size is None and attention_mask is None and softmax_offset is None
    is_causal = is_causal and q_start == 0 and query.size(2) == key.size(2)
    mask = None  # [1 or b, 1, s, s_kv], True where a query attends to a key
    if window_size is not None or (causal and not is_causal):
        distance = torch.arange(-q_start, key.size(2) - q_start, device=query.device)
        distance = distance - torch.arange(query.size(2), device=query.device).view(1, 1, -1, 1)
        mask = distance <= (0 if window_size is None else window_size[1])
        if window_size is not None:
            mask &= distance >= -window_size[0]
    if attention_mask is not None and window_size is None:
        mask = ~attention_mask if mask is None else mask & ~attention_mask

    if softmax_offset is not None:
        # One more key in front, of zeros: its score is its bias, the offset, and its value adds nothing.
        key = torch.nn.functional.pad(key, (0, 0, 1, 0))
        value = torch.nn.functional.pad(value, (0, 0, 1, 0))
        batch = 1 if mask is None else mask.size(0)
        bias = query.new_zeros(batch, query.size(1), query.size(2), key.size(2) - 1)
        if mask is not None:
            bias = bias.masked_fill(~mask, float('-inf'))
        offset = softmax_offset.to(query.dtype).view(1, -1, 1, 1).expand(*bias.shape[:3], 1)
        mask = torch.cat((offset, bias), dim=-1)  # [1 or b, n, s, 1 + s_kv]

    output = scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=dropout_p,
        is_causal=is_causal,
        scale=softmax_scale,
        enable_gqa=query.size(1) != key.size(1),
    )
    return _CopyGradient.apply(output).permute(2, 0, 1, 3)


class _CopyGradient(torch.autograd.Function):
    """The identity; its gradient is copied for the reason that the inputs of a sequence are."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad_output: Tensor) -> Tensor:
        return grad_output.clone(memory_format=torch.contiguous_format)
