"""GPT model chunks of every kind that a CPU can run, and passes through them, for the tests of prewarm."""

import copy
from types import SimpleNamespace

import torch

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.prewarm_inputs import Microbatch, chunk_inputs
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.cuda_graphs import CudaGraphManager
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.training.models.gpt import GPTModelBuilder, GPTModelConfig

BASE = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "attention_dropout": 0.1,
    "hidden_dropout": 0.1,
    "use_cpu_initialization": True,
    "transformer_impl": "local",
    "add_bias_linear": False,
    "normalization": "RMSNorm",
}
BF16 = {"bf16": True, "params_dtype": torch.bfloat16}
MOE = {
    "num_moe_experts": 4,
    "moe_ffn_hidden_size": 32,
    "moe_router_topk": 2,
    "moe_layer_freq": [0, 1],
    "moe_token_dispatcher_type": "allgather",
    "moe_router_load_balancing_type": ["aux_loss", "global_aux_loss"],
    "moe_aux_loss_coeff": [0.1, 0.1],
    "moe_z_loss_coeff": 0.1,
    "moe_router_enable_expert_bias": True,
    "moe_router_score_function": "sigmoid",
    "moe_input_jitter_eps": 0.1,
    "moe_shared_expert_intermediate_size": 16,
}
MLA = {
    "multi_latent_attention": True,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 16,
    "rope_type": "rope",
}
DSA = {
    **MLA,
    "experimental_attention_variant": "dsa",
    "dsa_indexer_n_heads": 2,
    "dsa_indexer_head_dim": 16,
    "dsa_indexer_topk": 4,
    "dsa_indexer_topk_freq": 2,  # the second layer takes the first one's choice
    "dsa_indexer_loss_coeff": 1.0,
}
QUANTILE = {
    **MOE,
    "moe_router_load_balancing_type": "quantile_balancing",
    "moe_aux_loss_coeff": 0.0,
    "moe_router_enable_expert_bias": False,
}
RECOMPUTE = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
OFFLOAD = {
    "fine_grained_activation_offloading": True,
    "offload_modules": ["attn_norm", "qkv_linear", "core_attn", "attn_proj"],
}
# Fields of the configuration, and of DistributedDataParallel's.
CASES = {
    "moe": ({**MOE, **BF16}, {"overlap_grad_reduce": True}),
    "dsa mtp": (
        {**DSA, **MOE, **BF16, "mtp_num_layers": 1},
        {
            "overlap_grad_reduce": True,
            "use_distributed_optimizer": True,
            "overlap_param_gather": True,
        },
    ),
    "recompute": ({**MLA, **RECOMPUTE, "rope_type": "yarn"}, {}),
    "quantile": ({**QUANTILE, **BF16}, {}),
    "biased": ({**MOE, "moe_router_force_biased": -1.0}, {}),
    "replay": ({**MOE, "moe_enable_routing_replay": True}, {}),
    "alltoall": (
        {**MOE, "moe_token_dispatcher_type": "alltoall", "moe_shared_expert_overlap": True},
        {"overlap_grad_reduce": True},
    ),
    "offload": ({**BF16, **OFFLOAD}, {}),
    "not wrapped": (MOE, None),
    "stubs": (BF16, {}),
}
STAGES = {"first": (True, False), "middle": (False, False), "last": (False, True)}


class Boom(Exception):
    """Raised in the middle of a pass."""


def raise_boom(*args):
    raise Boom


