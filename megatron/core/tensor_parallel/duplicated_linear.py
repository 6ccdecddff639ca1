"""A linear layer whose weight is the same on every tensor parallel rank."""

from contextlib import nullcontext
from typing import Callable, Optional

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.functional import linear

from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.tensor_parallel.random import (
    get_cuda_rng_tracker,
    get_data_parallel_rng_tracker_name,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint


class DuplicatedLinear(torch.nn.Module):
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
        super().__init__()
        self.skip_bias_add = skip_bias_add
        on_cpu = config.use_cpu_initialization
        kind = {
            'device': 'cpu' if on_cpu else torch.cuda.current_device(),
            'dtype': config.params_dtype,
        }
        self.weight = Parameter(torch.empty(output_size, input_size, **kind))
        self.bias = Parameter(torch.zeros(output_size, **kind)) if bias else None

        if config.perform_initialization:
            tracker = get_cuda_rng_tracker()
            # The one state of the tracker that tensor parallel ranks have in common.
            same_on_all_ranks = (
                tracker.fork(get_data_parallel_rng_tracker_name())
                if tracker.is_initialized() and not on_cpu
                else nullcontext()
            )
            with torch.no_grad(), same_on_all_ranks:
                init_method(self.weight)
        for parameter in self.parameters():
            marks = {
                'allreduce': True,
                'tensor_model_parallel': False,
                # Each rank sees its own part of the sequence: its gradient is one term of a sum.
                'sequence_parallel': config.sequence_parallel,
            }
            for name, value in marks.items():
                setattr(parameter, name, value)

    def forward(self, x: Tensor) -> tuple[Tensor, Optional[Tensor]]:
        """Maps [..., input_size] to [..., output_size]; the bias is second if it was not added."""
        if self.skip_bias_add:
            return linear(x, self.weight), self.bias
        return linear(x, self.weight, self.bias), None

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
