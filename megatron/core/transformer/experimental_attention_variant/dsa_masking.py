"""Layer of megatron/core/transformer/experimental_attention_variant/dsa_masking.py.

Same as upstream but for:
- extract_query_valid_rows_from_packed_seq_params: tells a pack's padding from its offsets. Upstream knows
  of padding only where somebody has set `real_token_mask_q`; otherwise it trains the indexer on it.
"""

from typing import Optional

import torch
from torch import Tensor

from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.overlay import upstream_of

upstream = upstream_of(__name__)


def extract_query_valid_rows_from_packed_seq_params(
    packed_seq_params: Optional[PackedSeqParams], *, b: int, sq: int, device: torch.device
) -> Optional[Tensor]:
    """Which rows of queries are real tokens.

    With context parallelism a rank's rows are not the pack's: there it is for the caller to set
    `real_token_mask_q`, as for upstream.

    Returns:
        [b, sq] bool, or None where all are.
    """
    rows = upstream.extract_query_valid_rows_from_packed_seq_params(
        packed_seq_params, b=b, sq=sq, device=device
    )
    if rows is not None or packed_seq_params is None or packed_seq_params.qkv_format != 'thd':
        return rows
    if parallel_state.get_context_parallel_world_size() > 1:
        return None
    real, padded = packed_seq_params.cu_seqlens_q, packed_seq_params.cu_seqlens_q_padded
    if padded is None or padded is real:
        if int(real[-1]) >= sq:
            return None
        padded = real
    real, padded = (x.to(device=device, dtype=torch.int64) for x in (real, padded))
    position = torch.arange(sq, device=device)
    sequence = torch.searchsorted(padded[1:], position, right=True)
    # One more sequence, empty, for the rows beyond the last offset.
    ends = torch.cat((padded[:-1] + real.diff(), padded.new_zeros(1)))
    return (position < ends[sequence]).unsqueeze(0).expand(b, sq)
