"""Puts the layers over the wheel, on the CPU device, before any test module imports megatron."""

import os
import sys
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # pytest may be started anywhere

import megatron.overlay  # noqa: E402

megatron.overlay.install(device="cpu")

import torch  # noqa: E402

torch.set_num_threads(1)
