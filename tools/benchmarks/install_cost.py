"""What the overlay costs at start: importing Megatron-LM under the layers, against the bare wheel's import.

    python tools/benchmarks/install_cost.py [--rounds N]

Each round starts one fresh process of each kind, in turn; each imports torch first, and then the same
modules: megatron.training, the GPT model, and all that have a layer. Timed, in seconds of processor time
(the wall clock of a busy machine varies by more than the overlay costs), is what comes after torch, the
call of install() included. Exit status 1 if the median difference exceeds the limit.
"""

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path

from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from megatron.overlay import loader  # noqa: E402

LIMIT_S = 0.5
ALWAYS = ("megatron.training", "megatron.core.models.gpt.gpt_model")
KINDS = ("bare wheel", "overlay, --device cuda", "overlay, --device cpu")
CHILD = """
import importlib, sys, time
import torch
start = time.process_time()
kind, *modules = sys.argv[1:]
if kind != "bare":
    import megatron.overlay
    megatron.overlay.install(kind)
for module in modules:
    importlib.import_module(module)
print(time.process_time() - start)
"""


def seconds(kind: str, modules: list[str]) -> float:
    """Time to import ``modules`` in a fresh process, torch's own import left out."""
    device = {"bare wheel": "bare"}.get(kind, kind.split()[-1])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CHILD, device, *modules],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        timeout=300,
    )
    if done.returncode:
        raise RuntimeError(f"{kind}: the import failed\n{done.stderr}")
    return float(done.stdout.splitlines()[-1])


def main() -> int:
    """Prints the table; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9, help="processes of each kind (default: 9)")
    rounds = parser.parse_args().rounds
    finder = loader.Finder(loader.trees())
    layered = sorted(module for root in finder.roots for module in finder.layers_of(root))
    modules = [*ALWAYS, *layered]
    for kind in KINDS:  # once, so that all find bytecode and files in the cache
        seconds(kind, modules)
    times = [[seconds(kind, modules) for kind in KINDS] for _ in tqdm(range(rounds), unit="round")]
    print(
        f"{len(layered)} layered modules, {rounds} rounds; processor seconds to import after torch"
    )
    print(f"{'':24}{'median':>8}{'min':>8}{'max':>8}{'difference':>12}{'ratio':>8}")
    worst = 0.0
    for index, kind in enumerate(KINDS):
        column = [row[index] for row in times]
        difference = statistics.median(row[index] - row[0] for row in times)
        ratio = statistics.median(row[index] / row[0] for row in times)
        worst = max(worst, difference)
        figures = f"{statistics.median(column):8.2f}{min(column):8.2f}{max(column):8.2f}"
        print(f"{kind:24}{figures}" + (f"{difference:+12.2f}{ratio:8.2f}" if index else ""))
    print(f"worst median difference: {worst:.2f} s; limit: {LIMIT_S} s")
    return int(worst > LIMIT_S)


if __name__ == "__main__":
    sys.exit(main())
