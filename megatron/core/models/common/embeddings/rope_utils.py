"""Layer of megatron/core/models/common/embeddings/rope_utils.py.

Same as upstream but for:
- _apply_rotary_pos_emb_thd: takes packs with tokens beyond the last offset (a padded tail), at which
  upstream's raises.
- _rotate_half: takes a sequence without tokens, at which upstream's raises if `rotary_interleaved` is set.
"""

import torch
from torch import Tensor

from megatron.overlay import upstream_of

upstream = upstream_of(__name__)


def _rotate_half(x: Tensor, rotary_interleaved: bool) -> Tensor:
    """Maps each pair (even, odd) of the last dimension of [s, b, h, d] to (-odd, even)."""
    return upstream._rotate_half(x, rotary_interleaved) if x.numel() else x


def _apply_rotary_pos_emb_thd(
    t: Tensor, cu_seqlens: Tensor, freqs: Tensor, *args, cp_group=None, **kwargs
) -> Tensor:
    """Rotates [t, h, d], each sequence of the pack from position 0 on; a padded tail stays as it is."""
    cp_size = 1 if cp_group is None else cp_group.size()
    covered = int(cu_seqlens[-1]) // cp_size
    if covered == t.size(0):
        return upstream._apply_rotary_pos_emb_thd(
            t, cu_seqlens, freqs, *args, cp_group=cp_group, **kwargs
        )
    rotated = upstream._apply_rotary_pos_emb_thd(
        t[:covered], cu_seqlens, freqs, *args, cp_group=cp_group, **kwargs
    )
    return torch.cat((rotated, t[covered:]))
