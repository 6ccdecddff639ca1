"""A linear layer whose weight is the same on every tensor parallel rank."""

from contextlib import nullcontext
from typing import Callable, Optional

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.tensor_parallel.random import (
    get_cuda_rng_tracker,
    get_data_parallel_rng_tracker_name,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint


class DuplicatedLinear(torch.nn.Linear):
    """TELinear's ``parallel_mode="duplicated"`` without Transformer Engine, its arguments included.

    Args:
        input_size: Width of the input.
        output_size: Width of the output.
        config: Gives the dtype of the weight and how it is initialised.
        init_method: Initialises the weight in place.
        bias: Whether there is a bias, initialised to zero.
        skip_bias_add: Return the bias instead of adding it.
        parallel_mode: Must be "duplicated".
        skip_weight_param_allocation: Must be False.

    Raises:
        ValueError: An argument that asks for another kind of layer.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: Callable[[Tensor], Tensor],
        bias: bool,
        skip_bias_add: bool,
        parallel_mode: Optional[str] = "duplicated",
        skip_weight_param_allocation: bool = False,
    ):
        if parallel_mode != "duplicated":
            raise ValueError(
                f"parallel_mode is {parallel_mode!r}, expected 'duplicated': use ColumnParallelLinear "
                "or RowParallelLinear for a weight that is split over tensor parallel ranks."
            )
        if skip_weight_param_allocation:
            raise ValueError("skip_weight_param_allocation is True, expected False.")
        on_cpu = config.use_cpu_initialization
        super().__init__(
            input_size,
            output_size,
            bias=bias,
            device="cpu" if on_cpu else torch.cuda.current_device(),
            dtype=config.params_dtype,
        )
        self.config = config
        self.skip_bias_add = skip_bias_add

        tracker = get_cuda_rng_tracker()
        with torch.no_grad():
            if config.perform_initialization:
                # The one state of the tracker that tensor parallel ranks have in common.
                same_on_all_ranks = (
                    tracker.fork(get_data_parallel_rng_tracker_name())
                    if tracker.is_initialized() and not on_cpu
                    else nullcontext()
                )
                with same_on_all_ranks:
                    init_method(self.weight)
            if bias:
                self.bias.zero_()
        for param in self.parameters():
            param.allreduce = True
            param.tensor_model_parallel = False
            # Each rank sees its own part of the sequence: its gradient is one term of a sum.
            param.sequence_parallel = config.sequence_parallel

    def reset_parameters(self) -> None:
        """Draws nothing: PyTorch's own initialisation would move the RNG state for no use."""

    def forward(self, x: Tensor) -> tuple[Tensor, Optional[Tensor]]:
        """Maps [..., input_size] to [..., output_size]; the bias is second if it was not added."""
        if self.skip_bias_add:
            return torch.nn.functional.linear(x, self.weight), self.bias
        return super().forward(x), None

    def sharded_state_dict(
        self, prefix: str = '', sharded_offsets: tuple = (), metadata: Optional[dict] = None
    ) -> ShardedStateDict:
        """Checkpoint entries of a weight that every tensor and data parallel rank holds whole."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix='', keep_vars=True),
            prefix,
            None,
            sharded_offsets,
            dp_cp_group=(metadata or {}).get('dp_cp_group'),
        )
