"""Attention split over context parallel ranks, against the stock attention of the whole sequence."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.context_parallel_attention import context_parallel_attention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.unit_tests import forked_ranks

RANKS = Path(__file__).with_name("context_parallel_ranks.py")
# Chunks of the sequence that each rank holds.
ZIGZAG = {2: [(0, 3), (1, 2)], 4: [(0, 7), (1, 6), (2, 5), (3, 4)]}
HEADS, TOKENS, BATCH = 4, 24, 2
CAUSAL = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)


def documents(*ends):
    """Mask of --reset-attention-mask for documents that end at `ends`, one list per sample."""
    number = torch.stack(
        [torch.bucketize(torch.arange(TOKENS), torch.tensor(e), right=True) for e in ends]
    )
    return CAUSAL | (number.unsqueeze(1) != number.unsqueeze(2)).unsqueeze(1)


def padded(*lengths):
    """Mask of the keys beyond each sample's length."""
    return (torch.arange(TOKENS) >= torch.tensor(lengths).view(-1, 1, 1, 1)).expand(
        -1, 1, TOKENS, -1
    )


def case(
    mask=AttnMaskType.causal,
    channels=(8, 8),
    attention_mask=None,
    dropout=0.0,
    seeds=(1,),
    cp_comm_type=None,
    **config,
):
    generator = torch.Generator().manual_seed(len(str(config)) + sum(channels))

    def randn(*shape):
        return torch.randn(BATCH, TOKENS, *shape, generator=generator, dtype=torch.float64)

    groups = config.get("num_query_groups", HEADS)
    batch = {
        "query": randn(HEADS, channels[0]),
        "key": randn(groups, channels[0]),
        "value": randn(groups, channels[1]),
        "weight": randn(HEADS * channels[1]),
    }
    if attention_mask is not None:
        batch["attention_mask"] = attention_mask.contiguous()
    if dropout:
        # Value channel j of token j is 1: the output is the matrix of attention weights.
        eye = torch.eye(TOKENS, dtype=torch.float64).unsqueeze(1)
        batch["value"] = eye.expand(BATCH, -1, groups, -1).contiguous()
    return {
        "batch": batch,
        "config": {
            "num_layers": 1,
            "hidden_size": 32,
            "num_attention_heads": HEADS,
            "attention_dropout": dropout,
            "params_dtype": torch.float64,
            **config,
        },
        "layer": {
            "layer_number": 2,
            "attn_mask_type": mask,
            "attention_type": "self",
            "cp_comm_type": cp_comm_type,
            "k_channels": channels[0],
            "v_channels": channels[1],
        },
        "parameters": {
            "softmax_offset": torch.randn(HEADS, generator=generator, dtype=torch.float64)
        },
        "seeds": seeds,
    }


CASES = {
    "causal": case(),
    "grouped queries": case(num_query_groups=2, cp_comm_type="p2p"),
    "narrow values": case(channels=(8, 3), num_query_groups=1),
    "wide values": case(channels=(6, 8), cp_comm_type="a2a"),
    "whole sequence": case(AttnMaskType.no_mask),
    "layer scaling": case(apply_query_key_layer_scaling=True, attention_softmax_in_fp32=True),
    "mask of documents": case(attention_mask=documents([5, 6, 20], [13])),
    "mask of documents for all": case(attention_mask=documents([5, 6, 20])),
    "mask of padding": case(AttnMaskType.padding, attention_mask=padded(3, 24)),
    "window": case(window_size=(3, 0)),
    "window of one": case(window_size=(0, 0)),
    "window over chunks": case(window_size=(9, 4), softmax_type="learnable"),
    "off by one": case(softmax_type="off-by-one"),
    "offset": case(softmax_type="learnable", num_query_groups=2),
    "offset, whole sequence": case(AttnMaskType.no_mask, softmax_type="learnable"),
    "offset, mask of documents": case(
        softmax_type="learnable", attention_mask=documents([5, 6, 20], [13])
    ),
}
DROPOUT = case(channels=(8, TOKENS), dropout=0.5, seeds=(1, 1, 2), kv_channels=8)
TOKEN_IDS = torch.arange(1, BATCH * TOKENS + 1).view(BATCH, TOKENS)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What every rank made of every case, by context parallel size."""
    folder = tmp_path_factory.mktemp("context_parallel")
    cases = {**CASES, "dropout": DROPOUT, "roll": {"batch": {"tokens": TOKEN_IDS}}}
    torch.save(cases, folder / "cases.pt")
    forked_ranks.launch(RANKS, folder)
    return {
        size: [torch.load(folder / f"{size}.{rank}.pt") for rank in range(size)] for size in ZIGZAG
    }


def local(tensor, size, rank, dim=0):
    """Rank's two chunks of a whole sequence along `dim`."""
    chunks = tensor.chunk(2 * size, dim)
    return torch.cat([chunks[i] for i in ZIGZAG[size][rank]], dim)


