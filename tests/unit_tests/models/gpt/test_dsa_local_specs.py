"""DSA models built of Megatron Core's own modules, through the entry points of stock scripts."""

import pytest
import torch

from megatron.core.models.backends import LocalSpecProvider, get_backend
from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
    get_transformer_block_with_experimental_attention_variant_spec as block_spec,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.duplicated_linear import DuplicatedLinear
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.experimental_attention_variant.dsa import (
    DSAIndexerLossAutoScaler,
    DSAIndexerLossLoggingHelper,
    DSAttention,
)
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import MLATransformerConfig
from megatron.core.transformer.upcasting_layer_norm import UpcastingLayerNorm
from megatron.training.models.gpt import (
    GPTModelBuilder,
    GPTModelConfig,
    default_layer_spec,
    mtp_block_spec,
)

MOE = {'num_moe_experts': 4, 'moe_router_topk': 2, 'moe_layer_freq': [0, 1]}


def config(**fields):
    return MLATransformerConfig(
        **{
            'num_layers': 2,
            'hidden_size': 32,
            'num_attention_heads': 4,
            'multi_latent_attention': True,
            'q_lora_rank': 16,
            'kv_lora_rank': 16,
            'qk_head_dim': 8,
            'qk_pos_emb_head_dim': 4,
            'v_head_dim': 8,
            'rope_type': 'rope',
            'experimental_attention_variant': 'dsa',
            'dsa_indexer_n_heads': 2,
            'dsa_indexer_head_dim': 16,
            'dsa_indexer_topk': 4,
            'dsa_indexer_loss_coeff': 1.0,
            'transformer_impl': 'local',
            'normalization': 'RMSNorm',
            'add_bias_linear': False,
            'use_cpu_initialization': True,
            'attention_dropout': 0.0,
            'hidden_dropout': 0.0,
            **fields,
        }
    )


def gpt_config(**fields):
    return GPTModelConfig(
        transformer=config(**fields),
        vocab_size=64,
        seq_length=64,
        position_embedding_type='rope',
        share_embeddings_and_output_weights=False,
    )


def build(**fields):
    torch.manual_seed(0)
    model_config = gpt_config(**fields)
    model = GPTModelBuilder(model_config).build_model(
        ProcessGroupCollection.use_mpu_process_groups(), pre_process=True, post_process=True
    )
    return (
        Float16Module(model_config.transformer, model).cuda()
        if fields.get('bf16')
        else model.cuda()
    )


@pytest.fixture(autouse=True)
def clean_trackers():
    yield
    DSAIndexerLossLoggingHelper.tracker.clear()
    DSAIndexerLossAutoScaler.main_loss_backward_scale = None


def test_the_spec_names_local_modules(single_rank):
    layer, _ = block_spec(config()).layer_specs
    attention = layer.submodules.self_attention.submodules
    indexer = attention.core_attention.submodules.indexer.submodules
    assert attention.core_attention.module is DSAttention
    assert attention.linear_q_down_proj is attention.linear_kv_up_proj is ColumnParallelLinear
    assert attention.linear_proj is RowParallelLinear
    assert indexer.linear_wq_b is indexer.linear_wk is DuplicatedLinear
    assert indexer.linear_weights_proj is DuplicatedLinear


def test_default_spec_and_backend_are_the_layered_ones(single_rank):
    assert default_layer_spec(gpt_config(), vp_stage=None).layer_specs
    assert isinstance(get_backend('local'), LocalSpecProvider)
    assert get_backend('local').linear() is DuplicatedLinear


@pytest.mark.parametrize(
    'fields, error, message',
    [
        ({'transformer_impl': 'transformer_engine'}, AssertionError, None),
        ({'use_kitchen': True}, ValueError, 'use_kitchen is True'),
    ],
)
def test_what_the_local_backend_leaves_to_others(single_rank, monkeypatch, fields, error, message):
    from megatron.core.models.gpt import experimental_attention_variant_module_specs as specs

    def upstream(config):
        raise AssertionError('upstream was asked')

    monkeypatch.setattr(specs.upstream, '_get_backend_spec_provider', upstream)
    dsa = config()
    for name, value in fields.items():
        setattr(dsa, name, value)
    with pytest.raises(error, match=message):
        block_spec(dsa)


def test_other_variants_are_refused(single_rank):
    linear_attention = config()
    linear_attention.experimental_attention_variant = 'gated_delta_net'
    with pytest.raises(ValueError, match="experimental_attention_variant is 'gated_delta_net'"):
        block_spec(linear_attention)


