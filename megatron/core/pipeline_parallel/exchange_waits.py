"""How long a pipeline stage waits for others while it exchanges activations and gradients with them."""

import contextlib
import time
from typing import Any, Iterator

import torch

from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.startup_timeline import Span, Timeline

SHORTEST = 1e-3  # seconds; what is shorter is no wait for another stage


class _Work:
    """A request that is waited for later, with its wait recorded."""

    def __init__(self, work: Any, waits: "_Waits"):
        self._work = work
        self._waits = waits

    def wait(self, *args: Any) -> Any:
        with self._waits.one():
            return self._work.wait(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


class _Waits:
    """Begin and end of every wait, as events on the current stream: nothing is held up by measuring.

    An event is passed when the stage's own work before it is done, and not before the host has recorded it. So
    a wait of the stream counts, one of the host too, and kernels of the stage itself do not.
    """

    def __init__(self) -> None:
        self.events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        torch.cuda.synchronize()
        self.anchor, self.anchored = _event(), time.time()

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """Records the body as a wait."""
        before = _event()
        yield
        self.events.append((before, _event()))

    def spans(self) -> list[Span]:
        """The waits, as spans of the iteration."""
        torch.cuda.synchronize()
        times = [
            tuple(self.anchored + 1e-3 * self.anchor.elapsed_time(event) for event in pair)
            for pair in self.events
        ]
        return [
            Span("send/receive", "wait", start, end, "iteration")
            for start, end in times
            if end - start >= SHORTEST
        ]


@contextlib.contextmanager
def recorded(timeline: Timeline) -> Iterator[None]:
    """Adds to ``timeline`` the waits in all exchanges of the body."""
    communicate = P2PCommunicator._communicate
    waits = _Waits()

    def recording(*args: Any, wait_on_reqs: bool = True, **kwargs: Any) -> Any:
        with waits.one():
            received = communicate(*args, wait_on_reqs=wait_on_reqs, **kwargs)
        *tensors, requests = received
        if isinstance(requests, dict):
            requests = {name: _Work(work, waits) for name, work in requests.items()}
        return (*tensors, requests)

    setattr(P2PCommunicator, "_communicate", recording)
    try:
        yield
    finally:
        setattr(P2PCommunicator, "_communicate", communicate)
        timeline.spans += waits.spans()


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
