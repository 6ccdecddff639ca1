"""Timelines of ranks, and what a report says of them."""

import json

import pytest
import torch

from megatron.core.pipeline_parallel import startup_timeline
from megatron.core.pipeline_parallel.startup_timeline import (
    Compilation,
    Span,
    StartupReport,
    Timeline,
)

GIB = 2**30


def compute(name, start, end, chunk=None, gib=None, phase="prewarm"):
    peak = None if gib is None else int(gib * GIB)
    return Span(name, "compute", start, end, phase, chunk, peak)


def wait(name, start, end, phase="prewarm"):
    return Span(name, "wait", start, end, phase)


def report():
    """Stage 0 with two ranks and two chunks each, stage 1 with one rank; times to be added exactly."""
    first = Timeline(0, 0, 100.0)
    first.spans = [
        compute("collectives", 100.5, 101.0),
        compute("chunk 0 forward", 101.0, 103.0, 0, 1.5),
        compute("chunk 0 backward", 103.0, 104.0, 0, 2.0),
        compute("chunk 1 forward", 104.0, 104.5, 1),
        compute("chunk 1 backward", 104.5, 104.75, 1),
        wait("other stages", 104.75, 107.5),
        wait("send/receive", 108.25, 109.0, "iteration"),
        compute("iteration 1", 108.0, 110.0, phase="iteration"),
    ]
    first.compilations = [
        Compilation("NVRTC", "early", 100.0, 100.25),  # in no span
        Compilation("torch.compile", "swiglu", 101.25, 102.0),
        Compilation("torch.compile", "gelu", 102.0, 102.5),
        Compilation("Triton", "_fwd", 103.0, 103.5),
        Compilation("torch.compile", "adam", 109.0, 109.5),
        Compilation("torch.compile", "adam", 109.5, 109.75),
    ]
    second = Timeline(1, 0, 100.5)
    second.spans = [
        compute("collectives", 100.5, 101.25),
        compute("chunk 0 forward", 101.25, 102.25, 0, 1.75),
        compute("chunk 0 backward", 102.25, 104.25, 0, 1.0),
        compute("chunk 1 forward", 104.25, 104.5, 1),
        compute("chunk 1 backward", 104.5, 105.0, 1),
        wait("other stages", 105.0, 107.5),
        compute("iteration 1", 108.0, 110.0, phase="iteration"),
    ]
    second.compilations = [
        Compilation("torch.compile", "swiglu", 101.5, 103.0),
        Compilation("Triton", "_fwd", 103.0, 103.25),
        Compilation("Triton", "_bwd", 103.25, 103.5),
        Compilation("torch.compile", "adam", 109.0, 109.25),
        Compilation("torch.compile", "clip", 108.0, 109.0),
    ]
    third = Timeline(2, 1, 100.25)
    third.spans = [
        compute("chunk 0 forward", 101.0, 107.0, 0, 3.0),
        wait("other stages", 107.0, 107.5),
        compute("iteration 1", 108.0, 110.0, phase="iteration"),
    ]
    third.compilations = [
        Compilation("torch.compile", "adam", 109.0, 109.25),
        Compilation("CuTe DSL", "Indexer", 107.75, 108.5),  # began before the iteration
    ]
    return StartupReport(True, [first, second, third])


def test_the_table_has_the_largest_figure_of_a_stages_ranks_and_never_their_sum():
    assert report().prewarm_table().splitlines() == [
        "stage  chunk  forward (s)  backward (s)  collectives (s)  other stages (s)  peak (GiB)  compiled",
        "    0      0         2.00          2.00                -                 -        2.00"
        "  2 torch.compile 1.50 s, 2 Triton 0.50 s",
        "    0      1         0.50          0.50                -                 -           -  -",
        "    0      -            -             -             0.75              2.75           -"
        "  1 NVRTC 0.25 s",
        "    1      0         6.00             -                -                 -        3.00  -",
        "    1      -            -             -                -              0.50           -"
        "  1 CuTe DSL 0.75 s",
        # From the earliest start, 100.0, to 107.5. Stage 0's busiest rank worked 4.5 s.
        "prewarm 7.50 s; slowest stage 1, 6.00 s; prewarm / slowest stage 1.25",
    ]


def test_a_report_without_prewarm_has_no_table():
    timeline = Timeline(0, 0, 1.0)
    timeline.spans.append(compute("iteration 1", 1.0, 2.0, phase="iteration"))
    timeline.compilations.append(Compilation("Triton", "_fwd", 0.5, 0.75))
    assert StartupReport(False, [timeline]).prewarm_table() == "No rank recorded a prewarm."


def test_leftovers_are_what_began_in_the_iteration_the_longest_first():
    assert report().leftovers() == [
        "torch.compile clip: up to 1.00 s, 1 rank of 1 stage",
        "torch.compile adam: up to 0.75 s in 2 compilations, 3 ranks of 2 stages",
    ]


def test_without_an_iteration_nothing_is_left_over():
    timeline = Timeline(0, 0, 1.0, compilations=[Compilation("Triton", "_fwd", 1.0, 2.0)])
    assert StartupReport(True, [timeline]).leftovers() == []


def test_a_report_survives_json(tmp_path):
    path = tmp_path / "report.json"
    before = report()
    before.write(path)
    assert StartupReport.read(path) == before
    data = json.loads(path.read_text())
    assert (data["format"], data["prewarm"], len(data["ranks"])) == (1, True, 3)
    assert data["ranks"][1]["spans"][1] == {
        "name": "chunk 0 forward",
        "kind": "compute",
        "start": 101.25,
        "end": 102.25,
        "phase": "prewarm",
        "chunk": 0,
        "peak_bytes": 1.75 * GIB,
    }
    before.timelines[2].compilations.pop()
    assert StartupReport.read(path) != before


