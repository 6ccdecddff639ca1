"""The ``--device`` flag, and what the CPU device makes of Megatron-LM's other flags."""

from argparse import ArgumentParser, Namespace

import torch

from megatron.training.utils import print_rank_0

# What a flag's stock default must become where there is no GPU: (argument, value on the CPU device).
SETTINGS = (
    ("distributed_backend", "gloo"),
    ("transformer_impl", "local"),
    ("no_persist_layer_norm", True),
    ("gradient_accumulation_fusion", False),
    ("masked_softmax_fusion", False),
    ("apply_rope_fusion", False),
    ("cross_entropy_loss_fusion", False),
    ("moe_router_fusion", False),
    ("moe_permute_fusion", False),
)
# Flags that ask for what only a GPU can do: (argument, values that do not, the flag).
GPU_ONLY = (
    ("cuda_graph_impl", ("none", None), "--cuda-graph-impl"),
    ("fp8", (None, False), "--fp8-format"),
    ("fp4", (None, False), "--fp4-format"),
    ("tp_comm_overlap", (False,), "--tp-comm-overlap"),
    ("use_megatron_fsdp", (False,), "--use-megatron-fsdp"),
    ("use_torch_fsdp2", (False,), "--use-torch-fsdp2"),
    ("moe_grouped_gemm", (False,), "--moe-grouped-gemm"),
    ("moe_enable_deepep", (False,), "--moe-enable-deepep"),
    ("nccl_ub", (False,), "--use-nccl-ub"),
    ("profile", (False,), "--profile"),
    ("batch_invariant_mode", (False,), "--batch-invariant-mode"),
)


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the group of the fork's flags that concern the device."""
    group = parser.add_argument_group(title="device")
    group.add_argument(
        "--device",
        choices=("auto", "cuda", "cpu"),
        default="auto",
        help="Where to train: a GPU over NCCL, the CPU over gloo, or (auto) the CPU only without a GPU.",
    )


def require_gpu(args: Namespace) -> None:
    """Raises ValueError where there is no GPU, and the CPU device is off."""
    if not torch.cuda.is_available():
        raise ValueError(
            f"--device {args.device}: this machine has no GPU that torch can use. Pass --device cpu (or "
            "auto), or see why torch.cuda.is_available() is False."
        )


def adapt(args: Namespace) -> None:
    """Makes ``args`` fit the CPU device, in place, and prints what it changed on rank 0.

    Raises:
        ValueError: ``args`` asks for what only a GPU can do; every such flag is named.
    """
    if args.device == "cuda":
        raise ValueError(
            "--device cuda: this process was started on the CPU device. Pass the flag on the command "
            "line, or call megatron.overlay.install(device='cuda') before any megatron import."
        )
    refused = [
        f"{flag} ({name}={getattr(args, name)!r})"
        for name, harmless, flag in GPU_ONLY
        if getattr(args, name, harmless[0]) not in harmless
    ]
    if refused:
        raise ValueError(
            f"the CPU device cannot do {', '.join(refused)}: drop what is listed, or run on a GPU."
        )
    changed = []
    for name, value in SETTINGS:
        if hasattr(args, name) and getattr(args, name) != value:
            changed.append(f"{name}={value}")
            setattr(args, name, value)
    if changed:
        print_rank_0(f"> CPU device: {', '.join(changed)}", args.rank)
