"""What every rank did from the start of training to the end of its first iteration, and when.

A ``Timeline`` is one rank's, a ``StartupReport`` all ranks'. All times are ``time.time()``, seconds since the epoch,
so that ranks can be compared as far as their nodes' clocks agree.
"""

import contextlib
import dataclasses
import json
import math
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ContextManager, Iterator

import torch

from megatron.core.pipeline_parallel.compile_events import Compilation, CompilationWatch

__all__ = ["Compilation", "Span", "StartupReport", "Timeline"]

FORMAT = 1


@dataclass(frozen=True)
class Span:
    """One thing that a rank did.

    Attributes:
        name: "chunk 0 forward", "collectives", "iteration 1", ...
        kind: "compute", or "wait" for other ranks. Waits and compilations may lie within a compute span.
        start: Seconds since the epoch.
        end: Seconds since the epoch.
        phase: "prewarm" or "iteration".
        chunk: The model chunk's index on this rank, if the span is about one.
        peak_bytes: The most memory that PyTorch had allocated on the GPU meanwhile; None where that was not measured.
    """

    name: str
    kind: str
    start: float
    end: float
    phase: str
    chunk: int | None = None
    peak_bytes: int | None = None


@dataclass
class Timeline:
    """What one rank did and compiled.

    Attributes:
        rank: Global rank.
        stage: Pipeline stage.
        started: When the timeline was made, seconds since the epoch.
    """

    rank: int
    stage: int
    started: float = field(default_factory=time.time)
    spans: list[Span] = field(default_factory=list)
    compilations: list[Compilation] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._watch = CompilationWatch(self.compilations)
        self._peaks: list[int] = []  # of the open spans, before the latest reset

    @contextlib.contextmanager
    def span(
        self,
        name: str,
        *,
        phase: str,
        kind: str = "compute",
        chunk: int | None = None,
        synchronize: bool = False,
    ) -> Iterator[None]:
        """Records the body as a Span, also if it raises.

        Compute spans on a GPU measure its memory, for which they reset ``torch.cuda``'s peak statistics.

        Args:
            name, phase, kind, chunk: See Span.
            synchronize: Whether the span lasts until the GPU is done.
        """
        measured = kind == "compute" and torch.cuda.is_available()
        if measured:
            if self._peaks:  # a span around this one wants the peak until now too
                self._peaks[-1] = max(self._peaks[-1], torch.cuda.max_memory_allocated())
            torch.cuda.reset_peak_memory_stats()
            self._peaks.append(0)
        start = time.time()
        try:
            yield
            if synchronize and torch.cuda.is_available():
                torch.cuda.synchronize()
        finally:
            end = time.time()
            peak = None
            if measured:
                peak = max(self._peaks.pop(), torch.cuda.max_memory_allocated())
                if self._peaks:
                    self._peaks[-1] = max(self._peaks[-1], peak)
            self.spans.append(Span(name, kind, start, end, phase, chunk, peak))

    def watch_compilations(self) -> ContextManager[Any]:
        """A context manager that records what any thread compiles while it is active; may be nested."""
        return self._watch

    def to_dict(self) -> dict[str, Any]:
        """All of it, as JSON takes it."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Timeline":
        """The timeline that ``to_dict`` made ``data`` from."""
        spans = [Span(**span) for span in data["spans"]]
        compilations = [Compilation(**compilation) for compilation in data["compilations"]]
        return cls(**{**data, "spans": spans, "compilations": compilations})


@dataclass
class _Row:
    """A line of the table: a model chunk, or what belongs to none."""

    steps: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # seconds
    counts: dict[str, int] = field(default_factory=lambda: defaultdict(int))  # by kind
    compiling: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # seconds
    peak_bytes: int = 0

    def take_max(self, other: "_Row") -> None:
        """Merges another rank's line."""
        for name in ("steps", "counts", "compiling"):
            mine = getattr(self, name)
            for key, value in getattr(other, name).items():
                mine[key] = max(mine[key], value)
        self.peak_bytes = max(self.peak_bytes, other.peak_bytes)


