"""The Walsh-Hadamard transform in PyTorch, for where the fast_hadamard_transform package is missing.

Same call and same order of rows (Sylvester's, that of scipy.linalg.hadamard) as
https://github.com/Dao-AILab/fast-hadamard-transform, whose kernels need CUDA.
"""

import functools
import logging

import torch
from torch import Tensor

from megatron.core.utils import log_single_rank

logger = logging.getLogger(__name__)


def hadamard_transform(x: Tensor, scale: float = 1.0) -> Tensor:
    """Multiplies the last dimension of `x` with the Hadamard matrix of its width.

    With ``scale=width**-0.5`` the transform is orthonormal and its own inverse. Half precision is summed
    in float32 and rounded once.

    Args:
        x: [..., width], floating point; width is a power of two.
        scale: Factor of the result.

    Returns:
        A tensor like `x`.

    Raises:
        ValueError: `x` is not floating point, or its width is not a power of two.
    """
    if not x.is_floating_point():
        raise ValueError(f"x is a {x.dtype} tensor, expected a floating-point dtype.")
    width = x.size(-1) if x.dim() else 0
    if width < 1 or width & (width - 1):
        raise ValueError(
            f"x has a last dimension of {width}, expected a power of two: there is no Hadamard matrix "
            "of Sylvester's kind for it. For DSA, change dsa_indexer_head_dim or set "
            "dsa_indexer_rotate_activation=False."
        )
    _report_fallback()
    return _HadamardTransform.apply(x, scale)


class _HadamardTransform(torch.autograd.Function):
    """The matrix is symmetric: the gradient is the same transform."""

    @staticmethod
    def forward(ctx, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        width = x.size(-1)
        y = x.to(torch.promote_types(x.dtype, torch.float32))
        stride = 1
        while stride < width:
            left, right = y.reshape(-1, width // (2 * stride), 2, stride).unbind(2)
            y = torch.stack((left + right, left - right), dim=2)
            stride *= 2
        return (y.reshape(x.shape) * scale).to(x.dtype)

    @staticmethod
    def backward(ctx, grad_output: Tensor):
        return _HadamardTransform.apply(grad_output, ctx.scale), None


@functools.cache
def _report_fallback() -> None:
    log_single_rank(
        logger,
        logging.WARNING,
        "Hadamard transforms run in PyTorch: the fast_hadamard_transform package is not installed, or "
        "the tensors are not on a GPU.",
    )
