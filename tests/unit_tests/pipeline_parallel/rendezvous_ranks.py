"""Runs ranks that meet, fail and die in prewarm's rendezvous, on gloo, for test_prewarm_rendezvous.py.

    python rendezvous_ranks.py FOLDER

torch is imported once, and a process forked for each rank of each case. What a rank met goes to FOLDER/{case}.{rank}.json,
what it prints to FOLDER/{case}.{rank}.log, and how all ended (exit status, or None where it had to be killed) to FOLDER/ended.json.
"""

import contextlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

# torch looks up the host names of its stores' connections, which may take seconds, more than the cases give a rank.
os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"

import torch  # noqa: E402

# As a module of its own: it needs torch alone, and importing megatron.core would take as long as many cases.
sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "megatron/core/pipeline_parallel"))
import prewarm_rendezvous  # noqa: E402

sys.path.pop(0)
Rendezvous = prewarm_rendezvous.Rendezvous

LIMIT = 60  # seconds for a case
AT_ONCE = 8  # cases
LONG, SHORT = 40, 3  # the run's own time-out, in seconds
CONNECT = 50  # seconds of gloo's and the store's own time-out: longer than all that is tested


def success(rank):
    first = Rendezvous(stage=rank, timeout=timedelta(seconds=LONG))
    nothing = first.agree(None)
    agreed = first.agree(f"reason of {rank}" if rank else None)
    flag = torch.distributed.distributed_c10d._get_default_store()
    with first.guard():
        first.step("chunk 0 forward")
        if rank == 2:
            time.sleep(1)
            flag.set("last rank has left the body", "1")
    last_had_left = flag.check(["last rank has left the body"])
    gathered = first.gather(f"µ of {rank} " * (10_000 if rank == 1 else 1))
    second = Rendezvous(stage=rank, timeout=timedelta(seconds=LONG))
    for _ in range(2):
        with second.guard():
            pass
    agreed_again = second.agree("again" if rank == 0 else None)
    torch.distributed.barrier()  # rank 0 holds the store
    return {
        "nothing": nothing,
        "agreed": agreed,
        "agreed_again": agreed_again,
        "last_had_left": last_had_left,
        "gathered": gathered and [[text[:6], len(text)] for text in gathered],
    }


def raises(rank):
    with _guard(rank):
        if rank == 1:
            raise ValueError("no kernel\nfor this shape")


def store_host_raises(rank):
    with _guard(rank):
        if rank == 0:
            raise ValueError("no kernel")


def raises_beside_collective(rank):
    with _guard(rank):
        if rank == 1:
            time.sleep(0.5)
            raise ValueError("no kernel")
        torch.distributed.all_reduce(torch.ones(4))


def raises_and_stays(rank):
    """The failed rank's process does not end, so that neither do the collectives of the others."""
    try:
        raises_beside_collective(rank)
    except prewarm_rendezvous.PrewarmError:
        time.sleep(2 * LIMIT)


def two_raise(rank):
    with _guard(rank):
        torch.distributed.barrier()
        if rank < 2:
            raise ValueError(f"no kernel on {rank}")


def raises_beside_steps(rank):
    with _guard(rank) as rendezvous:
        if rank == 1:
            raise ValueError("no kernel")
        for chunk in range(1, 2000):
            time.sleep(0.02)
            rendezvous.step(f"chunk {chunk} forward")


def slower_than_the_time_out(rank):
    with _guard(rank, SHORT) as rendezvous:
        for chunk in range(5 * rank):
            rendezvous.step(f"chunk {chunk} forward")
            time.sleep(SHORT / 2)
    torch.distributed.barrier()  # rank 0 holds the store


def interrupted(rank):
    with _guard(rank):
        if rank == 1:
            raise KeyboardInterrupt


def stuck(rank):
    with _guard(rank, SHORT):
        if rank == 1:
            time.sleep(2 * LIMIT)


def absent(rank):
    if rank == 2:
        rendezvous = Rendezvous(stage=rank, timeout=timedelta(seconds=SHORT))
        rendezvous.step("chunk 7 forward")
        torch.distributed.barrier()
        time.sleep(2 * LIMIT)
    with _guard(rank, SHORT):
        pass


def killed(rank):
    with _guard(rank, SHORT):
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)


def killed_beside_collective(rank):
    with _guard(rank):
        if rank == 2:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        torch.distributed.all_reduce(torch.ones(4))


def store_host_killed(rank):
    with _guard(rank):
        if rank == 0:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)


def nobody_to_agree_with(rank):
    if rank == 1:
        time.sleep(2 * LIMIT)
    Rendezvous(stage=rank, timeout=timedelta(seconds=SHORT)).agree("reason")


def file_store(rank):
    return _on_another_store(rank, torch.distributed.FileStore(str(_folder / "store"), 2))


def polled_store(rank):
    return _on_another_store(
        rank, _NoClone(torch.distributed.distributed_c10d._get_default_store())
    )


