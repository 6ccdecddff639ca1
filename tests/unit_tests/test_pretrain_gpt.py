"""The entry script's own functions."""

from types import SimpleNamespace

import pytest
import torch

import pretrain_gpt


def test_packed_seq_params_share_one_tensor_for_queries_and_keys():
    batch = {
        "cu_seqlens": torch.tensor([[0, 3, 8]], dtype=torch.int32),
        "max_seqlen": torch.tensor([5]),
    }
    packed = pretrain_gpt.packed_seq_params_of(batch)
    assert packed.qkv_format == "thd"
    assert packed.cu_seqlens_q.tolist() == [0, 3, 8] and packed.cu_seqlens_q.dtype == torch.int32
    assert packed.cu_seqlens_kv is packed.cu_seqlens_q
    assert (packed.max_seqlen_q, packed.max_seqlen_kv) == (5, 5)
    assert type(packed.max_seqlen_q) is int


def test_a_batch_that_is_not_packed_has_none():
    assert pretrain_gpt.packed_seq_params_of({"cu_seqlens": None}) is None


@pytest.mark.parametrize(
    "flags, message",
    [
        (dict(sft=True), "--sft"),
        (
            dict(dataloader_inter_document_masking=True, context_parallel_size=2),
            "--context-parallel-size 2 with --dataloader-inter-document-masking",
        ),
    ],
)
def test_flags_without_a_data_path_are_refused(flags, message):
    stock = dict(sft=False, dataloader_inter_document_masking=False, context_parallel_size=1)
    pretrain_gpt.refuse_unsupported(SimpleNamespace(**stock))
    with pytest.raises(ValueError, match=message):
        pretrain_gpt.refuse_unsupported(SimpleNamespace(**{**stock, **flags}))
