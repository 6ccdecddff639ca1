"""Rolling the labels of a pack to the next token."""

import torch

from megatron.core.transformer.multi_token_prediction import roll_tensor


def test_rolls_within_each_sequence_of_a_pack(pack):
    packed = pack([3, 0, 2], device='cpu')
    rolled, total = roll_tensor(torch.arange(1, 6).unsqueeze(0), packed_seq_params=packed.params())
    assert rolled.tolist() == [[2, 3, 0, 5, 0]]
    assert total == 10


def test_sequences_lie_where_the_padded_offsets_say(pack):
    packed = pack([3, 2], [2, 1], tail=1, device='cpu')
    tokens = torch.tensor([[11, 12, 13, -1, -1, 21, 22, -1, -1]])
    mask = torch.tensor([[1, 1, 1, 0, 0, 1, 1, 0, 0]])
    rolled, _ = roll_tensor(tokens, packed_seq_params=packed.params())
    mask, count = roll_tensor(mask, packed_seq_params=packed.params())
    assert rolled[mask.bool()].tolist() == [12, 13, 22]
    assert count == 3