@dataclass
class StartupReport:
    """The timelines of all ranks of a run, with prewarm or without."""

    prewarm: bool
    timelines: list[Timeline]

    def write(self, path: str | Path) -> None:
        """Writes the report as JSON."""
        ranks = [timeline.to_dict() for timeline in self.timelines]
        report = {"format": FORMAT, "prewarm": self.prewarm, "ranks": ranks}
        Path(path).write_text(json.dumps(report) + "\n")

    @classmethod
    def read(cls, path: str | Path) -> "StartupReport":
        """Reads what ``write`` wrote.

        Raises:
            ValueError: the file holds something else.
        """
        report = json.loads(Path(path).read_text())
        version = report.get("format") if isinstance(report, dict) else None
        if version != FORMAT:
            raise ValueError(
                f"{path}: format={version!r}, expected {FORMAT}. Give a file that --pipeline-prewarm-report wrote."
            )
        return cls(report["prewarm"], [Timeline.from_dict(rank) for rank in report["ranks"]])

    def prewarm_table(self) -> str:
        """Seconds, compilations and peak memory of the prewarm, by stage and chunk.

        The ranks of a stage share their lines, and the largest figure counts. A line without a chunk holds what is
        about none. The last line compares the prewarm's length, from the start of training, with the time that
        the busiest rank of the slowest stage worked: 1 is perfect, the number of stages no gain.
        """
        ends = [span.end for timeline in self.timelines for span in _prewarm(timeline)]
        if not ends:
            return "No rank recorded a prewarm."
        rows: dict[tuple[int, float], _Row] = defaultdict(_Row)
        work: dict[int, float] = defaultdict(float)  # by stage
        for timeline in self.timelines:
            for chunk, row in _prewarm_rows(timeline).items():
                rows[timeline.stage, math.inf if chunk is None else chunk].take_max(row)
            own = sum(s.end - s.start for s in _prewarm(timeline) if s.kind != "wait")
            work[timeline.stage] = max(work[timeline.stage], own)
        steps = list(dict.fromkeys(step for _, row in sorted(rows.items()) for step in row.steps))
        table = [["stage", "chunk", *(f"{step} (s)" for step in steps), "peak (GiB)", "compiled"]]
        for (stage, index), row in sorted(rows.items()):
            cells = [str(stage), "-" if index == math.inf else str(index)]
            cells += [f"{row.steps[step]:.2f}" if step in row.steps else "-" for step in steps]
            cells.append(f"{row.peak_bytes / 2**30:.2f}" if row.peak_bytes else "-")
            kinds = [
                f"{count} {kind} {row.compiling[kind]:.2f} s" for kind, count in row.counts.items()
            ]
            table.append([*cells, ", ".join(kinds) or "-"])
        widths = [max(map(len, column)) for column in zip(*table)]
        lines = [
            "  ".join([cell.rjust(width) for cell, width in zip(cells[:-1], widths)] + cells[-1:])
            for cells in table
        ]
        total = max(ends) - min(timeline.started for timeline in self.timelines)
        slowest = max(work, key=lambda stage: work[stage])
        last = f"prewarm {total:.2f} s; slowest stage {slowest}, {work[slowest]:.2f} s"
        if work[slowest] > 0:
            last += f"; prewarm / slowest stage {total / work[slowest]:.2f}"
        return "\n".join([*lines, last])

    def leftovers(self) -> list[str]:
        """What was compiled in the first iteration, or after it: a line per name, those that took longest first."""
        durations: dict[tuple[str, str], dict[int, list[float]]]
        durations = defaultdict(lambda: defaultdict(list))
        for timeline in self.timelines:
            begun = _iteration_start(timeline)
            for one in timeline.compilations:
                if one.start >= begun:
                    durations[one.kind, one.name][timeline.rank].append(one.end - one.start)
        stages = {timeline.rank: timeline.stage for timeline in self.timelines}
        found = []
        for (kind, name), by_rank in durations.items():
            longest = max(map(sum, by_rank.values()))
            most = max(map(len, by_rank.values()))
            times = f" in {most} compilations" if most > 1 else ""
            where = f"{_count(len(by_rank), 'rank')} of {_count(len({stages[rank] for rank in by_rank}), 'stage')}"
            found.append((longest, f"{kind} {name}: up to {longest:.2f} s{times}, {where}"))
        return [line for _, line in sorted(found, key=lambda item: -item[0])]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _prewarm(timeline: Timeline) -> list[Span]:
    return [span for span in timeline.spans if span.phase == "prewarm"]


def _iteration_start(timeline: Timeline) -> float:
    """When the rank's first iteration began; infinity if it did not."""
    starts = [span.start for span in timeline.spans if span.phase == "iteration"]
    return min(starts, default=math.inf)


def _prewarm_rows(timeline: Timeline) -> dict[int | None, _Row]:
    """One rank's lines, by chunk; a compilation belongs to the chunk in whose span it began."""
    rows: dict[int | None, _Row] = defaultdict(_Row)
    spans = _prewarm(timeline)
    for span in spans:
        step = span.name.removeprefix(f"chunk {span.chunk} ")
        rows[span.chunk].steps[step] += span.end - span.start
        rows[span.chunk].peak_bytes = max(rows[span.chunk].peak_bytes, span.peak_bytes or 0)
    for one in timeline.compilations:
        if one.start < _iteration_start(timeline):
            chunks = [s.chunk for s in spans if s.start <= one.start <= s.end]
            chunk = next((chunk for chunk in chunks if chunk is not None), None)
            rows[chunk].counts[one.kind] += 1
            rows[chunk].compiling[one.kind] += one.end - one.start
    return rows
