"""The linear layer whose weight is the same on every tensor parallel rank."""

import pytest
import torch

from megatron.core import parallel_state
from megatron.core.tensor_parallel.duplicated_linear import DuplicatedLinear
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig


def layer(bias=False, skip_bias_add=False, config_fields={}, **arguments):
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, **config_fields)
    return DuplicatedLinear(
        8,
        6,
        config=config,
        init_method=config.init_method,
        bias=bias,
        skip_bias_add=skip_bias_add,
        **arguments,
    )


def test_forward(single_rank):
    torch.manual_seed(0)
    x = torch.randn(5, 3, 8, device='cuda')
    linear = layer(bias=True)
    torch.nn.init.normal_(linear.bias)
    output, bias = linear(x)
    torch.testing.assert_close(output, x @ linear.weight.t() + linear.bias)
    assert bias is None
    assert layer()(x)[1] is None


def test_bias_is_returned_for_the_caller_to_add(single_rank):
    torch.manual_seed(0)
    x = torch.randn(5, 8, device='cuda')
    linear = layer(bias=True, skip_bias_add=True)
    torch.nn.init.normal_(linear.bias)
    output, bias = linear(x)
    torch.testing.assert_close(output, x @ linear.weight.t())
    assert bias is linear.bias


@pytest.mark.parametrize('use_cpu_initialization', [False, True])
def test_weights_are_the_same_on_every_tensor_parallel_rank(
    single_rank, monkeypatch, use_cpu_initialization
):
    weights = []
    for rank in (0, 1):
        torch.manual_seed(5)
        model_parallel_cuda_manual_seed(5, tp_rank=rank, force_reset_rng=True)
        if not use_cpu_initialization:
            torch.rand(rank, device='cuda')  # another layer may have moved the default state apart
        fields = {'use_cpu_initialization': use_cpu_initialization}
        weights.append(layer(config_fields=fields).weight)
    assert torch.equal(*weights)
    assert weights[0].std() < 0.1  # init_method's, whose deviation is 0.02, not PyTorch's


def test_parameters_are_marked_for_the_reductions_of_their_gradients(single_rank):
    weight = layer(config_fields={'params_dtype': torch.bfloat16}).weight
    assert weight.dtype == torch.bfloat16
    assert (weight.allreduce, weight.tensor_model_parallel) == (True, False)
    assert weight.sequence_parallel is False


def test_a_checkpoint_holds_the_weight_once(single_rank):
    metadata = {'dp_cp_group': parallel_state.get_data_parallel_group(with_context_parallel=True)}
    sharded = layer().sharded_state_dict(prefix='indexer.', metadata=metadata)
    (tensor,) = sharded.values()
    assert (tensor.key, tensor.global_shape, tensor.global_offset) == (
        'indexer.weight',
        (6, 8),
        (0, 0),
    )


@pytest.mark.parametrize(
    'arguments, message',
    [
        ({'parallel_mode': 'column'}, "parallel_mode is 'column'"),
        ({'skip_weight_param_allocation': True}, 'skip_weight_param_allocation is True'),
    ],
)
def test_other_kinds_of_layer_are_refused(single_rank, arguments, message):
    with pytest.raises(ValueError, match=message):
        layer(**arguments)