def stock(case):
    """Output and gradients of the stock attention, [s, b, ...], for the whole sequence on one rank."""
    layer = DotProductAttention(TransformerConfig(**case["config"]), **case["layer"])
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.copy_(case["parameters"][name])
    batch = case["batch"]
    inputs = [batch[name].transpose(0, 1).contiguous() for name in ("query", "key", "value")]
    for x in inputs:
        x.requires_grad_()
    output = layer.eval()(*inputs, batch.get("attention_mask"))
    total = (output * batch["weight"].transpose(0, 1)).sum()
    return output.detach(), torch.autograd.grad(total, inputs + list(layer.parameters()))


@pytest.mark.parametrize("size", ZIGZAG)
@pytest.mark.parametrize("name", CASES)
def test_ranks_hold_their_chunks_of_the_stock_result(single_rank, results, name, size):
    output, grads = stock(CASES[name])
    offsets = []
    for rank, found in enumerate(result[name] for result in results[size]):
        # Not bit for bit: the sums run over other chunks, in another order. In float64 that leaves 1e-12.
        torch.testing.assert_close(
            found["outputs"][0], local(output, size, rank), rtol=1e-12, atol=1e-12
        )
        for grad, expected in zip(found["grads"][0][:3], grads):
            torch.testing.assert_close(grad, local(expected, size, rank), rtol=1e-11, atol=1e-11)
        offsets.append(found["grads"][0][3:])
    # A parameter's gradients are added up over the ranks, by data parallelism.
    for expected, *parts in zip(grads[3:], *offsets):
        torch.testing.assert_close(sum(parts), expected, rtol=1e-11, atol=1e-11)


def test_tolerances_tell_one_hidden_key(single_rank):
    """The least that a wrong mask can change is far above what the comparison lets pass."""
    mask = CAUSAL.clone()
    mask[-1, 3] = True
    output, _ = stock(CASES["causal"])
    other, _ = stock(case(attention_mask=mask.view(1, 1, TOKENS, TOKENS)))
    assert torch.equal(other[:-1], output[:-1])
    assert (other[-1] - output[-1]).abs().max() > 1e-3


@pytest.mark.parametrize("size", ZIGZAG)
def test_dropout_is_drawn_from_the_tracker(single_rank, results, size):
    weights, _ = stock(DROPOUT)
    for rank, result in enumerate(results[size]):
        found = result["dropout"]
        first, again, other = found["outputs"]
        assert torch.equal(first, again) and not torch.equal(first, other)
        assert all(map(torch.equal, found["grads"][0], found["grads"][1]))
        assert found["generators_moved"] == [[False, True]] * 3  # torch's own, the tracker's
        kept = first != 0
        expected = local(weights, size, rank)
        torch.testing.assert_close(first[kept], 2 * expected[kept], rtol=1e-12, atol=1e-12)
        assert 0.4 < kept.sum() / (expected != 0).sum() < 0.6


@pytest.mark.parametrize("size", ZIGZAG)
def test_labels_of_multi_token_prediction_roll_over_the_ranks(results, size):
    expected = TOKEN_IDS.roll(-1, 1)
    expected[:, -1] = 0
    found = [result["roll"] for result in results[size]]
    for rank, rolled in enumerate(found):
        assert torch.equal(rolled["outputs"][0], local(expected, size, rank, dim=1))
    assert sum(rolled["total"][0] for rolled in found) == expected.sum()


GROUP = SimpleNamespace(size=lambda: 2, rank=lambda: 0)


@pytest.mark.parametrize(
    "tokens, kv_tokens, mask, message",
    [
        (3, 3, None, "query has 3 tokens and key 3, expected one even number"),
        (4, 8, None, "query has 4 tokens and key 8, expected one even number"),
        (4, 4, (1, 1, 8, 8), r"attention_mask has shape \[1, 1, 8, 8\], expected .* 4, 8\]"),
    ],
)
def test_what_is_not_a_split_sequence(tokens, kv_tokens, mask, message):
    query, key = torch.zeros(tokens, 1, 1, 2), torch.zeros(kv_tokens, 1, 1, 2)
    mask = None if mask is None else torch.zeros(mask, dtype=torch.bool)
    with pytest.raises(ValueError, match=message):
        context_parallel_attention(
            query, key, key, GROUP, causal=True, softmax_scale=1.0, attention_mask=mask
        )


@pytest.mark.parametrize(
    "fields, arguments, message",
    [
        ({}, {"attention_bias": torch.zeros(1)}, "expected None with context parallelism"),
        ({"window_size": (-1, 0)}, {}, r"window_size is \(-1, 0\)"),
        ({}, {"packed": True}, "context_parallel_size is 2, expected 1 with packed sequences"),
    ],
)
def test_what_the_layer_refuses(single_rank, pack, fields, arguments, message):
    config = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=1, context_parallel_size=2, **fields
    )
    groups = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp"])
    groups.cp = GROUP
    layer = DotProductAttention(config, 1, AttnMaskType.causal, "self", pg_collection=groups)
    assert layer.cp_group is GROUP
    if "packed" in arguments:
        arguments = {"packed_seq_params": pack([4]).params()}
    query = torch.zeros(4, 1, 1, 8)
    with pytest.raises(ValueError, match=message):
        layer(query, query, query, None, **arguments)
