"""Ranks for tests: a script in a session of its own, that imports once and forks a process per rank."""

import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Callable


def launch(script: Path, folder: Path, timeout: float = 180) -> None:
    """Runs ``script FOLDER`` to its end; nothing of it is left, whatever happens.

    Raises:
        AssertionError: it failed; with what it printed, and the folder's logs.
        subprocess.TimeoutExpired: it took longer than ``timeout`` seconds.
    """
    process = subprocess.Popen(
        [sys.executable, str(script), str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        start_new_session=True,
    )
    try:
        printed = process.communicate(timeout=timeout)[0]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    logs = "".join(f"--- {log.name}\n{log.read_text()}" for log in sorted(folder.glob("*.log")))
    assert process.returncode == 0, printed + logs


def run(
    ranks: int, body: Callable[[int], None], log: Callable[[int], Path], timeout: float
) -> bool:
    """Forks ``ranks`` processes, each of which runs ``body(rank)`` and prints to ``log(rank)``.

    Returns whether all ended well within ``timeout`` seconds; when one fails the others are killed.
    """
    running = {_fork(rank, body, log(rank)) for rank in range(ranks)}
    deadline = time.monotonic() + timeout
    failed = False
    while running and not failed:
        for child in list(running):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                running.discard(child)
                failed |= status != 0
        failed |= time.monotonic() > deadline
        time.sleep(0.01)
    for child in running:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return not failed


def _fork(rank: int, body: Callable[[int], None], log: Path) -> int:
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        file = os.open(log, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, 1)
        os.dup2(file, 2)
        body(rank)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
