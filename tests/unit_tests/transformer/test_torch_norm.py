"""torch's norms under sequence parallelism."""

import pytest
import torch

from megatron.core.transformer import torch_norm
from megatron.core.transformer.transformer_config import TransformerConfig


def _config(normalization: str, sequence_parallel: bool) -> TransformerConfig:
    return TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=2,
        normalization=normalization,
        tensor_model_parallel_size=2 if sequence_parallel else 1,
        sequence_parallel=sequence_parallel,
    )


@pytest.mark.parametrize(
    "normalization, kind", [("LayerNorm", torch.nn.LayerNorm), ("RMSNorm", torch.nn.RMSNorm)]
)
def test_parameters_are_marked_under_sequence_parallelism_only(normalization, kind):
    for sequence_parallel in (False, True):
        config = _config(normalization, sequence_parallel)
        norm = torch_norm.WrappedTorchNorm(config, 8)
        assert type(norm) is kind
        marks = [getattr(parameter, "sequence_parallel", False) for parameter in norm.parameters()]
        assert marks and all(mark is sequence_parallel for mark in marks)
        assert config.sequence_parallel is sequence_parallel


def test_stock_refuses_it():
    with pytest.raises(AssertionError, match="sequence parallel"):
        torch_norm.upstream.WrappedTorchNorm(_config("LayerNorm", True), 8)
