"""The fork's flags, and what the CPU device makes of stock's."""

import argparse
import inspect
import sys

import pytest

from megatron.training import arguments, cpu_arguments
from tests.overlay.layer_trees import json_of


def _options(add_arguments) -> set[str]:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_arguments(parser)
    return {option for action in parser._actions for option in action.option_strings}


def _described(add_arguments) -> dict[str, list]:
    """What each option does, in values that JSON keeps."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_arguments(parser)
    return {
        option: [
            type(action).__name__,
            action.dest,
            repr(action.default),
            repr(action.const),
            getattr(action.type, "__name__", repr(action.type)),
            repr(action.choices),
            action.nargs,
            action.required,
            (action.help or "").replace("%%", "%"),
        ]
        for action in parser._actions
        for option in action.option_strings
    }


@pytest.fixture(scope="module")
def stock() -> dict[str, list]:
    """Stock's options. Those made of a config's fields are stock's only in a process without layers."""
    script = [
        "import argparse, json",
        "from megatron.training import arguments",
        inspect.getsource(_described),
        "print(json.dumps(_described(arguments.add_megatron_arguments)))",
    ]
    return json_of("-c", "\n".join(script))


def test_the_forks_flags_are_these(stock):
    assert _options(arguments.add_megatron_arguments) - set(stock) == {
        "--device",
        "--pipeline-prewarm",
        "--pipeline-prewarm-report",
        "--pipeline-prewarm-skip",
        "--sequence-packing-scheduler",
        "--thd-max-packed-sequences",
    }


def test_no_stock_flag_is_lost_or_changed(stock):
    ours = _described(arguments.add_megatron_arguments)
    assert len(stock) > 700
    changed = {option for option in stock if ours.get(option) != stock[option]}
    assert changed == {"--tokenizer-type"}, "it has one more choice"


def test_help_prints_where_stocks_does_not():
    parsers = []
    for add_arguments in (
        arguments.upstream.add_megatron_arguments,
        arguments.add_megatron_arguments,
    ):
        parsers.append(argparse.ArgumentParser())
        add_arguments(parsers[-1])
    with pytest.raises(ValueError, match="unsupported format character"):
        parsers[0].format_help()
    text = parsers[1].format_help()
    assert "--device {auto,cuda,cpu}" in text
    assert "--sequence-packing-scheduler {fifo,best-fit}" in text
    assert "--thd-max-packed-sequences THD_MAX_PACKED_SEQUENCES" in text
    help_of = {action.dest: action.help for action in parsers[1]._actions}
    assert help_of["sequence_packing_scheduler"].startswith("How sequences are put into packs")
    assert help_of["thd_max_packed_sequences"].startswith("The most sequences that one pack holds")


def test_what_the_cpu_device_looks_at_are_arguments_of_stocks():
    """A name that upstream renames would be passed over in silence."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    arguments.upstream.add_megatron_arguments(parser)
    names = {action.dest for action in parser._actions}
    options = {option for action in parser._actions for option in action.option_strings}
    looked_at = [name for name, _ in cpu_arguments.SETTINGS]
    looked_at += [name for name, _, _ in cpu_arguments.GPU_ONLY]
    assert set(looked_at) - names == set()
    assert {flag for _, _, flag in cpu_arguments.GPU_ONLY} - options == set()


SMALL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1 "
    "--max-position-embeddings 32 --train-iters 1 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 127"
).split()


def _validated(monkeypatch, *flags: str) -> argparse.Namespace:
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *SMALL, *flags])
    monkeypatch.setenv("WORLD_SIZE", "1")
    args = arguments.parse_args()
    arguments.validate_args(args)
    return args


def test_cpu_device_sets_what_stocks_defaults_get_wrong(monkeypatch):
    args = _validated(monkeypatch)
    assert args.device == "auto"
    assert args.distributed_backend == "gloo"
    assert args.transformer_impl == "local"
    assert args.no_persist_layer_norm
    assert not args.gradient_accumulation_fusion
    assert not args.masked_softmax_fusion
    assert not args.apply_rope_fusion


@pytest.mark.parametrize(
    "flags, names",
    [
        (["--cuda-graph-impl", "local"], ["--cuda-graph-impl (cuda_graph_impl='local')"]),
        (["--fp8-format", "hybrid", "--tp-comm-overlap"], ["--fp8-format", "--tp-comm-overlap"]),
        (["--use-megatron-fsdp"], ["--use-megatron-fsdp"]),
    ],
)
def test_cpu_device_refuses_what_needs_a_gpu_all_in_one_error(monkeypatch, flags, names):
    with pytest.raises(ValueError, match="the CPU device cannot do") as error:
        _validated(monkeypatch, *flags)
    for name in names:
        assert name in str(error.value)


def test_device_cuda_is_refused_once_the_cpu_device_is_on(monkeypatch):
    with pytest.raises(ValueError, match="--device cuda: this process was started on the CPU"):
        _validated(monkeypatch, "--device", "cuda")


def test_without_gpu_and_cpu_device_the_error_says_what_to_do(monkeypatch):
    monkeypatch.setattr(arguments.cpu, "active", lambda: False)
    with pytest.raises(ValueError, match="--device cuda: this machine has no GPU .* --device cpu"):
        _validated(monkeypatch, "--device", "cuda")
