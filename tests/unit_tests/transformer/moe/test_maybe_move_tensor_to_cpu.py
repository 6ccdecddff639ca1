"""Split sizes of an all-to-all on the CPU."""

import numpy
import torch

from megatron.core.transformer.moe import moe_utils, token_dispatcher


def test_as_numpy_gives_numpy_for_a_tensor_on_the_cpu():
    splits = torch.tensor([3, 5])
    assert torch.is_tensor(moe_utils.upstream.maybe_move_tensor_to_cpu(splits, as_numpy=True))
    moved = token_dispatcher.maybe_move_tensor_to_cpu(splits, as_numpy=True)
    assert isinstance(moved, numpy.ndarray) and moved.tolist() == [3, 5]


def test_the_rest_is_stocks():
    splits = torch.tensor([3, 5])
    assert moe_utils.maybe_move_tensor_to_cpu(splits) is splits
    assert moe_utils.maybe_move_tensor_to_cpu([3, 5], as_numpy=True) == [3, 5]
