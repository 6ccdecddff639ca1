"""Packed attention without Transformer Engine, against the stock attention of each sequence alone."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.packed_attention import packed_attention
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.overlay import upstream_of

HEADS = 4
UpstreamAttention = upstream_of(
    'megatron.core.transformer.dot_product_attention'
).DotProductAttention

# Short, empty and one-token sequences; padding behind a sequence; a padded tail.
layouts = st.tuples(
    st.lists(
        st.tuples(st.sampled_from([0, 0, 1, 2, 3, 9, 17]), st.sampled_from([0, 0, 1, 3])),
        min_size=1,
        max_size=6,
    ),
    st.sampled_from([0, 0, 2]),
)


def config(**fields):
    return TransformerConfig(
        **{
            'num_layers': 1,
            'hidden_size': 32,
            'num_attention_heads': HEADS,
            'attention_dropout': 0.0,
            'use_cpu_initialization': True,
            **fields,
        }
    )


def attention(mask=AttnMaskType.causal, channels=(8, 8), **fields):
    return DotProductAttention(
        config(**fields),
        layer_number=2,
        attn_mask_type=mask,
        attention_type='self',
        k_channels=channels[0],
        v_channels=channels[1],
    )


def qkv(tokens, channels=(8, 8), groups=HEADS, dtype=torch.float64):
    shapes = [(HEADS, channels[0]), (groups, channels[0]), (groups, channels[1])]
    return [
        torch.randn(tokens, *shape, dtype=dtype, device='cuda', requires_grad=True)
        for shape in shapes
    ]


def make(pack, layout):
    sequences, tail = layout
    return pack(*map(list, zip(*sequences)), tail=tail)


@settings(max_examples=150, deadline=None)
@given(
    layout=layouts,
    groups=st.sampled_from([1, 2, 4]),
    channels=st.sampled_from([(8, 8), (6, 8), (8, 3)]),
    mask=st.sampled_from([AttnMaskType.causal, AttnMaskType.no_mask]),
    fields=st.sampled_from(
        [
            {},
            {'softmax_type': 'off-by-one'},
            {'softmax_type': 'learnable'},
            {'window_size': (2, 0)},
            {'window_size': (3, 1), 'softmax_type': 'learnable'},
            {'apply_query_key_layer_scaling': True, 'attention_softmax_in_fp32': True},
        ]
    ),
    seed=st.integers(0, 2**16),
)
def test_equals_each_sequence_alone(
    single_rank, pack, layout, groups, channels, mask, fields, seed
):
    torch.manual_seed(seed)
    layer = attention(
        mask, channels, num_query_groups=groups, params_dtype=torch.float64, **fields
    ).cuda()
    if fields.get('softmax_type') == 'learnable':
        torch.nn.init.normal_(layer.softmax_offset)
    packed = make(pack, layout)
    inputs = qkv(packed.tokens, channels, groups)
    weight = torch.randn(packed.tokens, HEADS * channels[1], dtype=torch.float64, device='cuda')
    parameters = list(layer.parameters())

    output = layer(*inputs, None, packed_seq_params=packed.params())
    grads = torch.autograd.grad((output * weight).sum(), inputs + parameters, allow_unused=True)

    expected = torch.zeros_like(output)
    expected_grads = [torch.zeros_like(x) for x in inputs + parameters]
    for start, length in packed.spans:
        if length == 0:
            continue
        rows = slice(start, start + length)
        alone = [x.detach()[rows].unsqueeze(1).requires_grad_() for x in inputs]
        y = layer(*alone, None)[:, 0]
        expected[rows] = y.detach()
        for i, grad in enumerate(torch.autograd.grad((y * weight[rows]).sum(), alone + parameters)):
            if i < 3:
                expected_grads[i][rows] = grad[:, 0]
            else:
                expected_grads[i] += grad

    # The stock attention multiplies in another order: float64 leaves both 1e-12 to agree within.
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    for grad, wanted in zip(grads, expected_grads):
        grad = torch.zeros_like(wanted) if grad is None else grad
        torch.testing.assert_close(grad, wanted, rtol=1e-11, atol=1e-11)
    padding = packed.is_padding()
    assert not output[padding].any()
    assert not any(grad[padding].any() for grad in grads[:3])


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 70), min_size=2, max_size=5),
    channels=st.sampled_from([7, 16, 33]),
    heads=st.sampled_from([1, 3]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    causal=st.booleans(),
)
def test_bits_do_not_depend_on_the_rest_of_the_pack(pack, lengths, channels, heads, dtype, causal):
    def run(tensors, lengths):
        output = packed_attention(
            *tensors, pack(lengths).params(), causal=causal, softmax_scale=channels**-0.5
        )
        return output, torch.autograd.grad(output.float().square().sum(), tensors)

    torch.manual_seed(0)
    shape = (sum(lengths), heads, channels)
    inputs = [torch.randn(shape, dtype=dtype, device='cuda', requires_grad=True) for _ in range(3)]
    output, grads = run(inputs, lengths)
    for start, length in pack(lengths).spans:
        rows = slice(start, start + length)
        alone, alone_grads = run(
            [x.detach()[rows].clone().requires_grad_() for x in inputs], [length]
        )
        assert torch.equal(output[rows], alone)
        for grad, alone_grad in zip(grads, alone_grads):
            assert torch.equal(grad[rows], alone_grad)


def test_without_a_pack_it_is_upstream_bit_for_bit(single_rank):
    layer = attention(channels=(None, None))
    stock = UpstreamAttention(
        config(), layer_number=2, attn_mask_type=AttnMaskType.causal, attention_type='self'
    )
    torch.manual_seed(0)
    inputs = [torch.randn(5, 2, HEADS, 8, device='cuda') for _ in range(3)]
    assert torch.equal(layer(*inputs, None), stock(*inputs, None))


def test_value_channels_of_their_own_without_a_pack(single_rank):
    layer = attention(channels=(6, 3))
    torch.manual_seed(0)
    query, key, value = (x.unsqueeze(1) for x in qkv(5, (6, 3), dtype=torch.float32))
    scores = torch.einsum('sbnd,tbnd->bnst', query, key) / 6**0.5
    scores = scores.masked_fill(torch.ones(5, 5, device='cuda').triu(1).bool(), -10000.0)
    expected = torch.einsum('bnst,tbnd->sbnd', scores.softmax(-1), value).flatten(2)
    torch.testing.assert_close(layer(query, key, value, None), expected)


@pytest.mark.parametrize('lengths', [[0], [0, 0, 0]])
def test_a_pack_of_padding_alone_has_zero_gradients(pack, lengths):
    inputs = qkv(4)
    offset = torch.ones(HEADS, dtype=torch.float64, device='cuda', requires_grad=True)
    params = pack(lengths, tail=4).params()
    output = packed_attention(
        *inputs, params, causal=True, softmax_scale=1.0, softmax_offset=offset
    )
    assert output.shape == (4, HEADS * 8) and not output.any()
    output.sum().backward()
    assert all(x.grad is not None and not x.grad.any() for x in (*inputs, offset))


def test_cross_attention_takes_lengths_of_their_own():
    torch.manual_seed(0)
    query, _, _ = qkv(6)
    _, key, value = qkv(7)
    params = PackedSeqParams(
        qkv_format='thd',
        cu_seqlens_q=torch.tensor([0, 2, 3, 5], device='cuda'),
        cu_seqlens_kv=torch.tensor([0, 4, 4, 7], device='cuda'),
    )
    output = packed_attention(query, key, value, params, causal=False, softmax_scale=0.5)
    output = output.unflatten(1, (HEADS, 8))
    for q_rows, kv_rows in [((0, 2), (0, 4)), ((3, 5), (4, 7))]:
        scores = 0.5 * torch.einsum('snd,tnd->nst', query[slice(*q_rows)], key[slice(*kv_rows)])
        expected = torch.einsum('nst,tnd->snd', scores.softmax(-1), value[slice(*kv_rows)])
        torch.testing.assert_close(output[slice(*q_rows)], expected)
    assert not output[2].any() and not output[5].any()  # no keys at all; beyond the last offset


def test_dropout_drops_weights_and_scales_the_rest(single_rank, pack):
    torch.manual_seed(0)
    params = pack([8, 8]).params()
    # Value channel j of token j is 1: the output is the matrix of attention weights.
    query, key = torch.randn(2, 16, HEADS, 8, device='cuda')
    value = torch.eye(8, device='cuda').repeat(2, 1).unsqueeze(1).expand(-1, HEADS, -1)
    layer = attention(attention_dropout=0.5)
    dropped = layer(query, key, value, None, packed_seq_params=params)
    kept = layer.eval()(query, key, value, None, packed_seq_params=params)
    survivors = dropped != 0
    weights = kept != 0
    assert 0.3 < survivors.sum() / weights.sum() < 0.7
    torch.testing.assert_close(dropped[survivors], 2 * kept[survivors])


@pytest.mark.parametrize('sequence_parallel', [False, True])
def test_dropout_draws_from_the_generator_that_upstream_draws_from(
    single_rank, pack, sequence_parallel
):
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    layer = attention(attention_dropout=0.5)
    layer.config.sequence_parallel = sequence_parallel
    inputs = qkv(8, dtype=torch.float32)
    params = pack([8]).params()

    def states():
        tracker = {
            name: state.clone() for name, state in get_cuda_rng_tracker().get_states().items()
        }
        return torch.cuda.get_rng_state().clone(), tracker['model-parallel-rng']

    default, tracker = states()
    layer(*inputs, None, packed_seq_params=params)
    new_default, new_tracker = states()
    assert torch.equal(default, new_default) is (not sequence_parallel)
    assert torch.equal(tracker, new_tracker) is sequence_parallel


def test_no_tensor_is_larger_than_the_pack_or_one_sequence(pack):
    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            for x in result if isinstance(result, (tuple, list)) else [result]:
                if isinstance(x, torch.Tensor):
                    self.numel = max(self.numel, x.numel())
            return result

    inputs = qkv(1024)
    with Largest() as largest:
        output = packed_attention(
            *inputs,
            pack([64] * 16).params(),
            causal=True,
            softmax_scale=1.0,
            window_size=(16, 0),
            softmax_offset=torch.zeros(HEADS, dtype=torch.float64, device='cuda'),
        )
        output.sum().backward()
    assert largest.numel <= 1024 * HEADS * 8  # a mask of the whole pack has 1024 * 1024


def test_empty_sequences_cost_nothing(pack, monkeypatch):
    """Packs of a fixed number of sequences repeat their last offset, often dozens of times."""
    from megatron.core.transformer import sequence_attention as module

    calls = []
    sdpa = module.scaled_dot_product_attention
    monkeypatch.setattr(
        module,
        'scaled_dot_product_attention',
        lambda *args, **kwargs: calls.append(1) or sdpa(*args, **kwargs),
    )
    packed = pack([3, 0, 4] + [0] * 40, tail=2)
    packed_attention(*qkv(packed.tokens), packed.params(), causal=True, softmax_scale=1.0)
    assert len(calls) == 2


def test_one_copy_to_the_host(pack, monkeypatch):
    copies = []
    monkeypatch.setattr(
        torch.Tensor, 'tolist', lambda self, f=torch.Tensor.tolist: copies.append(1) or f(self)
    )
    for name in ('item', '__int__', '__bool__', '__index__'):
        monkeypatch.setattr(torch.Tensor, name, lambda self: pytest.fail('reads a tensor'))
    packed = pack([3, 0, 4], [1, 0, 0], tail=2)
    packed_attention(*qkv(packed.tokens), packed.params(), causal=True, softmax_scale=1.0)
    assert len(copies) == 1


OFFSETS = torch.tensor([0, 3, 7], dtype=torch.int32)


@pytest.mark.parametrize(
    'fields, message',
    [
        ({'qkv_format': 'sbhd'}, "qkv_format is 'sbhd'"),
        ({'local_cp_size': 2}, 'local_cp_size asks for a context parallel size of 2'),
        ({'cu_seqlens_q': None}, 'cu_seqlens_q is None'),
        ({'cu_seqlens_kv': None}, 'cu_seqlens_kv is None'),
        ({'cu_seqlens_q_padded': OFFSETS}, 'cu_seqlens_kv_padded is None'),
        ({'cu_seqlens_kv_padded': OFFSETS}, 'cu_seqlens_q_padded is None'),
        ({'cu_seqlens_q': OFFSETS.float()}, 'cu_seqlens_q is a torch.float32 tensor'),
        ({'cu_seqlens_q': OFFSETS.unsqueeze(0)}, r'cu_seqlens_q is a .* of shape \[1, 3\]'),
        ({'cu_seqlens_q': OFFSETS[:0]}, r'cu_seqlens_q is a .* of shape \[0\]'),
        ({'cu_seqlens_kv': OFFSETS[:2]}, 'cu_seqlens_kv has 2 offsets, expected 3'),
        ({'cu_seqlens_q': OFFSETS + 1}, 'cu_seqlens_q starts at 1'),
        ({'cu_seqlens_kv': OFFSETS.new_tensor([0, 5, 3])}, 'cu_seqlens_kv falls from 5 to 3'),
        ({'cu_seqlens_q': OFFSETS * 2}, 'cu_seqlens_q ends at 14, expected at most 9'),
        ({'cu_seqlens_kv': OFFSETS.new_tensor([0, 2, 7])}, 'sequence 0 a length of 2, expected 3'),
        (
            {
                'cu_seqlens_q_padded': OFFSETS.new_tensor([0, 2, 7]),
                'cu_seqlens_kv_padded': OFFSETS.new_tensor([0, 3, 7]),
            },
            'cu_seqlens_q gives sequence 0 a length of 3, but cu_seqlens_q_padded has room for 2',
        ),
    ],
)
def test_invalid_packs_name_the_field(fields, message):
    params = PackedSeqParams(qkv_format='thd', cu_seqlens_q=OFFSETS, cu_seqlens_kv=OFFSETS)
    params = dataclasses.replace(params, **fields)
    with pytest.raises(ValueError, match=message):
        packed_attention(*qkv(9), params, causal=True, softmax_scale=1.0)


@pytest.mark.parametrize(
    'fields, arguments, message',
    [
        ({}, {'attention_bias': torch.zeros(1)}, 'attention_bias'),
        (
            {},
            {'attn_mask_type': AttnMaskType.arbitrary},
            'attn_mask_type is AttnMaskType.arbitrary',
        ),
        ({'window_size': (-1, 0)}, {}, r'window_size is \(-1, 0\)'),
    ],
)
def test_what_a_pack_cannot_have(single_rank, pack, fields, arguments, message):
    with pytest.raises(ValueError, match=message):
        attention(**fields)(
            *qkv(3, dtype=torch.float32), None, packed_seq_params=pack([3]).params(), **arguments
        )
