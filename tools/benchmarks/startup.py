"""How long training takes to start on cold caches, with --pipeline-prewarm and without, in turn.

    python tools/benchmarks/startup.py --layouts 2x1 4x1 4x2 --models dense moe --output runs/startup
    python tools/benchmarks/startup.py --layouts 4x2 --models moe --deterministic --identity 50

Start-up is the time from the start of the training loop to the end of iteration 1, on the rank that takes
longest; its lazy part is what it takes beyond a later iteration. Every run has empty compile caches, by
default each rank its own: pipeline stages usually lie on different nodes and share no local folder.
Exit status 1 if a run failed, or if losses or gradient norms were not the same in all runs.

Where NCCL lets several ranks share a GPU (NCCL_MULTI_RANK_GPU_ENABLE=1), all stages use the first one.
"""

import argparse
import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
# Where compilers keep what they made, by the variable that moves it. cuDNN and Transformer Engine, which
# compile with NVRTC, keep nothing on disk.
CACHES = {
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TORCH_EXTENSIONS_DIR": "extensions",
    "PYTORCH_KERNEL_CACHE_PATH": "jiterator",
    "CUDA_CACHE_PATH": "driver",
    "CUTE_DSL_CACHE_DIR": "cute",
    "TVM_FFI_CACHE_DIR": "tvm_ffi",  # CuTe DSL's calls go through it
    "XDG_CACHE_HOME": "xdg",  # the cuDNN frontend's, and others' that have no variable of their own
    "TMPDIR": "tmp",  # inductor's precompiled C++ headers, whatever TORCHINDUCTOR_CACHE_DIR says
}
SIZES = {
    "cuda": {"num_layers": 16, "hidden_size": 1024, "seq_length": 1024, "vocab_size": 32000},
    "cpu": {"num_layers": 8, "hidden_size": 64, "seq_length": 64, "vocab_size": 127},
}
MODELS = ("dense", "moe", "dsa-moe")
COMMON = (
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
    "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --micro-batch-size 1 "
    "--lr 1e-3 --lr-decay-style constant --mock-data --tokenizer-type NullTokenizer --eval-iters 0 "
    "--eval-interval 1000 --log-interval 1 --distributed-timeout-minutes 5"
).split()
DEVICE_FLAGS = {
    "cuda": "--bf16 --transformer-impl transformer_engine --no-gradient-accumulation-fusion".split(),
    "cpu": [],
}
# A history longer than one keeps what a synthetic forward would leave behind.
FP8 = (
    "--fp8-format hybrid --fp8-recipe delayed --fp8-amax-history-len 16 --fp8-amax-compute-algo max"
)
DETERMINISTIC = {"NCCL_ALGO": "Ring", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
LOGGED = re.compile(r"iteration +(\d+)/ *\d+ \|(.*?number of nan iterations: +\d+) \|")
ELAPSED = "elapsed time per iteration (ms)"
TIMED = (ELAPSED, "throughput", "energy", "power")  # what no two runs print alike
SETTLED = 3  # the first iteration whose logged time holds nothing of iteration 1's, which stock logs twice


@dataclass(frozen=True)
class Startup:
    """What a report says of one start. Seconds."""

    total: float  # from the start of the training loop to the end of iteration 1
    prewarm: float  # of that, to the end of the last prewarm step
    slowest_stage: (
        float  # the most that one rank spent in prewarm steps, waiting for others left out
    )
    leftovers: list[str]  # what was compiled after the prewarm


@dataclass(frozen=True)
class Run:
    """One training run: which, and what it gave. ``error`` says why there is nothing."""

    model: str
    layout: str
    prewarm: bool
    number: int
    folder: Path
    error: str | None = None
    startup: Startup = Startup(0.0, 0.0, 0.0, [])
    later: float = 0.0  # seconds of a later iteration, median
    logged: dict[int, dict[str, str]] = field(default_factory=dict)
    exact: dict[str, list[str]] = field(default_factory=dict)  # TensorBoard's values by tag

    @property
    def name(self) -> str:
        """Of its files in ``folder``."""
        kind = "with" if self.prewarm else "without"
        return f"{self.model}-{self.layout}-{kind}-{self.number}"

    @property
    def log(self) -> Path:
        """What its ranks printed."""
        return self.folder / f"{self.name}.log"

    @property
    def report(self) -> Path:
        """What --pipeline-prewarm-report wrote."""
        return self.folder / f"{self.name}.json"

    @property
    def lazy(self) -> float:
        """Seconds of start-up beyond a later iteration."""
        return self.startup.total - self.later


def read_log(text: str) -> dict[int, dict[str, str]]:
    """For each iteration, all that the training loop printed of it, to the digit: name -> value."""
    return {
        int(iteration): {
            name.strip(): value.strip()
            for name, _, value in (part.rpartition(":") for part in line.split("|"))
        }
        for iteration, line in LOGGED.findall(text)
    }


def read_report(report: dict[str, Any]) -> Startup:
    """Start-up from a report of --pipeline-prewarm-report, format 1.

    Raises:
        ValueError: the report is of another format, or a rank did not finish iteration 1.
    """
    if report.get("format") != 1:
        raise ValueError(f"format={report.get('format')!r} in the start-up report: expected 1")
    totals, prewarms, stages = [], [0.0], [0.0]
    left: dict[str, list[float]] = defaultdict(list)
    for rank in report["ranks"]:
        spans = rank["spans"]
        first = [span for span in spans if span["name"] == "iteration 1"]
        if not first:
            raise ValueError(
                f"rank {rank['rank']} has no span 'iteration 1' in the start-up report: see its log"
            )
        totals.append(first[0]["end"] - rank["started"])
        prewarm = [span for span in spans if span["phase"] == "prewarm"]
        prewarms += [span["end"] - rank["started"] for span in prewarm]
        own = [span["end"] - span["start"] for span in prewarm if span["kind"] != "wait"]
        stages.append(sum(own))
        begun = min(span["start"] for span in spans if span["phase"] == "iteration")
        seconds: dict[str, float] = defaultdict(float)
        for compilation in rank["compilations"]:
            if compilation["start"] >= begun:
                name = f"{compilation['kind']} {compilation['name']}"
                seconds[name] += compilation["end"] - compilation["start"]
        for name, spent in seconds.items():
            left[name].append(spent)
    leftovers = [
        f"{name}: {max(spent):.2f} s, {len(spent)} rank{'s' * (len(spent) > 1)}"
        for name, spent in sorted(left.items(), key=lambda item: -max(item[1]))
    ]
    return Startup(max(totals), max(prewarms), max(stages), leftovers)


def read_tensorboard(folder: Path) -> dict[str, list[str]]:
    """Every scalar that a run logged, exactly: tag -> step and value of each iteration."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return {
        tag: [f"{event.step}: {event.value!r}" for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def layout_of(text: str) -> tuple[int, int]:
    """'4x2' -> 4 pipeline stages of 2 model chunks each. Raises ValueError."""
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if not match:
        raise ValueError(f"--layouts {text!r}: expected PPxVPP, such as 4x2")
    return int(match[1]), int(match[2])


def model_flags(model: str, layout: str, options: argparse.Namespace) -> list[str]:
    """Flags of ``model`` over ``layout``. Raises ValueError for a layout that does not divide the layers."""
    stages, chunks = layout_of(layout)
    per_chunk, rest = divmod(options.num_layers, stages * chunks)
    if rest or not per_chunk:
        raise ValueError(
            f"--num-layers {options.num_layers} with layout {layout}: expected a multiple of "
            f"{stages * chunks}; pass another --num-layers"
        )
    heads = max(4, options.hidden_size // 64)
    head = options.hidden_size // heads
    sizes = {
        "--num-layers": options.num_layers,
        "--hidden-size": options.hidden_size,
        "--num-attention-heads": heads,
        "--seq-length": options.seq_length,
        "--max-position-embeddings": options.seq_length,
        "--vocab-size": options.vocab_size,
        "--global-batch-size": options.global_batch_size,
        "--pipeline-model-parallel-size": stages,
    }
    if chunks > 1:
        sizes["--num-layers-per-virtual-pipeline-stage"] = per_chunk
    switches = []
    if model != "dense":
        sizes |= {
            "--num-experts": options.num_experts,
            "--moe-router-topk": 2,
            "--moe-token-dispatcher-type": "alltoall",
            "--moe-aux-loss-coeff": 0.01,
        }
        if options.device == "cuda":
            switches.append("--moe-grouped-gemm")  # needs Transformer Engine
    if model == "dsa-moe":
        switches += ["--multi-latent-attention", "--no-rope-fusion"]
        sizes |= {
            "--q-lora-rank": options.hidden_size // 2,
            "--kv-lora-rank": options.hidden_size // 2,
            "--qk-head-dim": head,
            "--qk-pos-emb-head-dim": head,
            "--v-head-dim": head,
            "--experimental-attention-variant": "dsa",
            "--dsa-indexer-n-heads": 4,
            "--dsa-indexer-head-dim": 2 * head,
            "--dsa-indexer-topk": max(1, options.seq_length // 4),
            "--dsa-indexer-loss-coeff": 0.01,
        }
    return [str(word) for flag in sizes.items() for word in flag] + switches


def environments(options: argparse.Namespace, stages: int, caches: Path) -> list[dict[str, str]]:
    """Each rank's environment, with empty compile caches under ``caches``."""
    shared_gpu = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    common = {
        **os.environ,
        "WORLD_SIZE": str(stages),
        "LOCAL_WORLD_SIZE": str(stages),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "OMP_NUM_THREADS": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",  # else the losses of two runs need not be equal
    }
    if options.device == "cpu":
        # What a GPU would compile is compiled here too; a core for each rank's compiler, if there are as many.
        common |= {"MEGATRON_OVERLAY_CPU_COMPILE": "inductor", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    if options.deterministic:
        common |= DETERMINISTIC
    found = []
    for rank in range(stages):
        root = caches / (f"rank{rank}" if options.caches == "per-rank" else "shared")
        folders = {variable: root / name for variable, name in CACHES.items()}
        for folder in folders.values():
            folder.mkdir(parents=True, exist_ok=True)
        ranks = {
            "RANK": str(rank),
            "LOCAL_RANK": "0" if shared_gpu and options.device == "cuda" else str(rank),
        }
        found.append({**common, **ranks, **{name: str(path) for name, path in folders.items()}})
    return found


def launch(
    command: list[str], environments: list[dict[str, str]], log: Path, timeout: float
) -> str | None:
    """Runs ``command`` once in each environment, to the end; returns what went wrong. Leaves no process.

    Not by torchrun: its workers lead sessions of their own and outlive it when it is killed.
    """
    ranks: list[subprocess.Popen] = []
    deadline = time.monotonic() + timeout
    try:
        with log.open("wb") as output:
            for environment in environments:
                ranks.append(
                    subprocess.Popen(
                        command,
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        env=environment,
                        start_new_session=True,
                    )
                )
        while True:
            statuses = [rank.poll() for rank in ranks]
            for rank, status in enumerate(statuses):
                if status:
                    return f"rank {rank} ended with status {status}"
            if all(status == 0 for status in statuses):
                return None
            if time.monotonic() > deadline:
                return f"still running after {timeout:g} s (--timeout)"
            time.sleep(0.05)
    finally:
        for process in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def train(run: Run, options: argparse.Namespace) -> Run:
    """Trains, and returns ``run`` with what it gave. Never raises for a run that fails."""
    stages, _ = layout_of(run.layout)
    command = [sys.executable, str(options.script), "--device", options.device]
    command += [*model_flags(run.model, run.layout, options), *COMMON]
    command += [*DEVICE_FLAGS[options.device], "--train-iters", str(options.iterations)]
    command += ["--pipeline-prewarm-report", str(run.report)]
    tensorboard = run.folder / f"{run.name}.tensorboard"
    if options.identity:
        command += ["--tensorboard-dir", str(tensorboard), "--tensorboard-log-interval", "1"]
    if options.deterministic:
        command.append("--deterministic-mode")
    if options.fp8:
        command += FP8.split()
    if run.prewarm:
        command.append("--pipeline-prewarm")
    command += shlex.split(options.extra)
    with tempfile.TemporaryDirectory(
        prefix="startup-caches-", ignore_cleanup_errors=True
    ) as caches:
        ranks = environments(options, stages, Path(caches))
        error = launch(command, ranks, run.log, options.timeout)
    found = vars(run) | {"error": error}
    if error is None:
        try:
            logged = read_log(run.log.read_text(errors="replace"))
            if sorted(logged) != list(range(1, options.iterations + 1)):
                raise ValueError(f"the log has iterations {sorted(logged)}")
            settled = [float(logged[n][ELAPSED]) for n in logged if n >= SETTLED]
            found["later"] = statistics.median(settled) / 1000
            found["logged"] = {
                n: {name: value for name, value in line.items() if not name.startswith(TIMED)}
                for n, line in logged.items()
            }
            found["startup"] = read_report(json.loads(run.report.read_text()))
            if options.identity:
                found["exact"] = read_tensorboard(tensorboard)
        except (OSError, ValueError, KeyError) as problem:
            found["error"] = f"{type(problem).__name__}: {problem}"
    return Run(**found)


def table(runs: list[Run]) -> str:
    """One model's start-ups: a line per layout with and without, and their ratios. Seconds."""
    head = (
        "layout  prewarm  runs  start-up              later                 lazy part             "
    )
    lines = [head + "prewarm               its slowest stage     ratio"]
    for layout in dict.fromkeys(run.layout for run in runs):
        good = [run for run in runs if run.layout == layout and run.error is None]
        kinds = {kind: [run for run in good if run.prewarm == kind] for kind in (False, True)}
        for kind, found in kinds.items():
            line = f"{layout:6}  {'with' if kind else 'without':7}  {len(found):4}"
            if found:
                columns = [[run.startup.total for run in found], [run.later for run in found]]
                columns.append([run.lazy for run in found])
                if kind:
                    columns.append([run.startup.prewarm for run in found])
                    columns.append([run.startup.slowest_stage for run in found])
                line += "".join(f"  {_spread(column):20}" for column in columns)
            if found and kind:
                line += f"  {_ratio(*columns[3:]):>5}"
            lines.append(line.rstrip())
        if all(kinds.values()):
            start, lazy = (
                _ratio(*([value(run) for run in kinds[kind]] for kind in (False, True)))
                for value in (lambda run: run.startup.total, lambda run: run.lazy)
            )
            lines.append(f"        without/with: start-up {start}, lazy part {lazy}")
        if kinds[True]:
            left = _median_run(kinds[True]).startup.leftovers
            lines += [f"        compiled after the prewarm: {what}" for what in left[:8]]
            lines += [f"        and {len(left) - 8} more, in the report"] * (len(left) > 8)
    return "\n".join(lines)


def differences(runs: list[Run]) -> list[str]:
    """What is not the same in all ``runs`` of one model and layout: a line for each iteration and name."""
    found = []
    for what, values in (
        (
            "printed",
            [{(n, k): v for n, of in run.logged.items() for k, v in of.items()} for run in runs],
        ),
        ("TensorBoard", [{(0, tag): str(of) for tag, of in run.exact.items()} for run in runs]),
    ):
        for key in sorted(set().union(*values)):
            if len({of.get(key) for of in values}) > 1:
                each = ", ".join(f"{run.name} {of.get(key)}" for run, of in zip(runs, values))
                iteration = f"iteration {key[0]}, " if key[0] else ""
                found.append(f"{what}: {iteration}{key[1]}: {each}"[:400])
    return found


def compare(runs: list[Run]) -> bool:
    """Says whether all runs of a model logged the same, by layout, with prewarm and without."""
    same = True
    for layout in dict.fromkeys(run.layout for run in runs):
        good = [run for run in runs if run.layout == layout and run.error is None]
        if len({run.prewarm for run in good}) < 2:
            print(f"{layout}: nothing to compare, with prewarm and without")
            same = False
            continue
        different = differences(good)
        same &= not different
        tags = f"; all of TensorBoard's {len(good[0].exact)} tags" * bool(good[0].exact)
        print(
            f"{layout}: losses and gradient norms "
            + ("DIFFERENT" if different else "the same")
            + f" in all {len(good)} runs, {len(good[0].logged)} iterations{tags}"
        )
        for line in different[:10]:
            print(f"    {line}")
        if different and differences([run for run in good if not run.prewarm]):
            print("    so do those without prewarm among themselves: see --deterministic")
        if not different:
            losses = [of.get("lm loss", "?") for of in good[0].logged.values()]
            norms = [of.get("grad norm", "?") for of in good[0].logged.values()]
            for name, values in (("lm loss", losses), ("grad norm", norms)):
                shown = values if len(values) <= 8 else [*values[:3], "...", *values[-3:]]
                print(f"    {name} {' '.join(shown)}")
    return same


def draw(runs: list[Run]) -> None:
    """One picture per layout, of the median run with prewarm and the median one without."""
    for layout in dict.fromkeys(run.layout for run in runs):
        good = [run for run in runs if run.layout == layout and run.error is None]
        pair = [[run for run in good if run.prewarm == kind] for kind in (False, True)]
        if not all(pair):
            continue
        reports = [str(_median_run(found).report) for found in pair]
        picture = good[0].folder / f"{good[0].model}-{layout}.png"
        script = REPOSITORY / "tools" / "plot_startup.py"
        done = subprocess.run(
            [sys.executable, str(script), *reports, "--output", str(picture)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
        )
        print(
            f"picture: {picture}" if done.returncode == 0 else f"no picture: {done.stdout[-400:]}"
        )


def main(arguments: list[str] | None = None) -> int:
    """Runs the comparison; returns 1 if a run failed or the losses differ."""
    options = parse(arguments)
    signal.signal(signal.SIGTERM, _interrupt)  # else a time-out around this script leaves its ranks
    folder = Path(options.output or tempfile.mkdtemp(prefix="startup-")).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    plan = [
        Run(model, layout, kind, number, folder)
        for model in options.models
        for layout in options.layouts
        for number in range(1, options.rounds + 1)
        # Whichever comes first may find the disk's cache cold: take turns at that too.
        for kind in ((False, True) if number % 2 else (True, False))
    ]
    cores = len(os.sched_getaffinity(0))
    print(
        f"{options.device}, {cores} CPU cores, torch {version('torch')}: {options.num_layers} layers, hidden "
        f"{options.hidden_size}, sequence {options.seq_length}, {options.iterations} iterations; "
        f"{options.rounds} rounds, cold caches {options.caches}"
    )
    most = max(layout_of(layout)[0] for layout in options.layouts)
    if most > cores:
        print(
            f"{cores} CPU cores: {most} stages cannot all compile at once, and prewarm gains less"
        )
    runs: list[Run] = []
    begun = time.monotonic()
    try:
        for planned in plan:
            started = time.monotonic()
            run = train(planned, options)
            runs.append(run)
            result = f"start-up {run.startup.total:.2f} s, later {run.later:.2f} s"
            if run.error is not None:
                result = f"FAILED: {run.error}\n{_end_of(run.log)}\n    all of it: {run.log}"
            left = (time.monotonic() - begun) / len(runs) * (len(plan) - len(runs))
            print(
                f"[{len(runs)}/{len(plan)}] {run.name}: {result} "
                f"({time.monotonic() - started:.0f} s in all; about {left:.0f} s left)",
                flush=True,
            )
    except KeyboardInterrupt:
        print(f"stopped after {len(runs)} of {len(plan)} runs")
    good = len(runs) == len(plan) and all(run.error is None for run in runs)
    for model in options.models:
        of_model = [run for run in runs if run.model == model]
        if of_model:
            print(f"\n{model}, seconds, median (least..most)\n{table(of_model)}")
            good &= compare(of_model)
            if options.output:
                draw(of_model)
    if options.output is None and good:
        shutil.rmtree(folder)
    else:
        print(f"reports and logs: {folder}")
    return 0 if good else 1


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line, with the device's sizes where none are given, checked."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--layouts", nargs="+", default=["2x1", "4x1", "4x2"], metavar="PPxVPP")
    add("--models", nargs="+", choices=MODELS, default=["moe"])
    add("--rounds", type=int, default=3, help="runs of each, in turn")
    add("--iterations", type=int, default=5, help="of each run, at least 3")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--caches", choices=("per-rank", "shared"), default="per-rank", help="of compilers")
    add("--output", metavar="FOLDER", help="keeps reports, logs and a picture per layout there")
    add(
        "--identity",
        type=int,
        metavar="N",
        help="one run each of N iterations, and TensorBoard too",
    )
    add("--deterministic", action="store_true", help="--deterministic-mode, and what it needs")
    add("--fp8", choices=("delayed",), help="train in FP8 with this recipe")
    add("--extra", default="", metavar="FLAGS", help="more flags for all runs, as --extra='...'")
    add("--timeout", type=float, default=600, metavar="S", help="of one run")
    add("--script", type=Path, default=REPOSITORY / "pretrain_gpt.py", help="what trains")
    for name in SIZES["cpu"]:
        add(f"--{name.replace('_', '-')}", type=int, help="by default, as the device allows")
    add("--num-experts", type=int, default=8)
    add("--global-batch-size", type=int, default=8, help="of microbatches of one sample")
    options = parser.parse_args(arguments)
    try:
        if options.identity is not None:
            options.iterations, options.rounds = options.identity, 1
        if options.iterations < SETTLED or options.rounds < 1:
            raise ValueError(
                f"{options.iterations} iterations, {options.rounds} rounds: expected at least {SETTLED} "
                "and 1; see --iterations, --identity and --rounds"
            )
        gpus = _gpus() if options.device != "cpu" else 0
        if options.device == "auto":
            options.device = "cuda" if gpus else "cpu"
        for name, size in SIZES[options.device].items():
            if getattr(options, name) is None:
                setattr(options, name, size)
        for layout in options.layouts:
            model_flags("dense", layout, options)
            stages = layout_of(layout)[0]
            shared = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
            if options.device == "cuda" and stages > gpus and not (gpus and shared):
                raise ValueError(
                    f"layout {layout} with {gpus} GPUs: expected a GPU per stage, or a NCCL that lets "
                    "ranks share one (NCCL_MULTI_RANK_GPU_ENABLE=1); or pass --device cpu"
                )
    except ValueError as problem:
        parser.error(str(problem))
    return options


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}..{max(values):.2f})"


def _ratio(over: list[float], under: list[float]) -> str:
    """Of the medians; '-' where the lower one is not positive."""
    divisor = statistics.median(under)
    return f"{statistics.median(over) / divisor:.2f}" if divisor > 0 else "-"


def _median_run(runs: list[Run]) -> Run:
    return sorted(runs, key=lambda run: run.startup.total)[(len(runs) - 1) // 2]


def _end_of(log: Path, lines: int = 25) -> str:
    text = log.read_text(errors="replace") if log.exists() else ""
    return "\n".join(f"    {line}" for line in text.splitlines()[-lines:])


if __name__ == "__main__":
    sys.exit(main())
