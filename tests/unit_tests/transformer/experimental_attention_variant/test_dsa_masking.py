"""Which rows of a pack DSA's indexer trains on."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.transformer.experimental_attention_variant.dsa_masking import (
    extract_query_valid_rows_from_packed_seq_params as valid_rows,
)


@settings(max_examples=50, deadline=None)
@given(
    sequences=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2)), min_size=1, max_size=5),
    tail=st.integers(0, 3),
)
def test_rows_are_real_where_the_pack_has_no_padding(single_rank, pack, sequences, tail):
    packed = pack(*map(list, zip(*sequences)), tail=tail, device='cpu')
    if packed.tokens == 0:
        return
    rows = valid_rows(packed.params(), b=1, sq=packed.tokens, device=torch.device('cpu'))
    padding = packed.is_padding()
    if rows is None:
        assert not padding.any()
    else:
        assert torch.equal(rows, ~padding.unsqueeze(0))


def test_none_without_padding(single_rank, pack):
    """So that without padding every kernel gets what upstream gives it."""
    packed = pack([3, 0, 4], device='cpu')
    assert valid_rows(packed.params(), b=1, sq=7, device=torch.device('cpu')) is None
    assert valid_rows(None, b=1, sq=7, device=torch.device('cpu')) is None


def test_a_mask_that_the_caller_set_goes_first(single_rank, pack):
    params = pack([3], [1], device='cpu').params()
    params.real_token_mask_q = torch.tensor([True, False, False, True])
    rows = valid_rows(params, b=1, sq=4, device=torch.device('cpu'))
    assert rows.tolist() == [[True, False, False, True]]


def test_context_parallel_rows_are_left_to_the_caller(single_rank, pack, monkeypatch):
    from megatron.core import parallel_state

    monkeypatch.setattr(parallel_state, 'get_context_parallel_world_size', lambda: 2)
    params = pack([4], [4], device='cpu').params()
    assert valid_rows(params, b=1, sq=4, device=torch.device('cpu')) is None
