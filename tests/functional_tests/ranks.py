"""Runs pretraining cases on a few CPU ranks, all from one launch.

Importing Megatron-LM takes longer than a small case. So each rank imports once and forks a child per
case; a case that fails or hangs is killed on every rank, and its output kept.

    python ranks.py CASES.json       (what test_pretraining.py starts)

CASES.json: {"bare": bool, "cases": [{"name", "world_size", "argv", "log", "port", "record", "fault"}]}. With
``bare`` the stock wheel runs without the layers: only the CPU device's stand-ins, and what a user of the
bare wheel would have to patch. With ``record`` each rank writes down the packs that it was given. For
``fault`` see prewarm_faults.py.
"""

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import prewarm_faults

REPOSITORY = Path(__file__).resolve().parents[2]
CASE_TIMEOUT = 180  # seconds; the slowest case takes about 20
LAST_WORDS = 60  # seconds that the other ranks have to end by themselves when one has failed


def main(spec_file: str) -> int:
    """Runs every case in turn; returns 1 if one failed."""
    spec = json.loads(Path(spec_file).read_text())
    pretrain_gpt = _import_bare() if spec["bare"] else _import_layered()
    failed = False
    for case in spec["cases"]:
        started = time.monotonic()
        children = [_fork(case, rank, pretrain_gpt) for rank in range(case["world_size"])]
        status, killed = _wait(children, started + CASE_TIMEOUT)
        failed |= status != 0
        took = f"{time.monotonic() - started:.1f} s"
        print(f"{case['name']}: status {status}, {took}, {killed} ranks killed", flush=True)
    return int(failed)


def _import_layered():
    sys.path.insert(0, str(REPOSITORY))
    import pretrain_gpt

    return pretrain_gpt


def _import_bare():
    """The entry script over the wheel alone, on the CPU."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    sys.path.insert(0, str(REPOSITORY))
    import megatron.overlay
    from megatron.overlay import cpu

    setattr(megatron.overlay, "install", lambda device: cpu.install())
    import pretrain_gpt
    from megatron.core.datasets import utils
    from megatron.training import training

    if hasattr(training, "upstream"):
        raise RuntimeError("the bare wheel was asked for, but layers are in place")
    initialize = training.initialize_megatron
    training.initialize_megatron = lambda **kwargs: initialize(allow_no_cuda=True, **kwargs)
    setattr(utils, "compile_helpers", lambda: None)
    return pretrain_gpt


def _fork(case: dict, rank: int, pretrain_gpt) -> int:
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        os.setpgid(0, 0)  # saving a checkpoint starts processes of its own: they go with the case
        log = os.open(f"{case['log']}.rank{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(case["world_size"]),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(case["port"]),
        )
        sys.argv = ["pretrain_gpt.py", *case["argv"]]
        if case["fault"]:
            prewarm_faults.put_in(case["fault"], rank)
        if case["record"]:
            _record_cu_seqlens(pretrain_gpt, f"{case['log']}.cu_seqlens{rank}")
        pretrain_gpt.main()
        status = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _record_cu_seqlens(pretrain_gpt, file: str) -> None:
    """Writes what each call of ``packed_seq_params_of`` returns, a JSON line each."""
    of = pretrain_gpt.packed_seq_params_of

    def recording(batch):
        params = of(batch)
        with open(file, "a") as lines:
            lines.write(json.dumps([params.cu_seqlens_q.tolist(), params.max_seqlen_q]) + "\n")
        return params

    pretrain_gpt.packed_seq_params_of = recording


def _wait(children: list[int], deadline: float) -> tuple[int, int]:
    """Waits for every child, and leaves no process.

    Returns:
        0 if all end well, else the first bad status, or -1 for a time-out; and how many were killed.
    """
    running, status = set(children), 0
    while running and time.monotonic() < deadline:
        for child in list(running):
            ended, code = os.waitpid(child, os.WNOHANG)
            if ended:
                running.discard(child)
                if code and not status:
                    status = os.waitstatus_to_exitcode(code)
                    deadline = min(deadline, time.monotonic() + LAST_WORDS)
        time.sleep(0.05)
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
    for child in running:
        os.waitpid(child, 0)
    return status or (-1 if running else 0), len(running)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
