"""Attention over packed (THD) sequences in plain PyTorch.

A pack holds several sequences in one row of tokens, told apart by their offsets (``cu_seqlens``). A
token attends within its own sequence only, so the scores of a pack are block-diagonal: each block is
one call of ``scaled_dot_product_attention``, and no mask or score matrix is larger than one sequence.

    cu_seqlens         0  3  3  7        three sequences of 3, 0 and 4 tokens
    cu_seqlens_padded  0  4  4  8        where each one starts: token 3 and token 7 are padding
    tokens             10                tokens 8 and 9, beyond the last offset, are padding too

Padding is neither read nor written: its output and its gradients are exactly zero.
"""

from dataclasses import dataclass
from typing import Optional

import torch
from torch import Tensor

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.sequence_attention import sequence_attention


@dataclass(frozen=True)
class PackLayout:
    """Host copy of a pack's offsets, one entry per sequence.

    Attributes:
        q_starts: First query token of each sequence in the pack.
        q_lengths: Real query tokens of each sequence, padding left out.
        kv_starts: First key and value token of each sequence.
        kv_lengths: Real key and value tokens of each sequence.
    """

    q_starts: list[int]
    q_lengths: list[int]
    kv_starts: list[int]
    kv_lengths: list[int]

    @classmethod
    def from_packed_seq_params(
        cls, packed_seq_params: PackedSeqParams, q_tokens: int, kv_tokens: int
    ) -> "PackLayout":
        """Reads and checks the offsets. One device-to-host copy, however many fields are set.

        Args:
            packed_seq_params: ``qkv_format`` must be 'thd'. The offsets are 1-D integer tensors of one
                length, [sequences + 1]; the padded ones may both be missing.
            q_tokens: Query tokens in the pack, padding included.
            kv_tokens: Key and value tokens in the pack, padding included.

        Raises:
            ValueError: The field, its value, and what was expected.
        """
        if packed_seq_params.qkv_format != 'thd':
            raise ValueError(
                f"PackedSeqParams.qkv_format is {packed_seq_params.qkv_format!r}, expected 'thd': pass "
                "packed_seq_params=None for sequences that are not packed."
            )
        for name in ('local_cp_size', 'cp_group'):
            value = getattr(packed_seq_params, name)
            size = value.size() if name == 'cp_group' and value is not None else value
            if size not in (None, 1):
                raise ValueError(
                    f"PackedSeqParams.{name} asks for a context parallel size of {size}, expected 1: "
                    "packed context parallelism needs Transformer Engine."
                )
        offsets = _offsets_to_host(packed_seq_params)
        for name, values in offsets.items():
            _check_offsets(name, values, q_tokens if '_q' in name else kv_tokens)

        bounds = {}
        for side in ('q', 'kv'):
            real = offsets[f'cu_seqlens_{side}']
            padded = offsets.get(f'cu_seqlens_{side}_padded', real)
            bounds[side] = (padded[:-1], [end - start for start, end in zip(real, real[1:])])
            for i, length in enumerate(bounds[side][1]):
                room = padded[i + 1] - padded[i]
                if length > room:
                    raise ValueError(
                        f"PackedSeqParams.cu_seqlens_{side} gives sequence {i} a length of {length}, "
                        f"but cu_seqlens_{side}_padded has room for {room}."
                    )
        return cls(*bounds['q'], *bounds['kv'])


def _offsets_to_host(packed_seq_params: PackedSeqParams) -> dict[str, list[int]]:
    """Copies the offsets that are set to the host, by field name."""
    tensors = {
        name: getattr(packed_seq_params, name)
        for name in ('cu_seqlens_q', 'cu_seqlens_kv', 'cu_seqlens_q_padded', 'cu_seqlens_kv_padded')
    }
    paired = (tensors['cu_seqlens_q_padded'] is None) == (tensors['cu_seqlens_kv_padded'] is None)
    for name, tensor in tensors.items():
        if tensor is None:
            if name.endswith('_padded') and paired:
                continue
            raise ValueError(
                f"PackedSeqParams.{name} is None, expected a tensor of offsets: packed attention "
                "takes its query and its key and value offsets as a pair (for self-attention, the "
                "same tensor twice)."
            )
        if tensor.dtype not in (torch.int32, torch.int64) or tensor.dim() != 1 or len(tensor) == 0:
            raise ValueError(
                f"PackedSeqParams.{name} is a {tensor.dtype} tensor of shape {list(tensor.shape)}, "
                "expected int32 or int64 of shape [sequences + 1]."
            )
        if len(tensor) != len(tensors['cu_seqlens_q']):
            raise ValueError(
                f"PackedSeqParams.{name} has {len(tensor)} offsets, expected "
                f"{len(tensors['cu_seqlens_q'])} as in cu_seqlens_q: both describe the same sequences."
            )
    present = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    # Callers mostly pass one tensor under several names: copy each only once.
    distinct = {id(tensor): tensor.long() for tensor in present.values()}
    host = dict(zip(distinct, torch.stack(list(distinct.values())).tolist()))
    return {name: host[id(tensor)] for name, tensor in present.items()}


