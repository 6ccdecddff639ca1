"""Static inputs of a transformer layer: as stock's, packed, and for a pipeline prewarm."""

from types import SimpleNamespace

import pytest
import torch

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import transformer_layer
from megatron.core.transformer.enums import AttnMaskType, CudaGraphModule
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig

HIDDEN = 16
IMPLEMENTATIONS = ["none", "local", "transformer_engine"]
PACKED = dict(sequence_packing_scheduler="fifo", max_seqlen_per_dp_cp_rank=24)
PARALLEL = dict(tensor_model_parallel_size=2, sequence_parallel=True, context_parallel_size=3)
OFFSETS = ["cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"]


def config_of(**fields) -> TransformerConfig:
    size = dict(num_layers=1, hidden_size=HIDDEN, num_attention_heads=2)
    settings = dict(attention_dropout=0.0, hidden_dropout=0.0, use_cpu_initialization=True)
    return TransformerConfig(**{**size, **settings, **fields})


def build(config) -> transformer_layer.TransformerLayer:
    torch.manual_seed(0)
    return build_module(get_gpt_layer_local_spec(), config=config).cuda()


@pytest.fixture(scope="module")
def real_layer(single_rank):
    return build(config_of())


@pytest.fixture
def layer_with(real_layer, monkeypatch):
    """The layer with another config: graph implementations cannot be built without a GPU."""

    def with_config(**fields):
        implementation = fields.pop("cuda_graph_impl", "none")
        config = config_of(**fields)
        config.cuda_graph_impl = implementation
        monkeypatch.setattr(real_layer, "config", config)
        return real_layer

    return with_config


def stand_in(**fields) -> SimpleNamespace:
    """A layer with nothing but what get_layer_static_inputs may ask for."""
    config = dict(
        bf16=True,
        fp16=False,
        hidden_size=HIDDEN,
        context_parallel_size=1,
        tensor_model_parallel_size=1,
        sequence_parallel=False,
        cuda_graph_impl="none",
        cuda_graph_modules=[],
    )
    return SimpleNamespace(
        config=SimpleNamespace(**{**config, **fields}),
        self_attention=SimpleNamespace(attn_mask_type=AttnMaskType.causal),
        is_moe_layer=False,
    )


inputs_of = transformer_layer.TransformerLayer.get_layer_static_inputs
stocks_inputs_of = transformer_layer.upstream.TransformerLayer.get_layer_static_inputs


@pytest.mark.parametrize("parallel", [{}, PARALLEL, dict(tensor_model_parallel_size=2)])
@pytest.mark.parametrize("modules", [[], ["attn"], ["mlp"], ["attn", "mlp"]])
@pytest.mark.parametrize("cuda_graph_impl", IMPLEMENTATIONS)
def test_without_packing_a_capture_gets_what_stock_gives(
    layer_with, cuda_graph_impl, modules, parallel
):
    layer = layer_with(
        bf16=True, cuda_graph_impl=cuda_graph_impl, cuda_graph_modules=modules, **parallel
    )
    ours, stocks = layer.get_layer_static_inputs(12, 2), stocks_inputs_of(layer, 12, 2)
    assert list(ours) == list(stocks)
    assert ("attention_mask" in ours) == (modules != ["mlp"])
    for name in stocks:
        assert torch.equal(ours[name], stocks[name])
        for trait in ("shape", "dtype", "device", "requires_grad", "layout"):
            assert getattr(ours[name], trait) == getattr(stocks[name], trait), (name, trait)
        assert ours[name].stride() == stocks[name].stride()


def test_a_layer_without_attention_takes_no_mask(single_rank):
    layer = build(config_of(bf16=True))
    layer.self_attention = IdentityOp()
    layer.config.create_attention_mask_in_dataloader = True
    for prewarm in (False, True):
        inputs = layer.get_layer_static_inputs(12, 2, for_pipeline_prewarm=prewarm)
        assert list(inputs) == ["hidden_states"]
    assert list(stocks_inputs_of(layer, 12, 2)) == ["hidden_states"]


@pytest.mark.parametrize("cuda_graph_impl", IMPLEMENTATIONS)
def test_a_prewarm_gets_a_mask_only_if_the_data_loader_makes_one(layer_with, cuda_graph_impl):
    layer = layer_with(bf16=True, cuda_graph_impl=cuda_graph_impl)
    capture = layer.get_layer_static_inputs(12, 2)
    prewarm = layer.get_layer_static_inputs(12, 2, for_pipeline_prewarm=True)
    assert list(prewarm) == ["hidden_states"]
    assert torch.equal(prewarm["hidden_states"], capture["hidden_states"])
    layer.config.create_attention_mask_in_dataloader = True
    # A prewarm captures nothing: attention runs, and takes its mask, whatever is captured later.
    layer.config.cuda_graph_modules = [CudaGraphModule.mlp]
    prewarm = layer.get_layer_static_inputs(12, 2, for_pipeline_prewarm=True)
    assert torch.equal(prewarm["attention_mask"], capture["attention_mask"])
    assert prewarm["attention_mask"].dtype == torch.bool


