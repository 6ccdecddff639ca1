"""Rotary embeddings of a pack."""

import pytest
import torch

from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rope_utils import (
    _apply_rotary_pos_emb_bshd,
    _apply_rotary_pos_emb_thd,
)


@pytest.mark.parametrize('tail', [0, 3])
@pytest.mark.parametrize('interleaved', [False, True])
def test_each_sequence_starts_at_position_zero(single_rank, pack, tail, interleaved):
    torch.manual_seed(0)
    packed = pack([4, 0, 1, 6], tail=tail)
    t = torch.randn(packed.tokens, 2, 8, device='cuda', requires_grad=True)
    freqs = torch.randn(6, 1, 1, 8, device='cuda')
    group = parallel_state.get_context_parallel_group()
    arguments = {'rotary_interleaved': interleaved, 'mscale': 1.5}
    rotated = _apply_rotary_pos_emb_thd(
        t, packed.params().cu_seqlens_q, freqs, cp_group=group, **arguments
    )
    for start, length in packed.spans:
        rows = slice(start, start + length)
        alone = _apply_rotary_pos_emb_bshd(t[rows].unsqueeze(1), freqs[:length], **arguments)
        assert torch.equal(rotated[rows], alone.squeeze(1))
    # Beyond the last offset there is no position, and the rows stay as they are.
    assert torch.equal(rotated[11:], t[11:])
    (grad,) = torch.autograd.grad(rotated.sum(), t)
    assert grad.isfinite().all() and (grad[11:] == 1).all()