# The case's ranks, and those of them that outlast it; the slowest first.
CASES: dict[Callable, tuple[int, tuple[int, ...]]] = {
    absent: (3, (2,)),
    killed: (3, ()),
    nobody_to_agree_with: (2, (1,)),
    slower_than_the_time_out: (2, ()),
    stuck: (3, ()),
    killed_beside_collective: (3, ()),
    raises_and_stays: (3, (1,)),
    success: (3, ()),
    raises: (3, ()),
    store_host_raises: (3, ()),
    raises_beside_collective: (3, ()),
    two_raise: (3, ()),
    raises_beside_steps: (2, ()),
    interrupted: (2, ()),
    store_host_killed: (3, ()),
    file_store: (2, ()),
    polled_store: (2, ()),
}


@contextlib.contextmanager
def _guard(rank, timeout=LONG):
    rendezvous = Rendezvous(stage=10 + rank, timeout=timedelta(seconds=timeout))
    torch.distributed.barrier()
    with rendezvous.guard():
        rendezvous.step("chunk 0 backward")
        yield rendezvous


def _on_another_store(rank, store):
    arguments = {"store": store, "rank": rank, "world_size": 2}
    rendezvous = Rendezvous(stage=10 + rank, timeout=timedelta(seconds=LONG), **arguments)
    agreed = rendezvous.agree("reason" if rank == 1 else None)
    with rendezvous.guard():
        pass
    gathered = rendezvous.gather(f"text {rank}")
    message = None
    try:
        with rendezvous.guard():
            if rank == 1:
                raise ValueError("no kernel")
    except prewarm_rendezvous.PrewarmError as error:
        message = str(error)
    return {"agreed": agreed, "gathered": gathered, "failed": message}


class _NoClone(torch.distributed.Store):
    """A store that gives no second connection, and whose waits would keep the other threads out."""

    def __init__(self, store):
        super().__init__()
        self.inner = store

    def wait(self, keys, timeout=None):
        if threading.current_thread() is not threading.main_thread():
            raise AssertionError("the watcher waits on the main thread's connection")
        self.inner.wait(keys, timeout)

    def set(self, key, value):
        self.inner.set(key, value)

    def get(self, key):
        return self.inner.get(key)

    def add(self, key, value):
        return self.inner.add(key, value)

    def check(self, keys):
        return self.inner.check(keys)

    def compare_set(self, key, expected, desired):
        return self.inner.compare_set(key, expected, desired)


_folder = Path()


def main(folder: Path) -> None:
    """Runs every case, a few at once."""
    global _folder
    _folder = folder
    waiting = list(CASES)
    running: dict[Callable, tuple[dict[int, int], float]] = {}
    ended: dict[str, dict[int, int | None]] = {}
    while waiting or running:
        while waiting and len(running) < AT_ONCE:
            case = waiting.pop(0)
            running[case] = (_fork_ranks(case), time.monotonic() + LIMIT)
            ended[case.__name__] = {}
        for case, (ranks, deadline) in list(running.items()):
            statuses = ended[case.__name__]
            for rank, child in list(ranks.items()):
                pid, status = os.waitpid(child, os.WNOHANG)
                if pid:
                    statuses[rank] = os.waitstatus_to_exitcode(status)
                    del ranks[rank]
            outlasting = CASES[case][1]
            if all(rank in outlasting for rank in ranks) or time.monotonic() > deadline:
                for rank, child in ranks.items():
                    os.kill(child, signal.SIGKILL)
                    os.waitpid(child, 0)
                    statuses[rank] = None
                del running[case]
        time.sleep(0.02)
    (folder / "ended.json").write_text(json.dumps(ended))


def _fork_ranks(case) -> dict[int, int]:
    size, _ = CASES[case]
    port_out, port_in = os.pipe()
    ranks = {rank: _fork(case, rank, size, port_out, port_in) for rank in range(size)}
    os.close(port_out)
    os.close(port_in)
    return ranks


def _fork(case, rank: int, size: int, port_out: int, port_in: int) -> int:
    child = os.fork()
    if child:
        return child
    try:
        log = os.open(_folder / f"{case.__name__}.{rank}.log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        torch.set_num_threads(1)
        prewarm_rendezvous.ANSWER_TIMEOUT = 4.0
        prewarm_rendezvous.ABORT_AFTER = 1.0
        prewarm_rendezvous.EXIT_AFTER = 3.0
        connect = timedelta(seconds=CONNECT)
        if rank == 0:
            store = torch.distributed.TCPStore("127.0.0.1", 0, size, True, connect, False)
            os.write(port_in, b"%6d" % store.port * (size - 1))
        else:
            port = int(os.read(port_out, 6))
            store = torch.distributed.TCPStore("127.0.0.1", port, size, False, connect)
        torch.distributed.init_process_group(
            "gloo", store=store, rank=rank, world_size=size, timeout=connect
        )
        torch.distributed.barrier()
        result: dict[str, Any] = {"ended": "returned", "message": "", "cause": None}
        try:
            result["value"] = case(rank)
        except BaseException as error:
            traceback.print_exc()
            result["ended"], result["message"] = type(error).__name__, str(error)
            result["cause"] = type(error.__cause__).__name__ if error.__cause__ else None
        result["threads"] = [
            thread.name for thread in threading.enumerate() if "prewarm" in thread.name
        ]
        (_folder / f"{case.__name__}.{rank}.json").write_text(json.dumps(result))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)  # at once, as a process may that holds the store


if __name__ == "__main__":
    main(Path(sys.argv[1]))
