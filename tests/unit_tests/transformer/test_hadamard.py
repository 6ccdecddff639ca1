"""The PyTorch Hadamard transform, and where DSA finds it."""

import logging

import pytest
import torch

from megatron.core.transformer import hadamard
from megatron.core.transformer.experimental_attention_variant import dsa
from megatron.core.transformer.hadamard import hadamard_transform


def matrix(width):
    """Sylvester's Hadamard matrix, by its definition."""
    h = torch.ones(1, 1, dtype=torch.float64)
    while len(h) < width:
        h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)))
    return h


@pytest.mark.parametrize('width', [1, 2, 8, 128])
@pytest.mark.parametrize('shape', [(), (3,), (2, 0), (5, 2, 3)])
def test_is_the_hadamard_matrix(width, shape):
    torch.manual_seed(0)
    x = torch.randn(*shape, width, dtype=torch.float64)
    torch.testing.assert_close(hadamard_transform(x, scale=0.3), x @ matrix(width) * 0.3)


@pytest.mark.parametrize(
    'dtype, tolerance',
    [(torch.float64, 1e-13), (torch.float32, 1e-6), (torch.float16, 4e-3), (torch.bfloat16, 4e-2)],
)
def test_orthonormal_and_its_own_inverse(dtype, tolerance):
    torch.manual_seed(0)
    x = torch.randn(7, 64).to(dtype)
    y = hadamard_transform(x, scale=64**-0.5)
    assert y.dtype == dtype
    torch.testing.assert_close(
        y.double().norm(dim=-1), x.double().norm(dim=-1), rtol=tolerance, atol=0
    )
    torch.testing.assert_close(hadamard_transform(y, scale=64**-0.5), x, rtol=0, atol=tolerance)


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_half_precision_is_rounded_once(dtype):
    torch.manual_seed(0)
    x = torch.randn(16, 128).to(dtype)
    expected = hadamard_transform(x.float(), scale=128**-0.5).to(dtype)
    assert torch.equal(hadamard_transform(x, scale=128**-0.5), expected)


def test_gradients():
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True).transpose(0, 1)
    assert torch.autograd.gradcheck(lambda x: hadamard_transform(x, scale=0.7), x)
    assert torch.autograd.gradgradcheck(lambda x: hadamard_transform(x, scale=0.7).square(), x)


@pytest.mark.parametrize(
    'x, message',
    [
        (torch.ones(2, 12), 'last dimension of 12, expected a power of two'),
        (torch.ones(2, 0), 'last dimension of 0'),
        (torch.tensor(1.0), 'last dimension of 0'),
        (torch.ones(2, 8, dtype=torch.int32), 'torch.int32 tensor'),
    ],
)
def test_what_has_no_transform(x, message):
    with pytest.raises(ValueError, match=message):
        hadamard_transform(x)


def test_dsa_rotates_any_float_with_it(caplog):
    hadamard._report_fallback.cache_clear()
    torch.manual_seed(0)
    x = torch.randn(5, 1, 2, 16, dtype=torch.float64)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            rotated = dsa.rotate_activation(x)
    torch.testing.assert_close(rotated, x @ matrix(16) / 4)
    assert sum('fast_hadamard_transform' in record.message for record in caplog.records) == 1


def test_dsa_has_a_transform_without_the_package():
    try:
        import fast_hadamard_transform
    except ImportError:
        assert dsa.hadamard_transform is hadamard_transform
    else:
        assert dsa.hadamard_transform is fast_hadamard_transform.hadamard_transform
