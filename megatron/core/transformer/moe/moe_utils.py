"""Layer of megatron/core/transformer/moe/moe_utils.py.

Same as upstream but for:
- maybe_move_tensor_to_cpu: gives numpy also for a tensor that is on the CPU already. Stock hands it back as
  a tensor, which torch's all-to-all does not take as split sizes.
"""

import torch

from megatron.overlay import upstream_of

upstream = upstream_of(__name__)


def maybe_move_tensor_to_cpu(tensor, as_numpy=False, record_stream=False):
    """As upstream's; with ``as_numpy`` the result is a numpy array wherever the tensor was."""
    moved = upstream.maybe_move_tensor_to_cpu(tensor, as_numpy, record_stream)
    return moved.numpy() if as_numpy and torch.is_tensor(moved) else moved
