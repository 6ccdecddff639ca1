"""A layer norm whose parameters follow the dtype of its input."""

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from megatron.core.transformer.transformer_config import TransformerConfig


class UpcastingLayerNorm(torch.nn.LayerNorm):
    """torch's LayerNorm for inputs of more precision than its parameters.

    torch.nn.LayerNorm refuses float32 inputs where the parameters are bfloat16, which is how DSA's indexer
    calls its norm under ``dsa_indexer_k_norm_fp32``.

    Args:
        config: Not read; the norms that specs name take one.
        hidden_size: Width of the input.
        eps: Added to the variance.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float):
        super().__init__(hidden_size, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        """Normalises the last dimension, in the dtype of `x`."""
        return layer_norm(
            x, self.normalized_shape, self.weight.to(x.dtype), self.bias.to(x.dtype), self.eps
        )