@pytest.mark.parametrize("prewarm", [False, True])
@pytest.mark.parametrize("cuda_graph_impl", IMPLEMENTATIONS)
def test_a_packed_layer_gets_offsets_and_no_mask(layer_with, cuda_graph_impl, prewarm):
    layer = layer_with(
        bf16=True, cuda_graph_impl=cuda_graph_impl, thd_max_packed_sequences=3, **PACKED, **PARALLEL
    )
    layer.config.create_attention_mask_in_dataloader = True
    inputs = layer.get_layer_static_inputs(12, 2, for_pipeline_prewarm=prewarm)
    assert list(inputs) == ["hidden_states", *OFFSETS]
    hidden_states = inputs["hidden_states"]
    assert hidden_states.shape == (24 // 2, 1, HIDDEN) and hidden_states.requires_grad
    assert hidden_states.dtype == torch.bfloat16 and bool((hidden_states == 1).all())
    for name in OFFSETS:
        assert inputs[name].tolist() == [0, 72, 72, 72]  # 24 tokens on each of 3 ranks
        assert inputs[name].dtype == torch.int32 and inputs[name].device == hidden_states.device

    q, kv, q_padded, kv_padded = (inputs[name] for name in OFFSETS)
    if cuda_graph_impl == "none" or prewarm:
        assert kv is q and kv_padded is q_padded and q_padded is not q
        q[1] = 5
        assert q_padded.tolist() == [0, 72, 72, 72]
    else:
        for written, tensor in enumerate((q, kv, q_padded, kv_padded)):
            tensor.fill_(written)
        assert [inputs[name].unique().tolist() for name in OFFSETS] == [[0], [1], [2], [3]]


def test_an_unset_number_of_sequences_counts_as_one(layer_with):
    inputs = layer_with(bf16=True, **PACKED).get_layer_static_inputs(12, 2)
    assert [inputs[name].tolist() for name in OFFSETS] == [[0, 24]] * 4


@pytest.mark.parametrize("prewarm", [False, True])
@pytest.mark.parametrize("cuda_graph_impl", IMPLEMENTATIONS)
def test_offsets_stay_the_same_tensors_in_packed_seq_params(layer_with, cuda_graph_impl, prewarm):
    layer = layer_with(cuda_graph_impl=cuda_graph_impl, thd_max_packed_sequences=2, **PACKED)
    inputs = layer.get_layer_static_inputs(12, 2, for_pipeline_prewarm=prewarm)
    del inputs["hidden_states"]
    params = PackedSeqParams(qkv_format="thd", max_seqlen_q=24, max_seqlen_kv=24, **inputs)
    for name in OFFSETS:
        assert getattr(params, name) is inputs[name]
    aliased = cuda_graph_impl == "none" or prewarm
    assert (params.cu_seqlens_kv is params.cu_seqlens_q) == aliased
    assert (params.cu_seqlens_kv_padded is params.cu_seqlens_q_padded) == aliased


@pytest.mark.parametrize(
    "fields, dtype", [(dict(fp16=True), torch.float16), ({}, torch.float32)], ids=["fp16", "fp32"]
)
@pytest.mark.parametrize("packing", [{}, PACKED], ids=["unpacked", "packed"])
def test_hidden_states_have_the_configs_dtype(layer_with, fields, dtype, packing):
    layer = layer_with(**fields, **packing)
    assert layer.get_layer_static_inputs(12, 2)["hidden_states"].dtype == dtype
    assert stocks_inputs_of(layer, 12, 2)["hidden_states"].dtype == torch.bfloat16


@pytest.mark.parametrize("packing", [{}, PACKED], ids=["unpacked", "packed"])
def test_a_real_layer_runs_forward_and_backward_on_them(single_rank, packing):
    layer = build(config_of(thd_max_packed_sequences=3, **packing))
    inputs = layer.get_layer_static_inputs(24, 2, for_pipeline_prewarm=True)
    hidden_states = inputs.pop("hidden_states")
    packed = None
    if packing:
        packed = PackedSeqParams(qkv_format="thd", max_seqlen_q=24, max_seqlen_kv=24, **inputs)
    output, _ = layer(hidden_states, attention_mask=None, packed_seq_params=packed)
    assert output.shape == hidden_states.shape
    output.sum().backward()
    assert bool(hidden_states.grad.isfinite().all())
    assert all(parameter.grad is not None for parameter in layer.parameters())

    with pytest.raises(RuntimeError, match="dtype"):
        layer(**stocks_inputs_of(layer, 24, 2))


def test_a_stand_in_with_only_what_may_be_asked_for():
    # No field of packing, and none for the data loader's mask.
    inputs = inputs_of(stand_in(), 4, 2)
    assert inputs["hidden_states"].shape == (4, 2, HIDDEN)
    # True above the diagonal, for each of the two sequences.
    row = [[False, True, True, True], [False, False, True, True]]
    row += [[False, False, False, True], [False] * 4]
    assert inputs["attention_mask"].tolist() == [[row], [row]]
    assert list(inputs_of(stand_in(), 4, 2, for_pipeline_prewarm=True)) == ["hidden_states"]

    packed = stand_in(
        cuda_graph_impl="transformer_engine",
        sequence_packing_scheduler="fifo",
        thd_max_packed_sequences=None,
        max_seqlen_per_dp_cp_rank=8,
        context_parallel_size=2,
        create_attention_mask_in_dataloader=True,
    )
    inputs = inputs_of(packed, 4, 2)
    assert list(inputs) == ["hidden_states", *OFFSETS]
    assert len({inputs[name].data_ptr() for name in OFFSETS}) == 4
    assert inputs["cu_seqlens_q"].tolist() == [0, 16]


def test_stocks_layer_of_experts_has_the_layers_inputs():
    assert transformer_layer.MoETransformerLayer.get_layer_static_inputs is inputs_of
