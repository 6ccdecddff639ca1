"""Layer of megatron/core/transformer/dot_product_attention.py.

Same as upstream but for:
- forward: takes packed (THD) sequences, and sequences split over context parallel ranks, which upstream
  leaves to Transformer Engine. Without either it is upstream's.
- __init__: takes a context parallel size above 1; and `k_channels` and `v_channels` as
  TEDotProductAttention does, which multi-latent attention passes: upstream's raises a TypeError there.
"""

import copy
import math
from contextlib import nullcontext
from typing import Optional

from torch import Tensor

from megatron.core import parallel_state, tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.context_parallel_attention import context_parallel_attention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.packed_attention import packed_attention
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.overlay import upstream_of

upstream = upstream_of(__name__)

# By what it means within one sequence.
IS_CAUSAL = {
    AttnMaskType.causal: True,
    AttnMaskType.padding_causal: True,
    AttnMaskType.causal_bottom_right: True,  # queries and keys are of one length: the same mask
    AttnMaskType.no_mask: False,
    AttnMaskType.padding: False,
}


class DotProductAttention(upstream.DotProductAttention):
    """Scaled dot-product attention; see packed_attention and context_parallel_attention.

    Args:
        cp_comm_type: Not read: keys and values are gathered whatever it says, with one result.
        k_channels: Channels of a query and key head, kv_channels unless given.
        v_channels: Channels of a value head, kv_channels unless given.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: Optional[float] = None,
        softmax_scale: Optional[float] = None,
        cp_comm_type: Optional[str] = None,
        pg_collection: Optional[ProcessGroupCollection] = None,
        k_channels: Optional[int] = None,
        v_channels: Optional[int] = None,
    ):
        if softmax_scale is None and k_channels is not None:
            softmax_scale = 1.0 / math.sqrt(k_channels)
        stock_config = config
        if config.context_parallel_size > 1:
            # Upstream's constructor takes no other size, and does nothing else with it.
            stock_config = copy.copy(config)
            stock_config.context_parallel_size = 1
        super().__init__(
            config=stock_config,
            layer_number=layer_number,
            attn_mask_type=attn_mask_type,
            attention_type=attention_type,
            attention_dropout=attention_dropout,
            softmax_scale=softmax_scale,
            cp_comm_type=cp_comm_type,
            pg_collection=pg_collection,
        )
        self.config = config
        self.cp_group = None
        if config.context_parallel_size > 1:
            self.cp_group = getattr(self.pg_collection, 'cp', None)
            if self.cp_group is None:
                self.cp_group = parallel_state.get_context_parallel_group()
        if k_channels is not None:
            self.hidden_size_per_attention_head = k_channels
        if v_channels is not None:
            # What upstream's forward gives the output, heads and value channels in one dimension.
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Optional[Tensor],
        attn_mask_type: Optional[AttnMaskType] = None,
        attention_bias: Optional[Tensor] = None,
        packed_seq_params: Optional[PackedSeqParams] = None,
    ) -> Tensor:
        """Attention of [s, b, n, d] to [s, b, n * d_v], or of a pack, [t, n, d] to [t, n * d_v].

        With context parallelism s is this rank's part of the sequence, see context_parallel_attention.
        In a pack the offsets are the mask: `attention_mask` is not read.

        Raises:
            ValueError: What neither a pack nor a split sequence can have: a bias, a negative window. What
                a pack cannot have: context parallelism, a mask of one's own, invalid offsets.
        """
        if packed_seq_params is None and self.cp_group is None:
            return super().forward(
                query, key, value, attention_mask, attn_mask_type, attention_bias, None
            )

        kind = "context parallelism" if packed_seq_params is None else "packed sequences"
        if attention_bias is not None:
            raise ValueError(
                f"attention_bias is a tensor of shape {list(attention_bias.shape)}, expected None "
                f"with {kind}."
            )
        # Upstream's softmax is where the layer keeps its window and query-key layer scaling.
        window_size = self.scale_mask_softmax.window_size
        if window_size is not None and min(window_size) < 0:
            raise ValueError(
                f"window_size is {window_size}, expected two numbers of tokens, none negative, "
                "without Transformer Engine."
            )
        attn_mask_type = attn_mask_type or self.attn_mask_type
        dropout_p = self.attention_dropout.p if self.training else 0.0
        options = {
            'causal': IS_CAUSAL.get(attn_mask_type, False),
            'softmax_scale': self.softmax_scale * (self.scale_mask_softmax.scale or 1),
            'dropout_p': dropout_p,
            'window_size': window_size,
            'softmax_offset': self.softmax_offset,
        }
        draws_from_tracker = dropout_p > 0 and not self.config.sequence_parallel
        rng = tensor_parallel.get_cuda_rng_tracker().fork() if draws_from_tracker else nullcontext()
        if packed_seq_params is None:
            with rng:
                return context_parallel_attention(
                    query, key, value, self.cp_group, attention_mask=attention_mask, **options
                )

        if self.cp_group is not None:
            raise ValueError(
                f"context_parallel_size is {self.config.context_parallel_size}, expected 1 with packed "
                "sequences: packed context parallelism needs Transformer Engine."
            )
        if attn_mask_type not in IS_CAUSAL:
            raise ValueError(
                f"attn_mask_type is {attn_mask_type}, expected one of "
                f"{', '.join(mask.name for mask in IS_CAUSAL)} with packed sequences."
            )
        with rng:
            return packed_attention(query, key, value, packed_seq_params, **options)