@pytest.mark.parametrize("content, version", [('{"format": 2}', "2"), ("[]", "None")])
def test_another_file_is_refused(tmp_path, content, version):
    path = tmp_path / "report.json"
    path.write_text(content)
    message = f"report.json: format={version}, expected 1. Give a file that --pipeline-prewarm"
    with pytest.raises(ValueError, match=message):
        StartupReport.read(path)


class Clock:
    """Stands in for the module ``time`` of startup_timeline: a second passes with every look."""

    def __init__(self):
        self.now = 0.0

    def time(self):
        self.now += 1.0
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(startup_timeline, "time", clock)
    return clock


def test_spans_are_recorded_as_they_end_also_when_the_body_raises(clock):
    timeline = Timeline(3, 1, 0.0)
    with pytest.raises(KeyError, match="body"):
        with timeline.span("iteration 1", phase="iteration"):
            with timeline.span("send/receive", phase="iteration", kind="wait"):
                pass
            with timeline.span("chunk 2 forward", phase="iteration", chunk=2):
                raise KeyError("body")
    assert timeline.spans == [
        Span("send/receive", "wait", 2.0, 3.0, "iteration"),
        Span("chunk 2 forward", "compute", 4.0, 5.0, "iteration", 2),
        Span("iteration 1", "compute", 1.0, 6.0, "iteration"),
    ]


@pytest.fixture
def gpu(monkeypatch):
    """A GPU's memory statistics; ``gpu.allocate`` is what a body does."""

    class Gpu:
        peak = 0

        def allocate(self, peak):
            self.peak = max(self.peak, peak)

        def reset(self):
            self.peak = 0

    gpu = Gpu()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: gpu.peak)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", gpu.reset)
    return gpu


def test_a_span_waits_for_the_gpu_only_if_asked_and_if_the_body_ended_well(gpu, clock, monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: setattr(clock, "now", clock.now + 100))
    timeline = Timeline(0, 0, 0.0)
    with timeline.span("chunk 0 forward", phase="prewarm"):
        pass
    with timeline.span("chunk 0 forward", phase="prewarm", synchronize=True):
        pass
    with pytest.raises(KeyError), timeline.span("failed", phase="prewarm", synchronize=True):
        raise KeyError
    assert [span.end - span.start for span in timeline.spans] == [1.0, 101.0, 1.0]


def test_every_compute_span_has_its_own_peak_and_those_within_it(gpu):
    timeline = Timeline(0, 0, 0.0)
    gpu.allocate(900)  # before all spans
    with timeline.span("outer", phase="prewarm"):
        gpu.allocate(30)
        with timeline.span("inner", phase="prewarm"):
            gpu.allocate(20)
            with timeline.span("wait", phase="prewarm", kind="wait"):
                pass
        with timeline.span("larger", phase="prewarm"):
            gpu.allocate(25)
    with timeline.span("next", phase="prewarm"):
        gpu.allocate(10)
        with timeline.span("largest", phase="prewarm"):
            gpu.allocate(70)
    with timeline.span("third", phase="prewarm"), timeline.span("second", phase="prewarm"):
        gpu.allocate(80)
        with timeline.span("first", phase="prewarm"):
            gpu.allocate(5)
    assert {span.name: span.peak_bytes for span in timeline.spans} == {
        "wait": None,
        "inner": 20,
        "larger": 25,
        "outer": 30,
        "largest": 70,
        "next": 70,
        "first": 5,
        "second": 80,
        "third": 80,
    }


def test_a_timeline_records_compilations_by_phase():
    def prewarmed(x):
        return x.sin()

    def late(x):
        return x.cos()

    torch._dynamo.reset()
    timeline = Timeline(0, 0)
    x = torch.ones(3, requires_grad=True)
    function = torch.compile(prewarmed, backend="aot_eager")
    with timeline.watch_compilations():
        with timeline.span("chunk 0 forward", phase="prewarm", chunk=0):
            output = function(x).sum()
        with timeline.span("chunk 0 backward", phase="prewarm", chunk=0):
            output.backward()
    torch.compile(late, backend="eager", dynamic=False)(torch.ones(4))  # nobody watches
    with timeline.watch_compilations(), timeline.span("iteration 1", phase="iteration"):
        function(x).sum().backward()
        torch.compile(late, backend="eager", dynamic=False)(torch.ones(5))
    places = {
        function.__name__: f"(test_startup_timeline.py:{function.__code__.co_firstlineno})"
        for function in (prewarmed, late)
    }
    assert [(one.kind, one.name) for one in timeline.compilations] == [
        ("torch.compile", f"prewarmed {places['prewarmed']}"),
        ("torch.compile", f"prewarmed backward {places['prewarmed']}"),
        ("torch.compile", f"late {places['late']}"),
    ]
    read = StartupReport(True, [Timeline.from_dict(json.loads(json.dumps(timeline.to_dict())))])
    assert read.timelines == [timeline]
    (left,) = read.leftovers()
    assert left.startswith(f"torch.compile late {places['late']}: up to ")
    assert read.prewarm_table().splitlines()[1].split()[-4:-2] == ["2", "torch.compile"]
    torch._dynamo.reset()
