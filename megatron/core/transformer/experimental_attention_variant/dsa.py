"""Layer of megatron/core/transformer/experimental_attention_variant/dsa.py.

Same as upstream but for:
- hadamard_transform: PyTorch's where the fast_hadamard_transform package is missing.
- rotate_activation: takes any floating-point dtype, upstream's bfloat16 alone, and tensors on a CPU.
"""

from torch import Tensor

from megatron.core.transformer import hadamard

try:
    from fast_hadamard_transform import hadamard_transform
except ImportError:
    from megatron.core.transformer.hadamard import hadamard_transform


def rotate_activation(x: Tensor) -> Tensor:
    """Rotates the indexer's queries and keys, which spreads outliers over the channels.

    Args:
        x: [..., head_dim], floating point; head_dim is a power of two.

    Returns:
        A tensor like `x`: its orthonormal Hadamard transform, whose inner products are those of `x`.
    """
    # The package's kernels are CUDA alone.
    transform = hadamard_transform if x.is_cuda else hadamard.hadamard_transform
    return transform(x, scale=x.size(-1) ** -0.5)
