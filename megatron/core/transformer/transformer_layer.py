"""Layer of megatron/core/transformer/transformer_layer.py.

Same as upstream but for TransformerLayer.get_layer_static_inputs:
- With config.sequence_packing_scheduler set it gives one packed (THD) microbatch: cu_seqlens in place of
  the attention mask, and hidden states of the pack's length. Upstream knows no packs.
- for_pipeline_prewarm gives inputs as a training step brings them, rather than as graph capture needs them:
  cu_seqlens that alias, and an attention mask only where the data loader makes one.
- The hidden states are bf16, fp16 or fp32 as the config says. Upstream's are always bf16, which
  an fp16 or fp32 layer refuses.
- The attention mask is made as bool on the device. Upstream makes it as fp32 on the CPU, four times as
  large, and copies it; the values are the same.
- It reads plain attributes of the layer and its config, so that it also works unbound, on a stand-in.
"""

import torch

from megatron.core.transformer.enums import CudaGraphModule
from megatron.core.transformer.identity_op import IdentityOp
from megatron.overlay import upstream_of

upstream = upstream_of(__name__)


class TransformerLayer(upstream.TransformerLayer):
    """A single transformer layer; its static inputs may be packed."""

    def get_layer_static_inputs(self, seq_length, micro_batch_size, *, for_pipeline_prewarm=False):
        """Inputs of one microbatch, for graph capture or for a pipeline prewarm.

        Let s be ``seq_length`` and b ``micro_batch_size``; or, packed, let the pack be
        s = ``max_seqlen_per_dp_cp_rank * context_parallel_size`` tokens in a row of their own, b = 1, whatever
        the arguments say.

        Args:
            seq_length: tokens of a sequence, over all context parallel ranks; not read when packed.
            micro_batch_size: sequences of a microbatch; not read when packed.
            for_pipeline_prewarm: whether the layer will run eagerly, as a training step does, whatever
                ``cuda_graph_impl`` says.

        Returns:
            dict of
            - ``hidden_states``: ones [s / cp, b, h], or [s / cp / tp, b, h] under sequence parallelism, in
              the config's dtype, requiring a gradient.
            - ``attention_mask``: bool [b, 1, s / cp, s], True where a key comes after the query. Never when
              packed. For a capture: if attention is captured. For a prewarm: if the config has
              ``create_attention_mask_in_dataloader`` set (TransformerConfig does not have it).
            - packed only, ``cu_seqlens_q``, ``cu_seqlens_kv``, ``cu_seqlens_q_padded``,
              ``cu_seqlens_kv_padded``: int32 [thd_max_packed_sequences + 1], 0 and then s: the first sequence is
              the whole pack, the others are empty. Four buffers for a capture, which writes each of them
              before a replay. Otherwise (a prewarm, or no graph implementation) q and kv are one
              tensor, and their padded ones another, as in a real batch of self-attention.
        """
        config = self.config
        packed = getattr(config, "sequence_packing_scheduler", None) is not None
        if packed:
            local_length, batch = config.max_seqlen_per_dp_cp_rank, 1
        else:
            local_length, batch = seq_length // config.context_parallel_size, micro_batch_size
        shards = config.tensor_model_parallel_size if config.sequence_parallel else 1
        device = torch.cuda.current_device()
        inputs = {
            "hidden_states": torch.ones(
                (local_length // shards, batch, config.hidden_size),
                dtype=_dtype_of(config),
                device=device,
                requires_grad=True,
            )
        }
        if packed:
            capture = config.cuda_graph_impl != "none" and not for_pipeline_prewarm
            inputs.update(_cu_seqlens(config, separate=capture, device=device))
        elif _takes_attention_mask(self, for_pipeline_prewarm):
            mask = torch.ones((local_length, seq_length), dtype=torch.bool, device=device).triu_(1)
            inputs["attention_mask"] = mask.repeat(batch, 1, 1, 1)
        return inputs


def _dtype_of(config):
    """The dtype of the layer's activations."""
    if config.bf16:
        return torch.bfloat16
    return torch.float16 if config.fp16 else torch.float32


def _takes_attention_mask(layer, for_pipeline_prewarm):
    if isinstance(layer.self_attention, IdentityOp):
        return False
    if for_pipeline_prewarm:  # all of the layer runs, whatever graphs would capture
        return getattr(layer.config, "create_attention_mask_in_dataloader", False)
    captured = layer.config.cuda_graph_modules
    return not captured or CudaGraphModule.attn in captured


def _cu_seqlens(config, *, separate, device):
    """The four offsets of a pack that is one sequence; each a tensor of its own if ``separate``."""
    sequences = getattr(config, "thd_max_packed_sequences", None)
    entries = 2 if sequences is None else sequences + 1
    tokens = config.max_seqlen_per_dp_cp_rank * config.context_parallel_size
    offsets = torch.full((entries,), tokens, dtype=torch.int32, device=device)
    offsets[0] = 0
    padded = offsets.clone()
    return {
        "cu_seqlens_q": offsets,
        "cu_seqlens_kv": offsets.clone() if separate else offsets,
        "cu_seqlens_q_padded": padded,
        "cu_seqlens_kv_padded": padded.clone() if separate else padded,
    }
