"""Whole GPT models on packs, without Transformer Engine: each document as if it were alone."""

import pytest
import torch

from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.training.models.gpt import GPTModelBuilder, GPTModelConfig

VOCABULARY = 64
MLA = {
    'multi_latent_attention': True,
    'q_lora_rank': 16,
    'kv_lora_rank': 16,
    'qk_head_dim': 8,
    'qk_pos_emb_head_dim': 4,
    'v_head_dim': 16,  # wider than queries and keys
    'rope_type': 'rope',
}
DSA = {
    **MLA,
    'experimental_attention_variant': 'dsa',
    'dsa_indexer_n_heads': 2,
    'dsa_indexer_head_dim': 16,
    'dsa_indexer_topk': 4,
    # ReLU makes many scores of so small an indexer exactly zero, and ties are broken by position.
    'dsa_indexer_scoring_relu': False,
    'dsa_indexer_loss_coeff': 0.0,
}
MOE = {
    'num_moe_experts': 4,
    'moe_router_topk': 2,
    'moe_layer_freq': [0, 1],
    'moe_router_load_balancing_type': 'none',
    'moe_token_dispatcher_type': 'allgather',
}
RECOMPUTE = {'recompute_granularity': 'selective', 'recompute_modules': ['core_attn']}
FIELDS = {
    'mha': {},
    'gqa': {'num_query_groups': 2},
    'interleaved rope': {'rotary_interleaved': True},
    'no rope': {'position_embedding_type': 'learned_absolute'},
    'sliding window': {'window_size': (3, 0)},
    'recompute': RECOMPUTE,
    'moe': MOE,
    'mla': MLA,
    'mla yarn': {**MLA, 'rope_type': 'yarn', 'qk_layernorm': True},
    'mtp': {'mtp_num_layers': 1},
    'dsa': DSA,
    'dsa yarn': {**DSA, 'rope_type': 'yarn', 'qk_layernorm': True},
    'dsa recompute': {**DSA, **RECOMPUTE},
    'dsa shared top-k': {**DSA, 'dsa_indexer_topk_freq': 2},
    'dsa moe': {**DSA, **MOE},
    'dsa mtp': {**DSA, 'mtp_num_layers': 1},
    'dsa indexer loss': {
        **DSA,
        'dsa_indexer_topk': 64,
        'dsa_indexer_scoring_relu': True,
        'dsa_indexer_loss_coeff': 1.0,
        'calculate_per_token_loss': True,  # a sum over tokens, as the test's loss is
    },
}
PACKS = {
    'one document': ([15],),
    'empty and one-token documents': ([5, 1, 0, 9],),
    'padding between documents': ([5, 1, 0, 9], [3, 0, 1, 2]),
    'repeated final offset and a padded tail': ([5, 9, 0, 0], None, 4),
}


def build(position_embedding_type='rope', **fields):
    cls = MLATransformerConfig if fields.get('multi_latent_attention') else TransformerConfig
    config = cls(
        **{
            'num_layers': 2,
            'hidden_size': 32,
            'num_attention_heads': 4,
            'attention_dropout': 0.0,
            'hidden_dropout': 0.0,
            'use_cpu_initialization': True,
            'transformer_impl': 'local',
            'add_bias_linear': False,
            'normalization': 'RMSNorm',
            **fields,
        }
    )
    torch.manual_seed(0)
    return (
        GPTModelBuilder(
            GPTModelConfig(
                transformer=config,
                vocab_size=VOCABULARY,
                seq_length=64,
                position_embedding_type=position_embedding_type,
            )
        )
        .build_model(
            ProcessGroupCollection.use_mpu_process_groups(), pre_process=True, post_process=True
        )
        .cuda()
    )


def losses_and_gradients(model, tokens, positions, mask, packed_seq_params=None):
    """Loss per token [t], gradients by name, and the loss of multi-token prediction if there is one."""
    model.zero_grad()
    MTPLossLoggingHelper.tracker.clear()
    losses = model(
        tokens, positions, None, labels=tokens, loss_mask=mask, packed_seq_params=packed_seq_params
    )
    (losses * mask).sum().backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return losses[0].detach(), grads, MTPLossLoggingHelper.tracker.get('loss_values')


@pytest.mark.parametrize('packed', PACKS)
@pytest.mark.parametrize('fields', FIELDS)
def test_a_document_in_a_pack_is_as_if_alone(single_rank, pack, fields, packed):
    model = build(**FIELDS[fields])
    packed = pack(*PACKS[packed])
    torch.manual_seed(1)
    tokens = torch.randint(VOCABULARY, (1, packed.tokens), device='cuda')
    positions = torch.zeros_like(tokens)
    for start, length in packed.spans:
        positions[0, start : start + length] = torch.arange(length)
    mask = (~packed.is_padding()).float().unsqueeze(0)

    losses, grads, mtp_loss = losses_and_gradients(model, tokens, positions, mask, packed.params())

    expected_grads, mtp_losses = {}, []
    for start, length in packed.spans:
        if length == 0:
            continue
        rows = slice(start, start + length)
        alone, alone_grads, mtp_alone = losses_and_gradients(
            model, tokens[:, rows], positions[:, rows], mask[:, rows]
        )
        # float32: matrices of another height are summed in another order.
        torch.testing.assert_close(losses[rows], alone, rtol=1e-5, atol=1e-5)
        for name, grad in alone_grads.items():
            expected_grads[name] = expected_grads.get(name, 0) + grad
        if mtp_alone is not None:
            mtp_losses.append((length - 1) * mtp_alone)

    assert grads.keys() == expected_grads.keys()
    if mtp_loss is not None:
        # Normalised by the tokens of the batch, so only the loss compares, not its gradient.
        predicted = sum(max(length - 1, 0) for _, length in packed.spans)
        torch.testing.assert_close(mtp_loss, sum(mtp_losses) / predicted, rtol=1e-5, atol=0)
        return
    for name, grad in grads.items():
        scale = expected_grads[name].abs().max()
        torch.testing.assert_close(
            grad, expected_grads[name], rtol=1e-4, atol=max(1e-4 * scale.item(), 1e-9), msg=name
        )


def test_documents_would_differ_if_they_saw_each_other(single_rank, pack):
    """What the test above would miss: a model whose documents do not depend on what they attend to."""
    model = build()
    torch.manual_seed(1)
    tokens = torch.randint(VOCABULARY, (1, 14), device='cuda')
    positions = torch.cat((torch.arange(5), torch.arange(9))).unsqueeze(0).to(tokens.device)
    mask = torch.ones(1, 14, device='cuda')
    apart, _, _ = losses_and_gradients(model, tokens, positions, mask, pack([5, 9]).params())
    together, _, _ = losses_and_gradients(model, tokens, positions, mask, pack([14]).params())
    torch.testing.assert_close(apart[:5], together[:5], rtol=1e-5, atol=1e-5)
    assert (apart[5:] - together[5:]).abs().max() > 1e-3


@pytest.mark.parametrize('mla', [False, True])
def test_the_specs_that_stock_scripts_use_take_packs(single_rank, mla):
    """The layer is what both spec functions of the local backend name."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    config = (MLATransformerConfig if mla else TransformerConfig)(
        num_layers=1,
        hidden_size=32,
        num_attention_heads=4,
        multi_latent_attention=mla,
        transformer_impl='local',
    )
    spec = get_gpt_layer_local_spec(multi_latent_attention=mla)
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    for layer in (spec, *block.layer_specs):
        core_attention = layer.submodules.self_attention.submodules.core_attention
        assert core_attention is DotProductAttention
