"""Draws what every rank did from the start of training to the end of its first iteration.

    python tools/plot_startup.py without.json with.json --output startup.png

A REPORT is what training wrote for --pipeline-prewarm-report. Each is a panel: a row per rank, time from the
earliest rank's start. Where a rank compiled while it computed or waited, the row shows the compilation; where it
waited during a longer step, the wait. Blank is time for which nothing was recorded.
"""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterable

import matplotlib

matplotlib.use('Agg')

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.patches import Patch

# From the background to the front.
COLORS = {'compute': '#0072b2', 'wait': '#c3cad2', 'compile': '#e8601c'}
PREWARM_COLOR = '#fff3cc'

Interval = tuple[float, float]


@dataclass(frozen=True)
class Row:
    """One rank: by kind of ``COLORS``, when it did that, in seconds since the start-up began."""

    rank: int
    stage: int
    intervals: dict[str, list[Interval]]

    def seconds(self) -> dict[str, float]:
        """The time that shows in each colour."""
        visible, covered = {}, 0.0
        in_front: list[Interval] = []
        for kind in reversed(COLORS):
            in_front += self.intervals[kind]
            visible[kind] = length(in_front) - covered
            covered += visible[kind]
        return visible


@dataclass(frozen=True)
class Startup:
    """One report.

    Attributes:
        prewarm: Whether the run was with prewarm.
        prewarm_end: When the last rank ended its prewarm, 0 without prewarm. Seconds since the start-up began.
        iteration_start: When the first rank began iteration 1.
        seconds: When the last rank ended iteration 1.
        rows: By stage and rank.
    """

    prewarm: bool
    prewarm_end: float
    iteration_start: float
    seconds: float
    rows: list[Row]

    @property
    def title(self) -> str:
        return 'with prewarm' if self.prewarm else 'without prewarm'

    def mean_seconds(self) -> dict[str, float]:
        """Mean over ranks of the time that shows in each colour."""
        rows = [row.seconds() for row in self.rows]
        return {kind: sum(row[kind] for row in rows) / len(rows) for kind in COLORS}


def length(intervals: Iterable[Interval]) -> float:
    """What the intervals cover together: time that lies in several counts once."""
    total, end = 0.0, float('-inf')
    for start, stop in sorted(intervals):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def read_report(path: Path) -> Startup:
    """Reads a report.

    Raises:
        ValueError: the file is no report, or of a run that did not reach iteration 1.
    """
    try:
        report = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f'{path}: {error}. Give a file that --pipeline-prewarm-report wrote.')
    version = report.get('format') if isinstance(report, dict) else None
    if version != 1:
        raise ValueError(
            f'{path}: format={version!r}, expected 1. Give a file that --pipeline-prewarm-report wrote.'
        )
    ranks = sorted(report['ranks'], key=lambda rank: (rank['stage'], rank['rank']))
    spans = [span for rank in ranks for span in rank['spans']]
    iteration = [span for span in spans if span['phase'] == 'iteration']
    if not iteration:
        raise ValueError(
            f"{path}: no span of phase 'iteration' in {len(ranks)} ranks. Did the run end before iteration 1?"
        )
    begin = min(rank['started'] for rank in ranks)
    end = max(span['end'] for span in iteration)
    prewarm_ends = [span['end'] for span in spans if span['phase'] == 'prewarm']
    return Startup(
        prewarm=report['prewarm'],
        prewarm_end=max(prewarm_ends, default=begin) - begin,
        iteration_start=min(span['start'] for span in iteration) - begin,
        seconds=end - begin,
        rows=[_row(rank, begin, end) for rank in ranks],
    )


def _row(rank: dict[str, Any], begin: float, end: float) -> Row:
    """What a rank did between ``begin`` and ``end``."""
    intervals: dict[str, list[Interval]] = {kind: [] for kind in COLORS}
    for span in [*rank['spans'], *rank['compilations']]:
        # A compilation has no phase; its kind says which compiler.
        kind = span['kind'] if 'phase' in span else 'compile'
        start, stop = max(span['start'], begin), min(span['end'], end)
        if start < stop:
            intervals[kind].append((start - begin, stop - begin))
    return Row(rank['rank'], rank['stage'], intervals)


