"""Trains a GPT with Transformer Engine for a few iterations on GPUs: the bare wheel and the layers, in turn.

    python tools/benchmarks/gpu_training.py --pipeline-sizes 1 4 --rounds 2

Prints, for each pipeline size, the first iteration's time, the median of the later ones, and whether both
printed the same losses and gradient norms. Where NCCL lets several ranks share a GPU
(NCCL_MULTI_RANK_GPU_ENABLE=1), more stages than GPUs all use the first one.
"""

import argparse
import os
import re
import signal
import statistics
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
TIMEOUT = 300  # seconds a run
MODEL = (
    "--num-layers 16 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 "
    "--max-position-embeddings 1024 --position-embedding-type rope --normalization RMSNorm --swiglu "
    "--disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0 "
    "--hidden-dropout 0 --micro-batch-size 1 --global-batch-size 8 --lr 1e-3 --lr-decay-style constant "
    "--bf16 --transformer-impl transformer_engine --no-gradient-accumulation-fusion --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 32000 --eval-iters 0 --eval-interval 1000 "
    "--log-interval 1 --distributed-timeout-minutes 3"
).split()
ITERATION = re.compile(
    r"elapsed time per iteration \(ms\): ([0-9.]+) .*(lm loss: [0-9.E+-]+) .*(grad norm: [0-9.]+)"
)
# The bare wheel lacks the Makefile that its start-up runs; nothing else is touched.
BARE = """
import megatron.overlay
megatron.overlay.install = lambda device: None
import pretrain_gpt
from megatron.core.datasets import utils
utils.compile_helpers = lambda: None
pretrain_gpt.main()
"""
LAYERED = "import pretrain_gpt; pretrain_gpt.main()"


def train(code: str, stages: int, iterations: int) -> list[tuple[float, str]]:
    """Runs one training; returns for each iteration its time in ms, and its loss and gradient norm."""
    shared = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    prefix = "import os; os.environ['LOCAL_RANK'] = '0'\n" if shared else ""
    script = "import sys; sys.path.insert(0, sys.argv.pop(1))\n" + prefix + code
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={stages}", "--no-python", sys.executable, "-c", script]
    command += [str(REPOSITORY), f"--pipeline-model-parallel-size={stages}", *MODEL]
    command += [f"--train-iters={iterations}"]
    environment = {
        **os.environ,
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",  # else the losses of two runs need not be equal
    }
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        start_new_session=True,
    )
    try:
        output = process.communicate(timeout=TIMEOUT)[0]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    found = [(float(ms), f"{loss}, {norm}") for ms, loss, norm in ITERATION.findall(output)]
    if process.returncode or len(found) != iterations:
        raise RuntimeError(f"training with {stages} stages failed:\n{output[-6000:]}")
    return found


def main() -> int:
    """Runs the comparison; returns 1 if the losses differ."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pipeline-sizes", type=int, nargs="+", default=[1])
    parser.add_argument("--iterations", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=2, help="runs of each, in turn")
    options = parser.parse_args()
    print("stages  wheel    first iteration (ms)   later ones, median (ms)   spread")
    same = True
    for stages in options.pipeline_sizes:
        runs: dict[str, list[list[tuple[float, str]]]] = {"bare": [], "layered": []}
        for _ in range(options.rounds):
            for name, code in (("bare", BARE), ("layered", LAYERED)):
                runs[name].append(train(code, stages, options.iterations))
        for name, found in runs.items():
            first = ", ".join(f"{run[0][0]:.0f}" for run in found)
            later = [ms for run in found for ms, _ in run[1:]]
            spread = f"{min(later):.1f} to {max(later):.1f}"
            print(f"{stages:6}  {name:8} {first:21}  {statistics.median(later):24.1f}   {spread}")
        logged = {tuple(what for _, what in run) for found in runs.values() for run in found}
        same &= len(logged) == 1
        print(f"        {'same in all runs' if len(logged) == 1 else 'DIFFERENT'}:")
        for losses in sorted(logged):
            print("          " + " | ".join(losses))
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
