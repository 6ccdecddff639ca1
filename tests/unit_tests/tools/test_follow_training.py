"""The progress bar of a training run."""

import subprocess
import sys
from pathlib import Path

FOLLOW = Path(__file__).resolve().parents[3] / "tools" / "follow_training.py"
LINE = " [2026-01-01 00:00:00] iteration {:8d}/{:8d} | consumed samples: 4 | lm loss: {} | loss scale: 1.0 |\n"
VALIDATION = " validation loss at iteration {} | lm loss value: {} | lm loss PPL: 1.0 |\n"


def _follow(text: str, log: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, str(FOLLOW), str(log)]
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=60)


def test_shows_training_and_validation_loss_and_keeps_all(tmp_path):
    text = "".join(
        [
            "starting\n",
            LINE.format(1, 2, "5.500000E+00"),
            VALIDATION.format("1", "5.0E+00"),
            LINE.format(2, 2, "4.250000E+00"),
            VALIDATION.format("2", "4.500000E+00"),
            VALIDATION.format("2 on validation set", "8.0E+00"),
            VALIDATION.format("2 on test set", "9.0E+00"),
        ]
    )
    done = _follow(text, tmp_path / "train.log")
    assert done.returncode == 0
    last = done.stderr.replace("\r", "\n").splitlines()[-1]
    assert "2/2" in last and "loss=4.250, validation=4.500" in last
    assert (tmp_path / "train.log").read_text() == text


def test_of_a_run_that_ends_early_the_end_is_shown(tmp_path):
    text = LINE.format(1, 2, "NAN") + "RuntimeError: out of luck\n"
    done = _follow(text, tmp_path / "train.log")
    assert "ended at iteration 1" in done.stderr and "RuntimeError: out of luck" in done.stderr
    assert "loss=nan" in done.stderr