def table(startups: list[Startup], names: list[str]) -> str:
    """A line per report: seconds of start-up, and of each colour as a mean over ranks."""
    width = max(len('report'), *map(len, names))
    kinds = list(reversed(COLORS))
    lines = [f'{"report":{width}}  prewarm  start-up' + ''.join(f'  {kind:>7}' for kind in kinds)]
    for startup, name in zip(startups, names):
        means = startup.mean_seconds()
        line = f'{name:{width}}  {"yes" if startup.prewarm else "no":7}  {startup.seconds:8.2f}'
        lines.append(line + ''.join(f'  {means[kind]:7.2f}' for kind in kinds))
    return '\n'.join(
        [*lines, f'Seconds, from the start of training; {", ".join(kinds)}: mean over ranks.']
    )


def plot(startups: list[Startup], output: Path) -> None:
    """Writes the panels, side by side, to the picture ``output``."""
    most = max(len(startup.rows) for startup in startups)
    height = 1.9 + most * min(0.5, max(0.14, 6 / most))  # inches
    same_rows = len({tuple((row.rank, row.stage) for row in s.rows) for s in startups}) == 1
    figure, panels = pyplot.subplots(
        1,
        len(startups),
        sharex=True,
        sharey=same_rows,
        squeeze=False,
        figsize=(1 + 6 * len(startups), height),
        layout='constrained',
    )
    for axes, startup in zip(panels[0], startups):
        _draw(axes, startup)
    panels[0, 0].set_xlim(0, 1.03 * max(startup.seconds for startup in startups))
    handles = [Patch(color=color, label=kind) for kind, color in reversed(COLORS.items())]
    if any(startup.prewarm for startup in startups):
        handles.append(Patch(facecolor=PREWARM_COLOR, edgecolor='0.7', label='prewarm'))
    figure.legend(handles=handles, loc='outside lower center', ncols=len(handles), frameon=False)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=150)
    pyplot.close(figure)


def _draw(axes: Axes, startup: Startup) -> None:
    rows = startup.rows
    shared = len({row.stage for row in rows}) < len(rows)  # stages of several ranks
    for position, row in enumerate(rows):
        for kind, color in COLORS.items():
            bars = [(start, end - start) for start, end in row.intervals[kind]]
            axes.broken_barh(bars, (position - 0.4, 0.8), facecolor=color, linewidth=0)
        if shared and position and row.stage != rows[position - 1].stage:
            axes.axhline(position - 0.5, color='0.8', linewidth=0.5, zorder=0)
    if startup.prewarm_end:
        axes.axvspan(0, startup.prewarm_end, color=PREWARM_COLOR, zorder=0, linewidth=0)
    for time in (startup.iteration_start, startup.seconds):
        axes.axvline(time, color='0.2', linewidth=1)
    axes.annotate(
        'iteration 1',
        (startup.iteration_start, 1),
        xycoords=('data', 'axes fraction'),
        xytext=(3, 3),
        textcoords='offset points',
        fontsize=8,
    )
    size = min(9.0, max(6.0, 250 / len(rows)))
    labels = [f'rank {row.rank}, stage {row.stage}' for row in rows]
    axes.set_yticks(range(len(rows)), labels, fontsize=size)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.tick_params(axis='y', length=0)
    axes.spines[['top', 'right']].set_visible(False)
    axes.set_xlabel('seconds since the start of training')
    axes.set_title(f'{startup.title}: {startup.seconds:.1f} s to the end of iteration 1', pad=16)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
    parser.add_argument('reports', type=Path, nargs='+', metavar='REPORT')
    parser.add_argument('--output', type=Path, default=Path('startup.png'), metavar='PNG')
    args = parser.parse_args(arguments)
    try:
        startups = [read_report(path) for path in args.reports]
    except ValueError as error:
        sys.exit(f'plot_startup.py: {error}')
    plot(startups, args.output)
    print(table(startups, [str(path) for path in args.reports]))
    print(f'picture: {args.output}')


if __name__ == '__main__':
    main()
