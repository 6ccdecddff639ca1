"""The flags of pipeline prewarm, and when the training loop runs it."""

from argparse import Namespace
from types import SimpleNamespace

import pytest

from megatron.core.pipeline_parallel import parallel_prewarm
from megatron.core.process_groups_config import MultiModuleProcessGroupCollection
from megatron.training import pipeline_prewarm, training
from megatron.training.arguments import parse_args

MODEL, CONFIG = [object()], object()


def args(**changes):
    found = dict(
        pipeline_prewarm=True,
        pipeline_prewarm_report=None,
        pipeline_prewarm_skip=["p2p"],
        distributed_timeout_minutes=3,
        rank=0,
        iteration=0,
        train_iters=5,
        skip_train=False,
        seq_length=32,
        micro_batch_size=2,
        eval_micro_batch_size=4,
        do_valid=True,
        do_test=False,
        dataloader_inter_document_masking=False,
        sft=False,
        create_attention_mask_in_dataloader=True,
    )
    return Namespace(**{**found, **changes})


@pytest.fixture
def train(monkeypatch, single_rank):
    """Calls the training loop's ``train`` over a stub of stock's; returns what happened, in order."""
    happened = []

    def stock(
        forward_step_func,
        model,
        optimizer,
        opt_param_scheduler,
        train_data_iterator,
        valid_data_iterator,
        process_non_loss_data_func,
        config,
        checkpointing_context,
        non_loss_data_func,
        pg_collection=None,
    ):
        happened.append(("train", forward_step_func, train_data_iterator, pg_collection))
        return "result"

    def prewarm(model, config, **keywords):
        happened.append(("prewarm", model, config, keywords))

    monkeypatch.setattr(training.upstream, "train", stock)
    monkeypatch.setattr(parallel_prewarm, "prewarm", prewarm)
    monkeypatch.setattr("megatron.core.num_microbatches_calculator.get_num_microbatches", lambda: 6)

    def call(arguments, optimizer=object(), **keywords):
        monkeypatch.setattr(pipeline_prewarm.global_vars, "get_args", lambda: arguments)
        rest = ("step", MODEL, optimizer, None, "data", None, None, CONFIG, None, None)
        assert training.train(*rest, **keywords) == "result"
        return happened

    return call


def test_it_runs_once_before_the_loop_with_the_runs_sizes(train):
    (name, model, config, keywords), after = train(args())
    assert after == ("train", "step", "data", None)
    assert (name, model, config) == ("prewarm", MODEL, CONFIG)
    expected = dict(
        seq_length=32,
        micro_batch_size=2,
        num_microbatches=6,
        packing=None,
        attention_mask=True,
        evaluation_micro_batch_size=4,
        skip=["p2p"],
        unsupported=None,
    )
    assert {name: keywords[name] for name in expected} == expected
    assert keywords["timeout"].total_seconds() == 180


def test_packs_and_runs_without_evaluation_are_told(train):
    (_, _, _, keywords), _ = train(args(dataloader_inter_document_masking=True, do_valid=False))
    assert keywords["packing"] is not None and keywords["packing"].entries is None
    assert keywords["evaluation_micro_batch_size"] is None


@pytest.mark.parametrize(
    "changes, keywords",
    [
        (dict(pipeline_prewarm=False), {}),
        (dict(iteration=5), {}),
        (dict(skip_train=True), {}),
        ({}, dict(optimizer=None)),
    ],
    ids=["flag-off", "nothing-left", "skip-train", "no-optimizer"],
)
def test_it_does_not_run(train, changes, keywords):
    assert [what[0] for what in train(args(**changes), **keywords)] == ["train"]


@pytest.mark.parametrize("flag", ["use_megatron_fsdp", "use_torch_fsdp2", "modelopt_enabled"])
def test_flags_that_it_cannot_serve_are_its_reason(train, flag):
    (_, _, _, keywords), _ = train(args(**{flag: True}))
    assert keywords["unsupported"] == f"{flag}=True is not supported"


def test_several_modules_are_its_reason(train):
    groups = MultiModuleProcessGroupCollection.__new__(MultiModuleProcessGroupCollection)
    (_, _, _, keywords), after = train(args(), pg_collection=groups)
    assert keywords["unsupported"].startswith("several modules") and after[-1] is groups


def test_only_the_first_step_is_watched(monkeypatch):
    watched = []
    monkeypatch.setattr(training.upstream, "train_step", lambda *args: watched.append(args))
    watching = SimpleNamespace(iteration=lambda: _noting(watched))
    monkeypatch.setattr(pipeline_prewarm, "_startup", watching)
    training.train_step(1)
    training.train_step(2)
    assert watched == ["begin", (1,), "end", (2,)]


class _noting:
    def __init__(self, seen):
        self.seen = seen

    def __enter__(self):
        self.seen.append("begin")

    def __exit__(self, *exception):
        self.seen.append("end")


def test_flags_are_off_by_default_and_checked(monkeypatch, tmp_path):
    monkeypatch.setattr("sys.argv", ["train"])
    parsed = parse_args()
    assert parsed.pipeline_prewarm is False and parsed.pipeline_prewarm_report is None
    pipeline_prewarm.validate(args(pipeline_prewarm_report=str(tmp_path / "report.json")))
    with pytest.raises(ValueError, match="--pipeline-prewarm-skip p2p without --pipeline-prewarm"):
        pipeline_prewarm.validate(args(pipeline_prewarm=False))
    with pytest.raises(ValueError, match="its folder does not exist"):
        pipeline_prewarm.validate(args(pipeline_prewarm_report=str(tmp_path / "no" / "report")))
