"""Layer of megatron/core/transformer/multi_latent_attention.py.

Same as upstream but for:
- _prepare_mla_core_attention_value: leaves packed values as they are for DotProductAttention. Upstream
  brings them to the width of the queries, which Transformer Engine needs; where values are the wider ones
  that cuts channels off.
"""

from typing import Optional

from torch import Tensor

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.overlay import upstream_of

upstream = upstream_of(__name__)


def _prepare_mla_core_attention_value(
    parallel_attention: "MultiLatentAttention",
    query: Tensor,
    value: Optional[Tensor],
    packed_seq_params: Optional[PackedSeqParams],
) -> tuple[Optional[Tensor], bool, Optional[int], Optional[int]]:
    """The value for the core attention, whether it is padded, and its width before and after."""
    if value is not None and isinstance(parallel_attention.core_attention, DotProductAttention):
        return value, False, value.size(-1), value.size(-1)
    return upstream._prepare_mla_core_attention_value(
        parallel_attention, query, value, packed_seq_params
    )
