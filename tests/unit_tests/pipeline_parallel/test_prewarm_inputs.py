"""Synthetic inputs: what each kind of chunk takes, and real chunks that take it."""

import itertools
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel.prewarm_inputs import (
    Microbatch,
    Packing,
    _offsets,
    chunk_inputs,
    generator_of,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.models.gpt import GPTModelBuilder, GPTModelConfig

LENGTH, HIDDEN, VOCABULARY = 16, 8, 50


class Chunk(torch.nn.Module):
    """What the inputs depend on: where the chunk lies, and which arguments its forward has."""

    def __init__(self, first=False, last=False, prediction=False):
        super().__init__()
        self.pre_process, self.post_process, self.mtp_process = first, last, prediction
        self.vocab_size = VOCABULARY

    def forward(
        self,
        input_ids,
        position_ids,
        attention_mask,
        labels=None,
        loss_mask=None,
        packed_seq_params=None,
    ):
        raise NotImplementedError


def config(**fields):
    return SimpleNamespace(
        **{
            "context_parallel_size": 1,
            "tensor_model_parallel_size": 1,
            "sequence_parallel": False,
            "hidden_size": HIDDEN,
            "pipeline_dtype": torch.bfloat16,
            "params_dtype": torch.bfloat16,
            **fields,
        }
    )


def inputs_of(chunk, fields=None, seed=1, **microbatch):
    microbatch = Microbatch(**{"seq_length": LENGTH, "micro_batch_size": 2, **microbatch})
    return chunk_inputs(
        chunk, config(**fields or {}), microbatch, torch.Generator().manual_seed(seed)
    )


TOKENS, TARGETS = {"input_ids", "position_ids"}, {"labels", "loss_mask"}
CHUNKS = {
    "first": (Chunk(first=True), TOKENS),
    "middle": (Chunk(), set()),
    "last": (Chunk(last=True), TARGETS),
    "single": (Chunk(first=True, last=True), TOKENS | TARGETS),
    "prediction, last": (Chunk(last=True, prediction=True), TOKENS | TARGETS),
    "prediction, not last": (Chunk(prediction=True), TOKENS),
}


@pytest.mark.parametrize("name", CHUNKS)
def test_what_each_chunk_takes(name):
    chunk, given = CHUNKS[name]
    states, inputs = inputs_of(chunk)
    assert {key for key, value in inputs.items() if value is not None} == given
    assert inputs.keys() == TOKENS | TARGETS | {"attention_mask"}  # None stands for the others
    assert (states is None) == chunk.pre_process


@pytest.mark.parametrize(
    "parallel, tokens, rows",
    [
        ({}, 16, 16),
        ({"context_parallel_size": 4}, 4, 4),
        ({"tensor_model_parallel_size": 2}, 16, 16),
        ({"tensor_model_parallel_size": 2, "sequence_parallel": True}, 16, 8),
        (
            {
                "tensor_model_parallel_size": 2,
                "sequence_parallel": True,
                "context_parallel_size": 2,
            },
            8,
            4,
        ),
    ],
)
@pytest.mark.parametrize("samples", [1, 3])
def test_shapes_and_dtypes(parallel, tokens, rows, samples):
    """Tensor-parallel ranks hold all tokens; with sequence parallelism each a part of the states."""
    chunk = Chunk(last=True, prediction=True)
    states, inputs = inputs_of(chunk, parallel, micro_batch_size=samples, attention_mask=True)
    described = {name: (tuple(value.shape), value.dtype) for name, value in inputs.items()}
    assert described == {
        "input_ids": ((samples, tokens), torch.int64),
        "position_ids": ((samples, tokens), torch.int64),
        "labels": ((samples, tokens), torch.int64),
        "loss_mask": ((samples, tokens), torch.float32),
        "attention_mask": ((samples, 1, tokens, 16), torch.bool),
    }
    assert states.shape == (rows, samples, HIDDEN) and states.dtype == torch.bfloat16
    assert states.requires_grad and states.is_leaf


@pytest.mark.parametrize(
    "dtypes, expected",
    [
        ({"pipeline_dtype": torch.float32}, torch.float32),  # fp32_residual_connection
        ({"pipeline_dtype": None, "params_dtype": torch.float16}, torch.float16),
    ],
)
def test_states_come_as_the_pipeline_sends_them(dtypes, expected):
    states, _ = inputs_of(Chunk(), dtypes)
    assert states.dtype == expected


@pytest.mark.parametrize(
    "name, fields, rows",
    [
        ("last", {"mtp_standalone": True, "mtp_num_layers": 2}, 48),
        ("last", {"mtp_standalone": False, "mtp_num_layers": 2}, 16),
        ("prediction, last", {"mtp_standalone": True, "mtp_num_layers": 2}, 16),
        ("prediction, not last", {"mtp_standalone": True, "mtp_num_layers": 2}, 16),
        ("middle", {"mtp_standalone": True, "mtp_num_layers": 2}, 16),
        ("last", {"mtp_standalone": True, "mtp_num_layers": 1, "context_parallel_size": 2}, 16),
    ],
)
def test_what_follows_prediction_layers_of_their_own_stage_gets_their_outputs_too(
    name, fields, rows
):
    states, _ = inputs_of(CHUNKS[name][0], fields)
    assert states.shape == (rows, 2, HIDDEN)


@pytest.mark.parametrize("name", CHUNKS)
@pytest.mark.parametrize("asked", [True, False])
def test_masks_come_where_data_does(name, asked):
    _, inputs = inputs_of(CHUNKS[name][0], attention_mask=asked)
    mask = inputs["attention_mask"]
    if not asked or name == "middle":
        assert mask is None
        return
    later = torch.arange(LENGTH) > torch.arange(LENGTH).unsqueeze(1)
    assert torch.equal(mask, later.expand(2, 1, -1, -1))


def test_values_are_such_as_text_would_give():
    """Equal tokens, or equal states, would all go to the same experts."""
    states, inputs = inputs_of(Chunk(last=True, prediction=True), seq_length=512)
    for name in ("input_ids", "labels"):
        assert 0 <= inputs[name].min() and inputs[name].max() < VOCABULARY
        assert inputs[name].unique().numel() == VOCABULARY
    assert not torch.equal(inputs["input_ids"], inputs["labels"])
    assert inputs["position_ids"].tolist() == [list(range(512))] * 2
    assert (inputs["loss_mask"] == 1).all()
    assert 0.9 < states.float().std() < 1.1
    assert states.view(-1, HIDDEN).unique(dim=0).shape[0] == 1024


def test_arguments_that_the_forward_lacks_are_left_out():
    class Older(Chunk):
        def forward(self, input_ids, position_ids, attention_mask, labels=None):
            raise NotImplementedError

    _, inputs = inputs_of(Older(first=True, last=True), packing=Packing())
    assert inputs.keys() == {"input_ids", "position_ids", "attention_mask", "labels"}


@pytest.mark.parametrize(
    "packing, offsets",
    [
        (Packing(), [0, 4, 10, 18, 32]),  # sequences of unequal length
        (Packing(entries=2), [0, 32]),
        (Packing(entries=4), [0, 6, 16, 32]),
        (Packing(entries=20), [*range(0, 33, 2), 32, 32, 32]),
    ],
)
def test_packs(packing, offsets):
    """The microbatch's two samples lie end to end."""
    states, inputs = inputs_of(Chunk(last=True), packing=packing, attention_mask=True)
    params = inputs["packed_seq_params"]
    assert isinstance(params, PackedSeqParams) and params.qkv_format == "thd"
    assert params.cu_seqlens_q.dtype == torch.int32
    assert params.cu_seqlens_q.tolist() == offsets
    longest = max(end - start for start, end in itertools.pairwise(offsets))
    assert (type(params.max_seqlen_q), params.max_seqlen_q) == (int, longest)
    assert (type(params.max_seqlen_kv), params.max_seqlen_kv) == (int, longest)
    assert inputs["labels"].shape == (1, 32) and states.shape == (32, 1, HIDDEN)
    assert inputs["attention_mask"] is None


@pytest.mark.parametrize("padded", [True, False])
def test_offsets_alias_as_those_of_self_attention_do(padded):
    _, inputs = inputs_of(Chunk(), packing=Packing(padded=padded))
    params = inputs["packed_seq_params"]
    assert params.cu_seqlens_q is params.cu_seqlens_kv
    assert params.cu_seqlens_q_padded is params.cu_seqlens_kv_padded
    if padded:
        assert params.cu_seqlens_q_padded is not params.cu_seqlens_q
        assert torch.equal(params.cu_seqlens_q_padded, params.cu_seqlens_q)
    else:
        assert params.cu_seqlens_q_padded is None


@pytest.mark.parametrize("tokens, part", [(48, 4), (42, 1)])
def test_sequences_split_evenly_over_context_parallel_ranks(tokens, part):
    """Each rank takes two equal parts of every sequence, if the pack has room for that at all."""
    _, inputs = inputs_of(
        Chunk(), {"context_parallel_size": 2}, packing=Packing(), seq_length=tokens // 2
    )
    offsets = inputs["packed_seq_params"].cu_seqlens_q
    assert (offsets % part == 0).all() and offsets[-1] == tokens


@given(st.integers(1, 64), st.integers(2, 40), st.sampled_from([1, 2, 4, 16]))
def test_offsets(parts, entries, part):
    offsets = _offsets(parts * part, entries, part)
    lengths = [end - start for start, end in itertools.pairwise(offsets)]
    assert (len(offsets), offsets[0], offsets[-1]) == (entries, 0, parts * part)
    assert all(length >= 0 and length % part == 0 for length in lengths)
    used = lengths[: min(parts, entries - 1)]
    assert used == sorted(used) and used[0] > 0 and not any(lengths[len(used) :])


@given(st.integers(2, 20))
def test_sequences_differ_in_length_where_there_is_room(sequences):
    lengths = np.diff(_offsets(200, sequences + 1, 1))
    assert lengths[0] < lengths[-1]


def groups(pp=0, dp_cp=0, tp=0):
    return SimpleNamespace(
        **{
            name: SimpleNamespace(rank=lambda rank=rank: rank)
            for name, rank in {"pp": pp, "dp_cp": dp_cp, "tp": tp}.items()
        }
    )


RANKS = st.tuples(*[st.integers(0, 5000)] * 4)  # pp, dp_cp, tp, chunk


@given(RANKS, RANKS, st.booleans())
def test_seeds_differ_where_inputs_do(one, other, sequence_parallel):
    seeds = [
        generator_of(groups(*ranks[:3]), ranks[3], sequence_parallel).initial_seed()
        for ranks in (one, other)
    ]
    equal = one[:2] + one[3:] == other[:2] + other[3:]
    if sequence_parallel:
        equal = one == other
    assert (seeds[0] == seeds[1]) == equal


def test_seeds_of_a_whole_run_differ():
    ranks = list(itertools.product(range(4), range(300), range(2), range(3)))
    seeds = {
        generator_of(groups(pp, dp_cp, tp), chunk, True).initial_seed()
        for pp, dp_cp, tp, chunk in ranks
    }
    assert len(seeds) == len(ranks)


@pytest.mark.parametrize("changed", ["pp", "dp_cp", "tp", "chunk"])
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_inputs_are_equal_on_ranks_of_one_tensor_alone(changed, sequence_parallel):
    def drawn(chunk=0, **ranks):
        generator = generator_of(groups(**ranks), chunk, sequence_parallel)
        microbatch = Microbatch(LENGTH, 2)
        states, inputs = chunk_inputs(Chunk(last=True), config(), microbatch, generator)
        return states, inputs["labels"]

    equal = [torch.equal(*pair) for pair in zip(drawn(), drawn(**{changed: 1}))]
    assert equal == [changed == "tp" and not sequence_parallel] * 2
    assert all(map(torch.equal, drawn(), drawn()))


def test_no_other_generator_is_drawn_from():
    states = (random.getstate(), torch.get_rng_state(), np.random.get_state()[1].tolist())
    generator = generator_of(groups(), 0, True)
    chunk_inputs(
        Chunk(last=True, prediction=True), config(), Microbatch(LENGTH, 2, Packing()), generator
    )
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])
    assert np.random.get_state()[1].tolist() == states[2]


