"""tools/plot_startup.py on reports as training writes them."""

import json
import random
from typing import Any

import pytest
from matplotlib.colors import to_hex
from PIL import Image

from megatron.core.pipeline_parallel.startup_timeline import (
    Compilation,
    Span,
    StartupReport,
    Timeline,
)
from tools import plot_startup
from tools.plot_startup import Row


def span(name, kind, start, end, phase='iteration'):
    return Span(name, kind, start, end, phase)


def without():
    """Two stages whose compilations follow each other. Rank 1 stands first, and started later."""
    last = Timeline(1, 1, 101.0)
    last.spans = [
        span('send/receive', 'wait', 102.5, 104.0),
        span('iteration 1', 'compute', 102.0, 107.0),
    ]
    last.compilations = [
        Compilation('torch.compile', 'f', 103.5, 105.0),  # half a second of it while waiting
        Compilation('Triton', 'k', 104.75, 105.25),  # in another thread, a quarter at the same time
    ]
    first = Timeline(0, 0, 100.0)
    first.spans = [
        span('send/receive', 'wait', 104.0, 106.5),
        span('send/receive', 'wait', 106.25, 106.75),
        span('iteration 1', 'compute', 102.0, 108.0),
    ]
    first.compilations = [
        Compilation('torch.compile', 'f', 102.25, 104.0),
        Compilation('torch.compile', 'g', 99.0, 100.5),  # from before the start
        Compilation('torch.compile', 'g', 107.75, 109.0),  # to after the end
    ]
    return StartupReport(False, [last, first])


