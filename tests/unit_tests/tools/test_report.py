"""tools/report.py on logs written as the training loop writes them."""

import json
import math
from typing import Any

import pytest
from PIL import Image
from torch.utils.tensorboard import SummaryWriter

from tools import report
from tools.report import Point

STATS = {'ln_vocab': 5.5, 'unigram_entropy': 3.25}


def log(folder, losses, validation=()):
    """Writes a run's event file; ``losses`` and ``validation`` are (iteration, value) in the order of writing."""
    with SummaryWriter(str(folder)) as writer:
        for iteration, loss in losses:
            writer.add_scalar('lm loss', loss, iteration)
            writer.add_scalar('lm loss vs samples', loss, 8 * iteration)
        for iteration, loss in validation:
            writer.add_scalar('lm loss validation', loss, iteration)
    return folder


def line(first, last, count):
    """``count`` losses on a straight line, exact in float32, from iteration 1."""
    return [Point(n + 1, first + (last - first) * n / (count - 1)) for n in range(count)]


def stats_file(tmp_path):
    (tmp_path / 'stats.json').write_text(json.dumps(STATS))
    return str(tmp_path / 'stats.json')


def test_losses_are_read_whole_and_the_test_loss_is_not_a_validation_loss(tmp_path):
    losses = [Point(n, n / 4) for n in range(1, 10_502)]  # more than TensorBoard keeps by default
    log(tmp_path, losses, [(5000, 2.5), (10_501, 2.25), (10_501, 9.0)])
    assert report.read_losses(tmp_path) == (losses, [Point(5000, 2.5), Point(10_501, 2.25)])


def test_a_resumed_run_replaces_what_the_first_did_after_the_checkpoint(tmp_path):
    log(tmp_path, [(1, 5.0), (2, 4.0), (3, 3.0)], [(1, 5.0), (3, 3.5)])
    (first,) = tmp_path.iterdir()
    first.rename(tmp_path / 'events.out.tfevents.1700000000.earlier')
    log(tmp_path, [(2, 4.5), (3, 4.25)], [(2, 4.75)])
    assert report.read_losses(tmp_path) == (
        [Point(1, 5.0), Point(2, 4.5), Point(3, 4.25)],
        [Point(1, 5.0), Point(2, 4.75)],
    )


def test_the_table_is_evenly_spread_and_ends_with_the_last():
    rows = report.table(line(5.5, 2.5, 301), [Point(100, 3.125), Point(301, 2.0)]).splitlines()
    assert rows[0].split() == ['iteration', 'loss', 'validation', 'loss']
    assert [int(row.split()[0]) for row in rows[1:]] == [*range(1, 301, 25), 301]
    assert rows[2].split() == ['26', '5.2500']
    assert rows[5].split() == ['101', '4.5000', '3.1250', '(at', '100)']
    assert rows[-1].split() == ['301', '2.5000', '2.0000']


@pytest.mark.parametrize('count', [1, 2, 12, 13, 14, 20, 1000])
def test_a_table_of_any_run_is_short_and_has_both_ends(count):
    losses = [Point(10 * n, 1.0) for n in range(1, count + 1)]
    rows = report.table(losses, []).splitlines()[1:]
    assert min(count, 9) <= len(rows) <= 19
    assert [int(rows[0].split()[0]), int(rows[-1].split()[0])] == [10, 10 * count]
    assert len(set(rows)) == len(rows)


def test_the_summary_takes_the_mean_of_the_last_ten():
    losses = [Point(1, 5.5), *(Point(n, 2.0 + n % 2) for n in range(2, 40))]
    text = report.summary(losses, STATS)
    assert 'first loss 5.500, last loss 2.500 (mean of the last 10 points)' in text
    assert 'ln(vocabulary) 5.500, unigram entropy 3.250' in text
    assert '0.750 nats below the unigram entropy' in text


@pytest.mark.parametrize(
    'last, verdict',
    [
        (3.0, 'has learned from context: its loss is 0.250 nats below'),
        (4.0, 'does not use context yet: its loss is 0.750 nats above'),
        (5.75, 'has learned nothing'),
        (math.nan, 'is not a number'),
    ],
)
def test_verdicts(last, verdict):
    assert verdict in report.summary([Point(1, last)], STATS)


def test_the_command_prints_and_draws(tmp_path, capsys):
    log(tmp_path / 'log', line(5.5, 2.5, 49), [(49, 2.75)])
    picture = tmp_path / 'new' / 'loss.png'
    flags = ['--stats', stats_file(tmp_path), '--output', str(picture), '--require-below-unigram']
    report.main([str(tmp_path / 'log'), *flags])
    out = capsys.readouterr().out
    assert '5.5000' in out and 'below the unigram entropy' in out and str(picture) in out
    with Image.open(picture) as image:
        assert image.size == (1200, 750)


def test_the_picture_holds_the_curve_and_both_marks(tmp_path, monkeypatch):
    drawn: list[Any] = []
    monkeypatch.setattr(report.pyplot, 'close', drawn.append)
    losses, validation = line(5.5, 2.5, 49), [Point(24, 4.0), Point(49, 2.75)]
    report.plot(losses, validation, STATS, tmp_path / 'loss.png')
    (axes,) = drawn[0].axes
    curve, dots, *marks = axes.get_lines()
    assert curve.get_xydata().tolist() == [list(point) for point in losses]
    assert dots.get_xydata().tolist() == [list(point) for point in validation]
    assert [list(mark.get_ydata()) for mark in marks] == [[5.5, 5.5], [3.25, 3.25]]
    assert [text.get_text() for text in axes.texts] == [
        'ln(vocabulary) = 5.50',
        'unigram entropy = 3.25',
    ]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ('iteration', 'loss (nats per token)')


@pytest.mark.parametrize('last', [3.25, 3.5, math.nan])
def test_a_loss_that_is_not_below_the_unigram_entropy_fails_if_asked(last, tmp_path, capsys):
    log(tmp_path / 'log', [(n, last) for n in range(1, 4)])
    args = [str(tmp_path / 'log'), '--stats', stats_file(tmp_path)]
    args += ['--output', str(tmp_path / 'loss.png')]
    report.main(args)
    with pytest.raises(SystemExit, match='last loss is not below the unigram entropy'):
        report.main([*args, '--require-below-unigram'])
    assert (tmp_path / 'loss.png').exists()


def test_a_log_without_a_loss_is_refused(tmp_path):
    with pytest.raises(SystemExit, match=r'gone: no such folder.*--tensorboard-dir'):
        report.main([str(tmp_path / 'gone')])
    with SummaryWriter(str(tmp_path)) as writer:
        writer.add_scalar('learning-rate', 0.1, 1)
    message = r"holds no scalar 'lm loss', only \['learning-rate'\]"
    with pytest.raises(SystemExit, match=message):
        report.main([str(tmp_path), '--output', str(tmp_path / 'loss.png')])
    assert not (tmp_path / 'loss.png').exists()


def test_the_requirement_needs_the_statistics(tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        report.main([str(tmp_path), '--require-below-unigram'])
    assert stopped.value.code == 2
    assert '--require-below-unigram needs --stats' in capsys.readouterr().err
