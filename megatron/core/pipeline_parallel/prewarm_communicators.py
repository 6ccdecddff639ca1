"""Creates the communicators that iteration 1 would create, by operations without effect."""

import copy
from typing import Any

import torch

from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.utils import unwrap_model


def reduced_groups(groups: Any, config: Any, model: Any) -> dict[str, Any]:
    """The groups over which iteration 1 communicates outside the model chunks, in an order equal on all ranks.

    Args:
        groups: ProcessGroupCollection; what it lacks is left out, one group under two names is named once.
        config: The run's config.
        model: Any model chunk of this rank: all say the same of tied embeddings and of the optimizer.
    """
    ddp_config = getattr(model, "ddp_config", None)
    names = ["tp"]  # batches are broadcast over it, whatever its size
    names += ["intra_dp_cp", "dp_cp"]  # gradients, losses
    if config.num_moe_experts is not None:
        names += ["intra_expt_dp", "expt_dp", "tp_ep_pp"]  # experts' gradients and their norm
    if getattr(ddp_config, "num_distributed_optimizer_instances", 1) > 1:
        names += ["inter_dist_opt"]
    names += ["intra_dist_opt"] if getattr(ddp_config, "use_distributed_optimizer", False) else []
    names += ["mp"]  # the norm of gradients
    if unwrap_model(model).share_embeddings_and_output_weights or config.mtp_num_layers:
        names += ["embd"]
    found: dict[str, Any] = {}
    for name in names:
        group = getattr(groups, name, None)
        # A rank outside a group holds a placeholder for it.
        if isinstance(group, torch.distributed.ProcessGroup) and group not in found.values():
            found[name] = group
    return found


def reduce_once(group: Any) -> None:
    """All-reduces a single zero over ``group``."""
    torch.distributed.all_reduce(torch.zeros(1, device=torch.cuda.current_device()), group=group)


def exchange_once(groups: Any, config: Any) -> None:
    """Sends a single zero to the next and to the previous stage, as the pipeline schedules do.

    With virtual stages the last stage is followed by the first.

    Args:
        groups: ProcessGroupCollection with pp.
        config: ModelParallelConfig: how stages exchange, and the dtype.
    """
    plain = copy.copy(config)
    plain.timers = None
    plain.variable_seq_lengths = plain.mtp_standalone = (
        False  # else shapes travel first, the same way
    )
    pipeline = P2PCommunicator(groups.pp, plain)
    ring = config.virtual_pipeline_model_parallel_size is not None
    after_first = ring or not pipeline.is_pp_first_stage
    before_last = ring or not pipeline.is_pp_last_stage
    zero = torch.zeros(1, 1, 1, device=torch.cuda.current_device(), dtype=config.pipeline_dtype)
    pipeline.send_forward_recv_forward(zero if before_last else None, after_first, zero.shape)
    pipeline.send_backward_recv_backward(zero if after_first else None, before_last, zero.shape)