def prewarmed(ranks=2, per_stage=1):
    timelines = []
    for rank in range(ranks):
        timeline = Timeline(rank, rank // per_stage, 200.0)
        done = 202.0 + rank % 4 / 4
        timeline.spans = [
            span('chunk 0 forward', 'compute', 200.5, done, 'prewarm'),
            span('other stages', 'wait', done, 203.0, 'prewarm'),
            span('iteration 1', 'compute', 203.25, 204.5),
        ]
        timeline.compilations = [Compilation('torch.compile', 'f', 201.0, 201.5)]
        timelines.append(timeline)
    random.Random(1).shuffle(timelines)
    return StartupReport(True, timelines)


def written(report, path):
    report.write(path)
    return path


def test_seconds_by_colour_are_exact(tmp_path):
    startup = plot_startup.read_report(written(without(), tmp_path / 'report.json'))
    assert (startup.seconds, startup.iteration_start, startup.prewarm_end) == (8.0, 2.0, 0.0)
    first, last = startup.rows
    assert (first.rank, first.stage, last.rank, last.stage) == (0, 0, 1, 1)
    # Rank 0, from 0 to 8: compiling 0..0.5, 2.25..4, 7.75..8; waiting 4..6.75; computing 2..2.25, 6.75..7.75.
    assert first.seconds() == {'compile': 2.5, 'wait': 2.75, 'compute': 1.25}
    # Rank 1: compiling 3.5..5.25; waiting 2.5..3.5; computing 2..2.5, 5.25..7.
    assert last.seconds() == {'compile': 1.75, 'wait': 1.0, 'compute': 2.25}
    assert startup.mean_seconds() == {'compile': 2.125, 'wait': 1.875, 'compute': 1.75}


def test_what_lies_behind_another_colour_does_not_count():
    row = Row(0, 0, {'compile': [(1.0, 2.0)], 'wait': [(0.0, 3.0)], 'compute': [(1.25, 1.75)]})
    assert row.seconds() == {'compile': 1.0, 'wait': 2.0, 'compute': 0.0}


@pytest.mark.parametrize(
    'intervals, expected',
    [
        ([], 0.0),
        ([(3.0, 4.0), (0.0, 1.0)], 2.0),
        ([(0.0, 1.0), (1.0, 2.0)], 2.0),
        ([(0.0, 4.0), (1.0, 2.0), (3.0, 5.0)], 5.0),
        ([(1.0, 1.0), (0.0, 2.0), (0.0, 2.0)], 2.0),
    ],
)
def test_length_counts_what_overlaps_once(intervals, expected):
    assert plot_startup.length(intervals) == expected


def test_the_command_prints_the_table_and_draws(tmp_path, capsys):
    first = written(without(), tmp_path / 'without.json')
    second = written(prewarmed(), tmp_path / 'with.json')
    picture = tmp_path / 'new' / 'startup.png'
    plot_startup.main([str(first), str(second), '--output', str(picture)])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[:3] == [
        ['report', 'prewarm', 'start-up', 'compile', 'wait', 'compute'],
        [str(first), 'no', '8.00', '2.12', '1.88', '1.75'],
        [str(second), 'yes', '4.50', '0.50', '0.88', '2.38'],
    ]
    assert lines[-1] == ['picture:', str(picture)]
    with Image.open(picture) as image:
        assert image.size == (1950, 435)


def panels(monkeypatch, tmp_path, *reports):
    """The axes of the picture of ``reports``."""
    drawn: list[Any] = []
    monkeypatch.setattr(plot_startup.pyplot, 'close', drawn.append)
    paths = [written(report, tmp_path / f'{n}.json') for n, report in enumerate(reports)]
    startups = [plot_startup.read_report(path) for path in paths]
    plot_startup.plot(startups, tmp_path / 'startup.png')
    return drawn[0].axes


def bars(axes):
    """What is painted in rows, in order: row -> (colour, start, end)."""
    painted: dict[int, list[tuple[str, float, float]]] = {}
    for collection in axes.collections:
        for path in collection.get_paths():
            box = path.get_extents()
            color = to_hex(collection.get_facecolor()[0])
            row = painted.setdefault(round((box.y0 + box.y1) / 2), [])
            row.append((color, box.x0, box.x1))
    return painted


def test_a_row_is_painted_with_compilations_in_front(monkeypatch, tmp_path):
    (axes,) = panels(monkeypatch, tmp_path, without())
    compute, wait, compile_ = plot_startup.COLORS.values()
    assert bars(axes)[1] == [
        (compute, 2.0, 7.0),
        (wait, 2.5, 4.0),
        (compile_, 3.5, 5.0),
        (compile_, 4.75, 5.25),
    ]


def test_panels_share_the_time_axis_and_tell_the_phases_apart(monkeypatch, tmp_path):
    left, right = panels(monkeypatch, tmp_path, without(), prewarmed())
    assert left.get_xlim() == right.get_xlim() == (0.0, 8.24)
    assert left.get_title() == 'without prewarm: 8.0 s to the end of iteration 1'
    assert right.get_title() == 'with prewarm: 4.5 s to the end of iteration 1'
    # Iteration 1 from line to line; the band is the prewarm.
    assert [line.get_xdata()[0] for line in left.get_lines()] == [2.0, 8.0]
    assert [line.get_xdata()[0] for line in right.get_lines()] == [3.25, 4.5]
    assert not left.patches
    (band,) = right.patches
    assert (band.get_x(), band.get_width()) == (0.0, 3.0)
    labels = ['rank 0, stage 0', 'rank 1, stage 1']
    assert [label.get_text() for label in left.get_yticklabels()] == labels
    assert left.get_ylim()[0] > left.get_ylim()[1]  # rank 0 on top
    (legend,) = left.figure.legends
    names = [text.get_text() for text in legend.get_texts()]
    assert names == ['compile', 'wait', 'compute', 'prewarm']


@pytest.mark.parametrize('ranks, per_stage', [(2, 1), (16, 2), (64, 8)])
def test_labels_have_room(monkeypatch, tmp_path, ranks, per_stage):
    left, right = panels(monkeypatch, tmp_path, without(), prewarmed(ranks, per_stage))
    labels = right.get_yticklabels() if ranks > 2 else left.get_yticklabels()
    assert [label.get_text() for label in labels][-1] == (
        f'rank {ranks - 1}, stage {(ranks - 1) // per_stage}'
    )
    boxes = [label.get_window_extent() for label in labels]
    assert all(upper.y0 >= lower.y1 for upper, lower in zip(boxes, boxes[1:]))
    assert labels[0].get_fontsize() >= 6
    separators = [line for line in right.get_lines() if line.get_xdata()[0] == 0]
    assert len(separators) == (ranks // per_stage - 1 if per_stage > 1 else 0)


@pytest.mark.parametrize(
    'content, message',
    [
        (None, 'report.json: .*No such file.*--pipeline-prewarm-report'),
        ('loss', 'report.json: Expecting value.*--pipeline-prewarm-report'),
        ('[1]', 'format=None, expected 1'),
        ('{"format": 2}', 'format=2, expected 1'),
        (
            json.dumps({'format': 1, 'prewarm': True, 'ranks': []}),
            "no span of phase 'iteration' in 0 ranks. Did the run end before",
        ),
    ],
)
def test_what_is_no_finished_start_up_is_refused(tmp_path, content, message):
    path = tmp_path / 'report.json'
    if content is not None:
        path.write_text(content)
    with pytest.raises(SystemExit, match=message):
        plot_startup.main([str(path), '--output', str(tmp_path / 'startup.png')])
    assert not (tmp_path / 'startup.png').exists()