def build(case, stages=STAGES, **overrides):
    """Model chunks of a case, wrapped as training wraps them; overrides are of the wrapper."""
    fields, ddp = CASES[case]
    chunks = []
    for stage in stages:
        pre_process, post_process = STAGES[stage]
        cls = MLATransformerConfig if fields.get("multi_latent_attention") else TransformerConfig
        config = cls(**{**BASE, **fields})
        config.pipeline_dtype = config.params_dtype
        torch.manual_seed(0)
        model_config = GPTModelConfig(
            transformer=config,
            vocab_size=64,
            seq_length=64,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=False,
        )
        if not post_process:  # this rank is the last stage too, which has these layers
            config.mtp_num_layers = None
        groups = ProcessGroupCollection.use_mpu_process_groups()
        chunk = GPTModelBuilder(model_config).build_model(
            groups, pre_process=pre_process, post_process=post_process
        )
        config.mtp_num_layers = fields.get("mtp_num_layers")
        if config.bf16:
            chunk = Float16Module(config, chunk)
        if ddp is not None:
            wrapping = DistributedDataParallelConfig(**{**ddp, **overrides})
            chunk = DistributedDataParallel(config, wrapping, chunk.cuda())
        chunks.append(chunk)
    if case == "stubs":
        furnish(chunks)
    if case == "replay":
        RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD)
    return chunks


def model_of(chunk):
    """The GPTModel within the wrappers."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def furnish(chunks):
    """Puts stubs of what needs a GPU where a model on one has it; they change in every forward."""

    def in_forward(module, inputs, output):
        state = module.fp8_meta["scaling_fwd"]
        state.amax_history.copy_(state.amax_history.roll(-1, 0) + 1)
        state.scale.mul_(2)
        module.is_first_microbatch = False
        module.current_max_attn_logits = torch.ones(4)
        module.current_microbatch = 1
        module.token_dispatcher._comm_manager.over_budget |= True

    for chunk in chunks:
        chunk.config.moe_paged_stash = True
        first, second = model_of(chunk).decoder.layers
        linear = first.self_attention.linear_proj
        linear.fp8_meta = {"fp8_checkpoint": False, "scaling_fwd": delayed_scaling()}
        linear.is_first_microbatch = True
        linear.current_max_attn_logits = None
        manager = SimpleNamespace(over_budget=torch.zeros(1, dtype=torch.bool))
        linear.token_dispatcher = SimpleNamespace(_comm_manager=manager)
        linear.register_forward_hook(in_forward)
        second.cudagraph_manager = graph_manager(chunk.config)
        # Graphs of Transformer Engine, captured for both of two microbatches.
        first.config = copy.copy(chunk.config)
        first.config.cuda_graph_impl = "transformer_engine"
        first.cuda_graphs = [replayed, replayed]


def delayed_scaling():
    """Transformer Engine's state of delayed scaling, as it is made."""
    return SimpleNamespace(scale=torch.ones(3), amax_history=torch.zeros(4, 3))


def replayed(*args, **kwargs):
    raise AssertionError("a captured graph was replayed")


def graph_manager(config):
    """The manager of a layer's CUDA graphs, but for what its constructor asks of the device."""
    manager = CudaGraphManager.__new__(CudaGraphManager)
    torch.nn.Module.__init__(manager)
    manager.func = None
    manager.need_backward = True
    manager.cudagraph_runners = []
    manager.is_first_microbatch = True
    manager.reuse_cudagraphs = False
    manager._inline_capture = False
    manager._num_warmup_steps = None
    return manager


def passes(chunks, evaluation=True):
    """Forward and backward of every chunk, then a forward as evaluation runs it."""
    generator = torch.Generator().manual_seed(3)
    for chunk in chunks:
        for training in (True, False)[: 1 + evaluation]:
            chunk.train(training)
            states, inputs = chunk_inputs(chunk, chunk.config, Microbatch(16, 2), generator)

            def loss(output):
                return output.float().sum(), torch.tensor(output.numel()), {}

            with torch.set_grad_enabled(training):
                output, _ = schedules.forward_step(
                    lambda _, model: (model(**inputs), loss),
                    None,
                    chunk,
                    2,
                    states,
                    [],
                    chunk.config,
                    1,
                    is_first_microbatch=True,
                    is_last_stage="labels" in inputs and inputs["labels"] is not None,
                )
            if training:
                noise = torch.randn(output.shape, generator=generator).to(output.dtype)
                torch.autograd.backward(output, noise if output.dim() else None)


def iteration(chunks):
    """What an iteration of training does to gradients."""
    passes(chunks, evaluation=False)
    for chunk in chunks:
        chunk.finish_grad_sync()
        chunk.zero_grad_buffer()