def build(first, last, layers=2, **fields):
    """A GPT chunk without Transformer Engine."""
    transformer = TransformerConfig(
        num_layers=layers,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        use_cpu_initialization=True,
        transformer_impl="local",
        normalization="RMSNorm",
        add_bias_linear=False,
        pipeline_dtype=torch.float32,
        **fields,
    )
    model_config = GPTModelConfig(
        transformer=transformer,
        vocab_size=VOCABULARY,
        seq_length=64,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    groups = ProcessGroupCollection.use_mpu_process_groups()
    return GPTModelBuilder(model_config).build_model(groups, pre_process=first, post_process=last)


SCHEDULED = {
    "sequence_packing_scheduler": "fifo",
    "max_seqlen_per_dp_cp_rank": 32,
    "thd_max_packed_sequences": 4,
}


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize(
    "microbatch, fields",
    [
        (Microbatch(LENGTH, 2), {}),
        (Microbatch(LENGTH, 2, attention_mask=True), {}),
        (Microbatch(LENGTH, 2, Packing(padded=True)), {}),
        (Microbatch(32, 1, Packing(5, padded=True)), SCHEDULED),
    ],
)
def test_real_chunks_take_them(single_rank, first, last, microbatch, fields):
    chunk = build(first, last, **fields)
    generator = torch.Generator().manual_seed(1)
    states, inputs = chunk_inputs(chunk, chunk.config, microbatch, generator)
    chunk.set_input_tensor([states])
    output = chunk(**inputs)
    rows = (1, 32) if microbatch.packing else (2, 16)
    assert output.shape == (rows if last else (*rows[::-1], HIDDEN))
    output.sum().backward()
    assert all(parameter.grad is not None for parameter in chunk.parameters())
    if not first:
        assert states.grad.shape == states.shape and states.grad.any()


@pytest.mark.parametrize("graphs", ["none", "local", "transformer_engine"])
def test_a_scheduler_packs_into_offsets_of_fixed_capacity(single_rank, graphs):
    """They alias as in training, though a graph is captured with four tensors."""
    chunk = build(True, True, **SCHEDULED)
    chunk.config.cuda_graph_impl = graphs
    microbatch = Microbatch(32, 1, Packing(5, padded=True))
    _, inputs = chunk_inputs(chunk, chunk.config, microbatch, torch.Generator())
    params = inputs["packed_seq_params"]
    assert params.cu_seqlens_q.tolist() == [0, 4, 10, 18, 32]
    assert torch.equal(params.cu_seqlens_q_padded, params.cu_seqlens_q)
    assert params.cu_seqlens_q is params.cu_seqlens_kv
    assert params.cu_seqlens_q_padded is params.cu_seqlens_kv_padded
    assert params.cu_seqlens_q_padded is not params.cu_seqlens_q
    assert (type(params.max_seqlen_q), params.max_seqlen_q) == (int, 14)


def test_a_scheduler_packs_for_a_chunk_without_layers(single_rank):
    """A stage that holds the embedding or the loss alone."""
    microbatch = Microbatch(32, 1, Packing(5, padded=True))
    _, inputs = chunk_inputs(Chunk(last=True), config(**SCHEDULED), microbatch, torch.Generator())
    assert inputs["packed_seq_params"].cu_seqlens_q.tolist() == [0, 4, 10, 18, 32]
