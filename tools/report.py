"""Reports a training run from its TensorBoard log: a table of losses, a verdict, and the curve as a picture.

    python tools/report.py LOGDIR --stats data/stdlib/stats.json --output loss.png

LOGDIR is what training was given as --tensorboard-dir; stats.json is what tools/stdlib_dataset.py writes
beside its dataset. Losses are in nats per token. Two marks tell how much a model has learned: ln(vocabulary),
the loss of a uniform guess, and the unigram entropy of the data, the least loss of a model that ignores context.
"""

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use('Agg')

from matplotlib import pyplot
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

LOSS = 'lm loss'
VALIDATION_LOSS = 'lm loss validation'
LAST_POINTS = 10
TABLE_ROWS = 12


class Point(NamedTuple):
    iteration: int
    loss: float


def read_losses(log: Path) -> tuple[list[Point], list[Point]]:
    """The training and the validation losses in the TensorBoard folder ``log``, by iteration.

    Raises:
        ValueError: there is no such folder, or no training loss in it.
    """
    if not log.is_dir():
        raise ValueError(f'{log}: no such folder; give what training had as --tensorboard-dir')
    losses: list[Point] = []
    validation: list[Point] = []
    tags: set[str] = set()
    for path in sorted(log.glob('*tfevents*')):  # their names begin with the time
        run = _scalars(path)
        tags |= run.keys()
        if LOSS in run:
            # A run that resumed, or began anew, in the folder of an earlier one: from there on its losses count.
            start = run[LOSS][0].iteration
            losses = [point for point in losses if point.iteration < start] + run[LOSS]
            validation = [point for point in validation if point.iteration < start]
            validation += run.get(VALIDATION_LOSS, [])
    if not losses:
        raise ValueError(
            f'{log}: holds no scalar {LOSS!r}, only {sorted(tags)}. Was it the --tensorboard-dir of a training '
            'run, and did that run reach its first --log-interval?'
        )
    return losses, validation


def _scalars(path: Path) -> dict[str, list[Point]]:
    """The scalars of one event file, which is one run's: tag -> points."""
    events = EventAccumulator(str(path), size_guidance={'scalars': 0}).Reload()
    scalars: dict[str, list[Point]] = {}
    for tag in events.Tags()['scalars']:
        first: dict[int, float] = {}
        for event in events.Scalars(tag):
            # Megatron-LM logs the test loss after the last validation, under the same name: the first one counts.
            first.setdefault(event.step, event.value)
        scalars[tag] = [Point(*item) for item in sorted(first.items())]
    return scalars


def table(losses: list[Point], validation: list[Point]) -> str:
    """About ``TABLE_ROWS`` evenly spread rows, and the last; a validation loss stands in the first row after it."""
    step = max(1, round((len(losses) - 1) / TABLE_ROWS))
    rows = losses[:-1:step] + losses[-1:]
    lines = [f'{"iteration":>9}  {"loss":>8}' + ('  validation loss' if validation else '')]
    before = 0
    for iteration, loss in rows:
        line = f'{iteration:>9}  {loss:>8.4f}'
        seen = [point for point in validation if before < point.iteration <= iteration]
        if seen:
            where = '' if seen[-1].iteration == iteration else f' (at {seen[-1].iteration})'
            line += f'  {seen[-1].loss:>15.4f}{where}'
        lines.append(line)
        before = iteration
    return '\n'.join(lines)


def last_loss(losses: list[Point]) -> float:
    """Mean of the last ``LAST_POINTS`` losses: one microbatch is too noisy to judge by."""
    last = losses[-LAST_POINTS:]
    return sum(point.loss for point in last) / len(last)


def summary(losses: list[Point], stats: dict[str, Any] | None) -> str:
    """The run in one line, and what it means in a sentence."""
    first, last = losses[0].loss, last_loss(losses)
    count = min(LAST_POINTS, len(losses))
    line = f'first loss {first:.3f}, last loss {last:.3f} (mean of the last {count} points)'
    if stats is None:
        return f'{line}\nThe loss changed by {last - first:+.3f} nats.'
    entropy, uniform = stats['unigram_entropy'], stats['ln_vocab']
    line += f', ln(vocabulary) {uniform:.3f}, unigram entropy {entropy:.3f}'
    if last < entropy:
        verdict = (
            f'The model has learned from context: its loss is {entropy - last:.3f} nats below the unigram entropy, '
            'the least that is possible without context.'
        )
    elif last < uniform:
        verdict = (
            f'The model does not use context yet: its loss is {last - entropy:.3f} nats above the unigram entropy, which '
            'a model that only counts tokens reaches. Train it longer.'
        )
    elif math.isnan(last):
        verdict = 'The loss is not a number: training has diverged.'
    else:
        verdict = 'The model has learned nothing: its loss is not below that of a uniform guess.'
    return f'{line}\n{verdict}'


def plot(
    losses: list[Point], validation: list[Point], stats: dict[str, Any] | None, output: Path
) -> None:
    """Writes the loss curve, with the two marks if ``stats`` are given, to the picture ``output``."""
    figure, axes = pyplot.subplots(figsize=(8, 5), layout='constrained')
    axes.plot(*zip(*losses), color='C0', linewidth=1.5, label='training')
    if validation:
        axes.plot(*zip(*validation), color='C1', linestyle='', marker='o', label='validation')
    if stats is not None:
        marks = {'ln(vocabulary)': stats['ln_vocab'], 'unigram entropy': stats['unigram_entropy']}
        for name, value in marks.items():
            axes.axhline(value, color='0.45', linestyle='--', linewidth=1)
            axes.annotate(
                f'{name} = {value:.2f}',
                (0.99, value),
                xycoords=('axes fraction', 'data'),
                xytext=(0, 3),
                textcoords='offset points',
                horizontalalignment='right',
                color='0.3',
            )
    axes.set(xlabel='iteration', ylabel='loss (nats per token)', title='Training loss')
    axes.margins(x=0.01)
    axes.set_ylim(bottom=0)
    axes.grid(color='0.92')
    axes.spines[['top', 'right']].set_visible(False)
    axes.legend(frameon=False, loc='lower left')
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=150)
    pyplot.close(figure)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
    parser.add_argument('log', type=Path, metavar='LOGDIR', help='a TensorBoard folder')
    parser.add_argument('--stats', type=Path, help='stats.json of the dataset')
    parser.add_argument('--output', type=Path, default=Path('loss.png'), metavar='PNG')
    parser.add_argument(
        '--require-below-unigram',
        action='store_true',
        help=f'exit status 1 unless the mean of the last {LAST_POINTS} losses is below the unigram entropy',
    )
    args = parser.parse_args(arguments)
    if args.require_below_unigram and args.stats is None:
        parser.error('--require-below-unigram needs --stats')
    stats = None if args.stats is None else json.loads(args.stats.read_text())
    try:
        losses, validation = read_losses(args.log)
    except ValueError as error:
        sys.exit(f'report.py: {error}')
    plot(losses, validation, stats, args.output)
    print(table(losses, validation))
    print(summary(losses, stats))
    print(f'curve: {args.output}')
    below = stats is not None and last_loss(losses) < stats['unigram_entropy']
    if args.require_below_unigram and not below:
        sys.exit(
            'report.py: the last loss is not below the unigram entropy (--require-below-unigram)'
        )


if __name__ == '__main__':
    main()
