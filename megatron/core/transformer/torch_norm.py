"""Layer of megatron/core/transformer/torch_norm.py.

Same as upstream but for:
- WrappedTorchNorm: allowed under sequence parallelism. Each rank norms its own rows, so all that is needed is what
  Megatron-LM's other norms do: mark the parameters, whose gradients are then summed over the
  tensor-parallel group.
"""

import copy

from megatron.overlay import upstream_of

upstream = upstream_of(__name__)


class WrappedTorchNorm(upstream.WrappedTorchNorm):
    """torch's LayerNorm or RMSNorm, its parameters marked when ``config.sequence_parallel`` is set."""

    def __new__(cls, config, *args, **kwargs):
        if not config.sequence_parallel:
            return super().__new__(cls, config, *args, **kwargs)
        without = copy.copy(config)
        without.sequence_parallel = False
        norm = super().__new__(cls, without, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = True
        return norm
