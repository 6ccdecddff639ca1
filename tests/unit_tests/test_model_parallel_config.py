"""The fields of packing in every config of a model, and in the flags made of them."""

import dataclasses
import json
import sys

import pytest

import megatron.core
from megatron.core import model_parallel_config
from megatron.core.transformer.heterogeneous.heterogeneous_config import (
    HeterogeneousTransformerConfig,
)
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.training import arguments
from megatron.training.argument_utils import core_transformer_config_from_args

SMALL = dict(num_layers=1, hidden_size=16, num_attention_heads=2)
BLOCKS = {
    "block_configs": [
        {
            "attention": {"n_heads_in_group": 1, "no_op": False, "replace_with_linear": False},
            "ffn": {"ffn_mult": 2.0, "no_op": False, "replace_with_linear": False},
        }
    ]
}
CONFIGS = {
    model_parallel_config.ModelParallelConfig: {},
    TransformerConfig: SMALL,
    MLATransformerConfig: SMALL,
    HeterogeneousTransformerConfig: {
        **SMALL,
        "heterogeneous_layers_config_encoded_json": json.dumps(BLOCKS),
    },
}
PACKING = dict(
    sequence_packing_scheduler="best-fit", thd_max_packed_sequences=4, max_seqlen_per_dp_cp_rank=32
)


@pytest.mark.parametrize("config_class", CONFIGS)
def test_every_config_has_the_fields_unset_unless_given(config_class):
    config = config_class(**CONFIGS[config_class])
    assert config.sequence_packing_scheduler is None and config.thd_max_packed_sequences is None
    config = config_class(**CONFIGS[config_class], **PACKING)
    assert {name: getattr(config, name) for name in PACKING} == PACKING


def test_the_fields_are_all_that_stock_lacks():
    stock = model_parallel_config.upstream.ModelParallelConfig
    assert megatron.core.ModelParallelConfig is model_parallel_config.ModelParallelConfig
    names = [field.name for field in dataclasses.fields(stock)]
    ours = [field.name for field in dataclasses.fields(megatron.core.ModelParallelConfig)]
    assert ours == [*names, "sequence_packing_scheduler", "thd_max_packed_sequences"]
    values = dataclasses.asdict(stock(tensor_model_parallel_size=2, sequence_parallel=True))
    config = megatron.core.ModelParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True)
    assert values.items() <= dataclasses.asdict(config).items()
    assert values["expert_tensor_parallel_size"] == 2, "stock's own __post_init__ has run"


def test_a_heterogeneous_models_layers_have_them_too():
    config_class = HeterogeneousTransformerConfig
    layer = config_class(**CONFIGS[config_class], **PACKING).get_config_for_layer(1)
    assert {name: getattr(layer, name) for name in PACKING} == PACKING


@pytest.mark.parametrize("config_class", CONFIGS)
@pytest.mark.parametrize(
    "fields, message",
    [
        (
            dict(sequence_packing_scheduler="fifo"),
            "max_seqlen_per_dp_cp_rank=None with sequence_packing_scheduler='fifo': expected a positive",
        ),
        (
            dict(sequence_packing_scheduler="fifo", max_seqlen_per_dp_cp_rank=0),
            "max_seqlen_per_dp_cp_rank=0 .* Set --max-seqlen-per-dp-cp-rank",
        ),
        ({**PACKING, "thd_max_packed_sequences": 0}, "thd_max_packed_sequences=0: expected a"),
        (dict(thd_max_packed_sequences=-1), "=-1: .* Set --thd-max-packed-sequences"),
        (
            dict(thd_max_packed_sequences=2.0),
            "thd_max_packed_sequences=2.0: expected a positive int",
        ),
        (dict(thd_max_packed_sequences=True), "thd_max_packed_sequences=True: expected"),
    ],
)
def test_packs_without_length_or_room_are_refused(config_class, fields, message):
    with pytest.raises(ValueError, match=message):
        config_class(**CONFIGS[config_class], **fields)


COMMAND = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1 "
    "--max-position-embeddings 32 --train-iters 1 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 127"
).split()


@pytest.mark.parametrize(
    "flags, config_class",
    [([], TransformerConfig), (["--multi-latent-attention"], MLATransformerConfig)],
)
def test_flags_reach_the_config(monkeypatch, flags, config_class):
    packing = "--sequence-packing-scheduler best-fit --thd-max-packed-sequences 4"
    flags = [*flags, *packing.split(), "--max-seqlen-per-dp-cp-rank", "32"]
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *COMMAND, *flags])
    monkeypatch.setenv("WORLD_SIZE", "1")
    args = arguments.parse_args()
    arguments.validate_args(args)
    config = core_transformer_config_from_args(args)
    assert type(config) is config_class
    assert {name: getattr(config, name) for name in PACKING} == PACKING


def test_a_scheduler_that_does_not_exist_is_refused(monkeypatch, capsys):
    flags = ["--sequence-packing-scheduler", "worst-fit"]
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *COMMAND, *flags])
    with pytest.raises(SystemExit):
        arguments.parse_args()
    assert "invalid choice: 'worst-fit' (choose from" in capsys.readouterr().err
