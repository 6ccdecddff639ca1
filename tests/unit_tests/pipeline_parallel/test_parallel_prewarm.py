"""Prewarm of real model chunks on one rank: which passes are run, in which order, and when none is."""

import logging
import re

import pytest
import torch

from megatron.core.pipeline_parallel import parallel_prewarm, schedules
from megatron.core.pipeline_parallel.parallel_prewarm import prewarm
from tests.unit_tests.pipeline_parallel.model_chunks import build, model_of

pytestmark = pytest.mark.usefixtures("fresh_process")
SIZES = dict(seq_length=16, micro_batch_size=2)


@pytest.fixture
def forwards(monkeypatch):
    """The chunks that a pass went through, each with whether it trained and whether gradients were on."""
    seen = []
    forward_step = schedules.forward_step

    def noting(function, iterator, chunk, *args, **kwargs):
        assert iterator is None
        seen.append((chunk, chunk.training, torch.is_grad_enabled()))
        return forward_step(function, iterator, chunk, *args, **kwargs)

    monkeypatch.setattr(schedules, "forward_step", noting)
    return seen


@pytest.fixture
def backwards(monkeypatch):
    seen = []
    backward = torch.autograd.backward
    monkeypatch.setattr(
        torch.autograd, "backward", lambda *args: (seen.append(args), backward(*args))[1]
    )
    return seen


def test_every_chunk_runs_once_each_way_in_order_then_as_in_evaluation(forwards, backwards):
    chunks = build("moe")
    timeline = prewarm(chunks, chunks[0].config, **SIZES, evaluation_micro_batch_size=4)
    assert forwards == [
        *((chunk, True, True) for chunk in chunks),
        *((chunk, False, False) for chunk in chunks),
    ]
    assert len(backwards) == 3
    assert [span.name for span in timeline.spans] == [
        "collectives",
        *(f"chunk {index} {way}" for index in range(3) for way in ("forward", "backward")),
        *(f"chunk {index} evaluation" for index in range(3)),
        "other stages",
    ]


def test_steps_that_are_skipped_are_not_run(forwards):
    (chunk,) = build("moe", ["middle"])
    skip = ("collectives", "evaluation")
    timeline = prewarm(chunk, chunk.config, **SIZES, evaluation_micro_batch_size=2, skip=skip)
    assert len(forwards) == 1
    names = [span.name for span in timeline.spans]
    assert names == ["chunk 0 forward", "chunk 0 backward", "other stages"]


def test_a_step_that_does_not_exist_is_refused():
    (chunk,) = build("moe", ["middle"])
    with pytest.raises(ValueError, match=r"skip=\['p3p'\].*collectives, p2p, evaluation"):
        prewarm(chunk, chunk.config, **SIZES, skip=["p3p"])


def test_passes_use_no_communication_of_the_pipelines(monkeypatch):
    def refused(*args, **kwargs):
        raise AssertionError("a stage spoke to another")

    for name in ("isend", "irecv", "send", "recv", "batch_isend_irecv"):
        monkeypatch.setattr(torch.distributed, name, refused)
    chunks = build("dsa mtp")
    groups = model_of(chunks[0]).pg_collection
    across = [groups.pp, groups.mp, groups.embd]
    used = []
    all_reduce = torch.distributed.all_reduce

    def noting(tensor, *args, group=None, **kwargs):
        used.append(group)
        return all_reduce(tensor, *args, group=group, **kwargs)

    monkeypatch.setattr(torch.distributed, "all_reduce", noting)
    prewarm(chunks, chunks[0].config, **SIZES, skip=["collectives"])
    assert not any(group is other for group in used for other in across)
    prewarm(chunks, chunks[0].config, **SIZES)
    assert any(group is groups.mp for group in used)  # else nothing was seen above


def test_every_output_gets_a_gradient_and_a_frozen_chunk_none(monkeypatch):
    (chunk,) = build("moe", ["middle"])
    inputs = [torch.ones(3, requires_grad=True) for _ in range(2)]
    outputs = {"first": inputs[0] * 2, "more": [inputs[1] * 3, torch.ones(1)]}
    monkeypatch.setattr(parallel_prewarm._Warmer, "_forward", lambda *args: outputs)
    prewarm(chunk, chunk.config, **SIZES)
    assert all(value.grad.abs().min() > 0 for value in inputs)
    monkeypatch.setattr(parallel_prewarm._Warmer, "_forward", lambda *args: torch.ones(2))
    assert prewarm(chunk, chunk.config, **SIZES) is not None


def hook(chunk):
    model_of(chunk).output_layer.register_forward_hook(lambda *args: None)


def rotate_images(chunk):
    model_of(chunk).position_embedding_type = "mrope"


def field(name, value):
    return pytest.param(lambda chunk: setattr(chunk.config, name, value), name, id=name)


@pytest.mark.parametrize(
    "change, reason",
    [
        field("hybrid_context_parallel", True),
        field("delay_wgrad_compute", True),
        field("cpu_offloading", True),
        field("gtp_weight_remat_size", 2),
        field("expert_gtp_weight_remat_size", 2),
        field("config_logger_dir", "logs"),
        pytest.param(hook, "a forward hook on .*output_layer", id="hook"),
        pytest.param(rotate_images, "mrope", id="mrope"),
    ],
)
def test_what_cannot_be_warmed_is_skipped_with_the_reason(forwards, caplog, change, reason):
    (chunk,) = build("moe", ["last"])
    change(chunk)
    with caplog.at_level(logging.WARNING):
        assert prewarm(chunk, chunk.config, **SIZES) is None
    assert forwards == []
    (message,) = (
        record.getMessage() for record in caplog.records if "prewarm" in record.getMessage()
    )
    assert re.search(reason, message)


def test_other_models_and_other_wrappers_are_skipped(caplog):
    (chunk,) = build("moe", ["middle"])

    class ShardedFSDP(type(chunk)):
        pass

    chunk.__class__ = ShardedFSDP
    assert prewarm(chunk, chunk.config, **SIZES) is None
    assert "ShardedFSDP shards parameters" in caplog.text
    linear = torch.nn.Linear(2, 2)
    linear.pg_collection = model_of(chunk).pg_collection
    assert prewarm(linear, chunk.config, **SIZES) is None
    assert "Linear is neither a GPT nor a hybrid model" in caplog.text