TRAINED = {
    'dense': {},
    'moe': MOE,
    'layer norm': {'normalization': 'LayerNorm'},
    'qk layernorm': {'qk_layernorm': True},
    'query not compressed': {'q_lora_rank': None},
    'sparse indexer loss': {'dsa_indexer_use_sparse_loss': True},
    'multi-token prediction': {'mtp_num_layers': 1},
    'bfloat16': {'bf16': True, 'params_dtype': torch.bfloat16},
    'bfloat16, indexer norm in float32': {
        'bf16': True,
        'params_dtype': torch.bfloat16,
        'dsa_indexer_k_norm_fp32': True,
    },
    'recompute': {
        'recompute_granularity': 'full',
        'recompute_method': 'uniform',
        'recompute_num_layers': 1,
    },
}


@pytest.mark.parametrize('packed', [False, True], ids=['unpacked', 'packed'])
@pytest.mark.parametrize('fields', TRAINED)
def test_trains(single_rank, pack, fields, packed):
    model = build(**TRAINED[fields])
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    torch.manual_seed(1)
    tokens = torch.randint(64, (1, 16), device='cuda')
    packed = pack([5, 1, 10] if packed else [16])
    positions = torch.cat([torch.arange(length) for _, length in packed.spans])
    positions = positions.unsqueeze(0).to(tokens.device)
    params = packed.params() if len(packed.spans) > 1 else None
    losses, norms = [], {}
    for _ in range(15):
        optimizer.zero_grad()
        loss = model(tokens, positions, None, labels=tokens, packed_seq_params=params)
        loss = loss.float().mean()
        loss.backward()
        for name, parameter in model.named_parameters():
            norms[name] = norms.get(name, 0) + parameter.grad.float().norm().item()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > 4 and losses[-1] < 2.5  # ln(64) is 4.16
    experts = {name for name in norms if 'experts' in name}  # may have seen no token
    assert [name for name, norm in norms.items() if norm == 0 and name not in experts] == []


def test_the_indexer_loss_trains_the_indexer_alone(single_rank):
    """Fitted by itself, with the rest of the model fixed, the indexer comes nearer to the attention."""
    model = build(dsa_indexer_loss_coeff=1e3, qk_layernorm=True)
    with torch.no_grad():
        for layer in model.decoder.layers:  # attention that is far from uniform
            layer.self_attention.linear_q_up_proj.weight.mul_(40)
    indexers = [p for name, p in model.named_parameters() if '.indexer.' in name]
    optimizer = torch.optim.Adam(indexers, lr=1e-2)
    torch.manual_seed(1)
    tokens = torch.randint(64, (1, 24), device='cuda')
    positions = torch.arange(24, device='cuda').unsqueeze(0)
    divergences = []
    for _ in range(40):
        optimizer.zero_grad()
        model(tokens, positions, None, labels=tokens).mean().backward()
        divergences.append(DSAIndexerLossLoggingHelper.tracker['values'].clone())
        DSAIndexerLossLoggingHelper.clean_loss_in_tracker()
        optimizer.step()
    assert (divergences[-1] < 0.7 * divergences[0]).all()


def test_without_its_loss_the_indexer_has_no_gradient(single_rank):
    model = build(dsa_indexer_loss_coeff=0.0)
    tokens = torch.arange(16, device='cuda').unsqueeze(0)
    model(tokens, tokens, None, labels=tokens).mean().backward()
    touched = {name for name, p in model.named_parameters() if p.grad is not None}
    untouched = {name for name, _ in model.named_parameters()} - touched
    assert untouched and all('.indexer.' in name for name in untouched)


def test_prediction_layers_are_built_like_the_last_layer_of_the_decoder(single_rank):
    model_config = gpt_config(mtp_num_layers=1, **MOE)
    (layer,) = mtp_block_spec(model_config, default_layer_spec(model_config, None)).layer_specs
    inner = layer.submodules.mtp_model_layer.submodules
    assert inner.self_attention.submodules.core_attention.module is DSAttention
    assert inner.mlp.func is MoELayer
    assert mtp_block_spec(gpt_config(), None) is None


def test_the_indexer_norm_takes_more_precise_inputs():
    torch.manual_seed(0)
    norm = UpcastingLayerNorm(None, hidden_size=8, eps=1e-5)
    torch.nn.init.normal_(norm.weight)
    torch.nn.init.normal_(norm.bias)
    norm = norm.bfloat16()
    x = torch.randn(3, 8)
    centred = x - x.mean(-1, keepdim=True)
    expected = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    expected = expected * norm.weight.float() + norm.bias.float()
    assert norm(x).dtype == torch.float32
    torch.testing.assert_close(norm(x), expected)
