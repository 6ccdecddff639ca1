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
        (dict(eval_interval=None), "--eval-interval is not given"),
        (
            dict(dataloader_inter_document_masking=True, context_parallel_size=2),
            "--context-parallel-size 2 with --dataloader-inter-document-masking",
        ),
        (dict(sequence_packing_scheduler="fifo"), "--sequence-packing-scheduler fifo: .* Drop it"),
        (dict(thd_max_packed_sequences=2), "--thd-max-packed-sequences 2: .* no data path"),
    ],
)
def test_flags_without_a_data_path_are_refused(flags, message):
    stock = dict(
        sft=False,
        dataloader_inter_document_masking=False,
        context_parallel_size=1,
        eval_interval=100,
    )
    pretrain_gpt.check_arguments(SimpleNamespace(**stock))
    with pytest.raises(ValueError, match=message):
        pretrain_gpt.check_arguments(SimpleNamespace(**{**stock, **flags}))


def test_loss_is_the_masked_sum_over_the_masked_tokens(monkeypatch):
    args = SimpleNamespace(check_for_nan_in_loss_and_grad=False, check_for_spiky_loss=False)
    monkeypatch.setattr(pretrain_gpt, "get_args", lambda: args)
    monkeypatch.setattr(pretrain_gpt, "get_rerun_state_machine", lambda: None)
    losses = torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]], dtype=torch.bfloat16)
    mask = torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 0.0]])
    loss, num_tokens, report = pretrain_gpt.loss_func(mask, losses)
    assert loss.item() == 1 + 4 + 16 and loss.dtype == torch.float32
    assert num_tokens.item() == 3 and num_tokens.dtype == torch.int
    assert report["lm loss"].tolist() == [21.0, 3.0]


@pytest.mark.parametrize("reject, name", [(float("nan"), "NaN"), (float("inf"), "Inf")])
def test_a_loss_that_is_no_number_is_handed_to_the_rerun_machine(monkeypatch, reject, name):
    checks = []
    rerun = SimpleNamespace(validate_result=lambda **check: checks.append(check))
    args = SimpleNamespace(check_for_nan_in_loss_and_grad=True, check_for_spiky_loss=False)
    monkeypatch.setattr(pretrain_gpt, "get_args", lambda: args)
    monkeypatch.setattr(pretrain_gpt, "get_rerun_state_machine", lambda: rerun)
    pretrain_gpt.loss_func(torch.ones(1, 1), torch.full((1, 1), reject))
    (check,) = [check for check in checks if check["rejection_func"](check["result"])]
    assert name in check["message"] and check["fatal"]


def _arguments(**flags):
    values = dict(
        seed=11,
        seq_length=32,
        data_path=["0.3", "a", "0.7", "b"],
        data_args_path=None,
        train_data_path=None,
        valid_data_path=None,
        test_data_path=None,
        per_split_data_args_path=None,
        split="80,10,10",
        multiple_validation_sets=True,
        full_validation=True,
        num_dataset_builder_threads=2,
        data_cache_path="cache",
        mmap_bin_files=False,
        reset_position_ids=True,
        reset_attention_mask=True,
        eod_mask_loss=True,
        create_attention_mask_in_dataloader=False,
        object_storage_cache_path=None,
        mid_level_dataset_surplus=0.25,
        allow_ambiguous_pad_tokens=True,
        context_parallel_size=2,
        data_parallel_size=3,
        tensor_model_parallel_size=4,
        sequence_parallel=True,
        hybrid_context_parallel=False,
        dataloader_inter_document_masking=True,
        mock_data=False,
        fim_data=False,
    )
    return SimpleNamespace(**{**values, **flags})


def _provided(monkeypatch, args):
    """What the provider asks the dataset builder for: class, sizes and config."""
    asked = []

    class Builder:
        def __init__(self, *arguments):
            asked.append(arguments)

        def build(self):
            return "datasets"

    tokenizer = SimpleNamespace(vocab_size=258, eod=256, unique_identifiers={})
    monkeypatch.setattr(pretrain_gpt, "get_args", lambda: args)
    monkeypatch.setattr(pretrain_gpt, "get_tokenizer", lambda: tokenizer)
    monkeypatch.setattr(pretrain_gpt, "BlendedMegatronDatasetBuilder", Builder)
    assert pretrain_gpt.train_valid_test_datasets_provider((8, 4, 2)) == "datasets"
    ((dataset, sizes, _, config),) = asked
    return dataset, sizes, config


def test_datasets_are_built_as_the_flags_say(monkeypatch):
    dataset, sizes, config = _provided(monkeypatch, _arguments())
    assert dataset is pretrain_gpt.GPTDataset and sizes == (8, 4, 2)
    expected = dict(
        random_seed=11,
        sequence_length=32,
        blend=(["a", "b"], [0.3, 0.7]),
        split="80,10,10",
        multiple_validation_sets=True,
        full_validation=True,
        num_dataset_builder_threads=2,
        path_to_cache="cache",
        mmap_bin_files=False,
        reset_position_ids=True,
        reset_attention_mask=True,
        eod_mask_loss=True,
        create_attention_mask=False,
        mid_level_dataset_surplus=0.25,
        allow_ambiguous_pad_tokens=True,
        context_parallel_size=2,
        data_parallel_size=3,
        sequence_parallel_size=4,
        inter_document_masking=True,
    )
    assert {name: getattr(config, name) for name in expected} == expected


def test_datasets_of_each_split_mock_data_and_fill_in_the_middle(monkeypatch):
    args = _arguments(data_path=None, split=None, train_data_path=["t"], valid_data_path=["v"])
    _, _, config = _provided(monkeypatch, args)
    assert config.blend is None
    assert config.blend_per_split[:2] == [(["t"], None), (["v"], None)]

    args = _arguments(data_path=None, mock_data=True)
    assert _provided(monkeypatch, args)[0] is pretrain_gpt.MockGPTDataset

    tokens = {f"fim_{name}_token": f"<{name}>" for name in ("prefix", "middle", "suffix", "pad")}
    rates = dict(fim_rate=0.5, fim_spm_rate=0.25, fim_split_sample="x")
    rates.update(fim_fragment_rate=0.125, fim_no_prefix="y")
    dataset, _, config = _provided(monkeypatch, _arguments(fim_data=True, **tokens, **rates))
    assert dataset is pretrain_gpt.GPTFIMDataset
    assert {name: getattr(config, name) for name in rates} == rates
    assert config.fim_extra_tokens == {
        "prefix": "<prefix>",
        "middle": "<middle>",
        "suffix": "<suffix>",
        "pad": "<pad>",
        "eod": 256,
    }


@pytest.mark.parametrize(
    "mtp_num_layers, layout, tied, expected",
    [
        (None, None, False, [10, 13]),  # stock's own groups
        (1, None, True, [10, 13]),
        (1, "Et|tt|tm|L", False, [10, 12]),
        (1, "Et|tt|tm|L", True, [10, 12, 13]),
    ],
)
def test_every_stage_with_an_embedding_is_in_its_group(mtp_num_layers, layout, tied, expected):
    if layout is not None:
        layout = pretrain_gpt.PipelineParallelLayerLayout.from_str(layout, 4)
    config = SimpleNamespace(mtp_num_layers=mtp_num_layers, pipeline_model_parallel_layout=layout)
    assert pretrain_gpt.embedding_ranks([10, 11, 12, 13], config, tied) == expected
