"""Waits in the exchanges between pipeline stages."""

import time

import pytest
import torch

from megatron.core.pipeline_parallel import exchange_waits
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.startup_timeline import Timeline

PAUSE = 0.05  # seconds


class Work:
    rank = 7

    def wait(self, *args):
        time.sleep(PAUSE)
        return args


def test_waits_at_once_and_later_are_recorded_and_short_ones_not(monkeypatch):
    def communicate(self, *, wait_on_reqs=True):
        if wait_on_reqs:
            time.sleep(PAUSE)
        return torch.ones(1), None, None if wait_on_reqs else {"recv_prev": Work()}

    monkeypatch.setattr(P2PCommunicator, "_communicate", communicate)
    pipeline = P2PCommunicator.__new__(P2PCommunicator)
    timeline = Timeline(0, 0)
    before = time.time()
    with exchange_waits.recorded(timeline):
        received, _, requests = pipeline._communicate()
        assert received == 1 and requests is None
        *_, requests = pipeline._communicate(wait_on_reqs=False)
        assert requests["recv_prev"].rank == 7  # all else is the request's own
        assert requests["recv_prev"].wait(1) == (1,)
    after = time.time()
    assert P2PCommunicator._communicate is communicate
    first, second = timeline.spans
    for span in (first, second):
        assert (span.name, span.kind, span.phase) == ("send/receive", "wait", "iteration")
        assert span.end - span.start >= PAUSE * 0.9
    assert before - 1e-3 <= first.start < first.end <= second.start < second.end <= after + 1e-3


def test_an_exception_leaves_no_recorder():
    communicate = P2PCommunicator._communicate
    with pytest.raises(KeyError), exchange_waits.recorded(Timeline(0, 0)):
        raise KeyError
    assert P2PCommunicator._communicate is communicate