def _check_offsets(name: str, offsets: list[int], tokens: int) -> None:
    if offsets[0] != 0:
        raise ValueError(f"PackedSeqParams.{name} starts at {offsets[0]}, expected 0.")
    for i, (start, end) in enumerate(zip(offsets, offsets[1:])):
        if end < start:
            raise ValueError(
                f"PackedSeqParams.{name} falls from {start} to {end} at sequence {i}, expected offsets "
                "that never fall."
            )
    if offsets[-1] > tokens:
        raise ValueError(
            f"PackedSeqParams.{name} ends at {offsets[-1]}, expected at most {tokens}, the tokens in "
            "the pack."
        )


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packed_seq_params: PackedSeqParams,
    *,
    causal: bool,
    softmax_scale: float,
    dropout_p: float = 0.0,
    window_size: Optional[tuple[int, int]] = None,
    softmax_offset: Optional[Tensor] = None,
) -> Tensor:
    """Attention within each sequence of a pack.

    Args:
        query: [t, n, d], floating point.
        key: [t_kv, n_kv, d]; n is a multiple of n_kv (grouped-query attention).
        value: [t_kv, n_kv, d_v].
        packed_seq_params: The offsets, see PackLayout.from_packed_seq_params.
        causal: A token attends to itself and to what comes before it in its sequence. Otherwise it
            attends to its whole sequence.
        softmax_scale: Factor of the scores.
        dropout_p: Probability of dropping an attention weight, drawn from the current RNG state.
        window_size: Tokens (left, right) of itself that a token attends to, in place of `causal`.
        softmax_offset: [n], a logit per head that takes part in the softmax and has no value.

    Returns:
        [t, n * d_v], in the dtype of `query`; zero wherever the pack has padding.

    Raises:
        ValueError: Offsets that are not a valid pack; a causal or windowed sequence whose query and
            key lengths differ (which end to align is for the caller to say, and nobody has asked).
    """
    layout = PackLayout.from_packed_seq_params(packed_seq_params, query.size(0), key.size(0))
    if causal or window_size is not None:
        for i, (q_length, kv_length) in enumerate(zip(layout.q_lengths, layout.kv_lengths)):
            if q_length != kv_length:
                raise ValueError(
                    f"PackedSeqParams.cu_seqlens_kv gives sequence {i} a length of {kv_length}, "
                    f"expected {q_length} as in cu_seqlens_q: a causal or windowed mask is defined "
                    "for self-attention only. Use AttnMaskType.no_mask for cross-attention."
                )

    # torch.split rather than slices: its backward is one concatenation, where the backward of each
    # slice would fill a gradient of the whole pack with zeros.
    q_sizes, q_index = _pieces(layout.q_starts, layout.q_lengths, query.size(0))
    kv_sizes, kv_index = _pieces(layout.kv_starts, layout.kv_lengths, key.size(0))
    q_pieces = query.split(q_sizes)
    k_pieces = key.split(kv_sizes)
    v_pieces = value.split(kv_sizes)

    outputs: list[Optional[Tensor]] = [None] * len(q_sizes)
    for q_piece, kv_piece in zip(q_index, kv_index):
        if q_piece is not None and kv_piece is not None:
            outputs[q_piece] = sequence_attention(
                q_pieces[q_piece].unsqueeze(1),
                k_pieces[kv_piece].unsqueeze(1),
                v_pieces[kv_piece].unsqueeze(1),
                causal=causal,
                softmax_scale=softmax_scale,
                dropout_p=dropout_p,
                window_size=window_size,
                softmax_offset=softmax_offset,
            ).squeeze(1)
    output = torch.cat(
        [
            query.new_zeros(size, query.size(1), value.size(2)) if piece is None else piece
            for piece, size in zip(outputs, q_sizes)
        ]
    ).flatten(1)
    if all(piece is None for piece in outputs):
        # Padding alone. Empty sums, exactly zero, give the inputs their gradient all the same: data
        # parallelism waits for that of every parameter behind them.
        for tensor in (query, key, value, softmax_offset):
            if tensor is not None:
                output = output + tensor[:0].sum()
    return output


def _pieces(
    starts: list[int], lengths: list[int], tokens: int
) -> tuple[list[int], list[Optional[int]]]:
    """Cuts the pack into sequences and the padding between them.

    Returns:
        The sizes of the pieces, which add up to `tokens`; and for each sequence the number of its
        piece, None if it has no tokens.
    """
    sizes: list[int] = []
    index: list[Optional[int]] = []
    position = 0
    for start, length in zip(starts, lengths):
        if length == 0:
            index.append(None)
            continue
        if start > position:
            sizes.append(start - position)
        index.append(len(sizes))
        sizes.append(length)
        position = start + length
    if tokens > position or not sizes:
        sizes.append(tokens - position)
    return sizes, index
