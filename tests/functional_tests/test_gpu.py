"""On a GPU, with Transformer Engine: the layers train as the bare wheel does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "benchmarks" / "gpu_training.py"


@pytest.mark.gpu
@pytest.mark.timeout(900)
def test_losses_equal_the_bare_wheels():
    # The CPU device of this process hides the GPU from its children.
    environment = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
    result = subprocess.run(
        [sys.executable, str(SCRIPT), "--rounds", "1"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert result.returncode == 0, result.stdout
    assert "same in all runs" in result.stdout
