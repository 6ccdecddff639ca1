"""Layer of megatron/core/transformer/multi_token_prediction.py.

Same as upstream but for:
- _roll_tensor_packed_seq: rolls a pack with padding between its sequences by where they lie. Upstream goes
  by their real lengths and rolls tokens from one sequence into another.
"""

from types import SimpleNamespace
from typing import Optional

from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.overlay import upstream_of

upstream = upstream_of(__name__)


def _roll_tensor_packed_seq(
    tensor: Tensor,
    shifts: int,
    dims: int,
    packed_seq_params: PackedSeqParams,
    cp_group: Optional[ProcessGroup] = None,
) -> tuple[Tensor, Tensor]:
    """Rolls [..., t] one token to the left within each sequence; returns it and its sum."""
    offsets = packed_seq_params.cu_seqlens_q_padded
    if offsets is not None:
        packed_seq_params = SimpleNamespace(cu_seqlens_q=offsets)
    return upstream._roll_tensor_packed_seq(tensor, shifts, dims, packed_seq_params, cp_group)
