"""How the ranks of a pipeline prewarm agree, wait for each other, and fail together.

Prewarm works each rank's model chunks without pipeline communication. Should one rank fail or hang, the others
would notice only when a collective times out, and not why. So the ranks meet on torch.distributed's store, which
needs no rank to be well: a failure is published there once, and every rank ends with the message of the rank that failed.

Thousands of ranks may share one store: each blocks in one wait, and what takes a search is done by one rank.
"""

import base64
import contextlib
import faulthandler
import json
import os
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import PrefixStore, Store, distributed_c10d

# Seconds.
ANSWER_TIMEOUT = 10.0  # for every rank to say that it has seen a failure
MARGIN = 2.0  # for words on their way: what a stuck rank says itself, what is read from rank 0
ABORT_AFTER = 5.0  # from a failure until a main thread still at work has its collectives aborted
EXIT_AFTER = 20.0  # from there until its process is ended
POLL_INTERVAL = 0.5  # of stores that have no second connection to wait on

MAX_NAMED = 8  # ranks in a message
TIMEOUT_FLAG = "the run's own time-out (--distributed-timeout-minutes)"


class PrewarmError(RuntimeError):
    """Prewarm failed on some rank; the message names rank, pipeline stage, step and cause."""


class Rendezvous:
    """The meeting point of all ranks for one prewarm. Every rank makes one, and calls its methods in the same order.

    Args:
        stage: This rank's pipeline stage, for messages.
        timeout: How long this rank may stay in one step, and waits for others of which none begins another step.
        store: Shared by all ranks. Default: torch.distributed's; without it, or in a world of one, a local one.
        rank: Default: torch.distributed's.
        world_size: Default: torch.distributed's.
    """

    def __init__(
        self,
        *,
        stage: int,
        timeout: timedelta,
        store: Store | None = None,
        rank: int | None = None,
        world_size: int | None = None,
    ):
        distributed = torch.distributed.is_initialized()
        if distributed and torch.distributed.get_backend() == "fake":
            distributed = False  # one process that plays a rank: nobody else would come
        if rank is None:
            rank = torch.distributed.get_rank() if distributed else 0
        if world_size is None:
            world_size = torch.distributed.get_world_size() if distributed else 1
        if store is None:
            alone = not distributed or world_size == 1
            store = (
                torch.distributed.HashStore() if alone else distributed_c10d._get_default_store()
            )
        self.rank, self.stage, self.world_size = rank, stage, world_size
        self.timeout = timeout.total_seconds()
        # The store keeps the count, so that keys of an earlier prewarm, of this process or the one before, are not met.
        prefix = f"pipeline_prewarm/{store.add(f'pipeline_prewarm/{rank}', 1)}"
        self._store = PrefixStore(prefix, store)
        # For the watcher: a wait locks its connection, and the main thread may be in one. Made here, and not in a
        # guard, as it takes seconds where the host names of its ends are looked up in vain.
        self._watched: Store | None = None
        with contextlib.suppress(RuntimeError):  # the store has no second one, or has gone
            self._watched = self._store.clone()  # type: ignore[attr-defined]
        self._meetings = 0
        self._watcher: _Watcher | None = None
        self.step("the start of prewarm")

    def agree(self, value: str | None) -> dict[int, str]:
        """The values, by rank, of the ranks whose value is not None; every rank gets the same.

        Raises:
            PrewarmError: A rank did not come in time.
        """
        with _loss_of_store_named():
            meeting = self._next_meeting()
            store = meeting.store
            if value is not None:
                store.set(f"value/{store.add('values', 1)}", json.dumps([self.rank, value]))
            if meeting.count_in("arrived"):
                keys = [f"value/{1 + index}" for index in range(store.add("values", 0))]
                meeting.settle("outcome", {"values": [json.loads(store.get(key)) for key in keys]})
            if not meeting.appears("outcome", self.timeout):
                meeting.settle_by_one("outcome", meeting.absence)
            outcome = meeting.read("outcome")
            if "message" in outcome:
                raise PrewarmError(meeting.conclude(outcome))
            return dict(sorted(outcome["values"]))

    def step(self, name: str) -> None:
        """Names what this rank does from now on, for messages, and restarts its time-out.

        Raises:
            PrewarmError: In a guard, when another rank has failed by now.
        """
        if self._watcher is not None and self._watcher.message:
            raise PrewarmError(self._watcher.message)
        self.current = (name, time.monotonic())  # one tuple, as the watcher reads it at any moment
        with _loss_of_store_named():
            self._store.set(f"step/{self.rank}", json.dumps([self.stage, name]))
            self.steps_of_all = self._store.add("steps", 1)

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Around the work. It returns when all ranks have done theirs, and raises on all when one has not.

        A rank that is still at work ``ABORT_AFTER + EXIT_AFTER`` seconds after a failure prints it and ends.

        Raises:
            PrewarmError: With one message on all ranks. KeyboardInterrupt and SystemExit pass through.
        """
        meeting = self._next_meeting()
        self.step("the start of prewarm")
        watcher = self._watcher = _Watcher(self, meeting)
        watcher.start()
        try:
            yield
            self.step("the wait for the other ranks")
            watcher.left_body.set()
            if meeting.count_in("arrived"):
                meeting.settle("outcome", {})
            message = watcher.result()
        except BaseException as error:
            watcher.left_body.set()
            failure = self._failure(error)
            with contextlib.suppress(RuntimeError):  # the store has gone: the watcher says so
                meeting.settle("outcome", failure)
            message = watcher.result() or failure["message"]
            if not isinstance(error, Exception) or str(error) == message:
                raise
            raise PrewarmError(message) from error
        finally:
            self._watcher = None
        if message:
            raise PrewarmError(message)

    def gather(self, text: str) -> list[str] | None:
        """Every rank's text, in the order of ranks, on rank 0; None on the others, which do not wait.

        Raises:
            PrewarmError: On rank 0, when a rank did not come in time.
        """
        with _loss_of_store_named():
            meeting = self._next_meeting()
            # A store's values are strings to its callers: Base85.
            packed = base64.b85encode(zlib.compress(text.encode())).decode()
            meeting.store.set(f"text/{self.rank}", packed)
            if meeting.count_in("arrived"):
                meeting.settle("outcome", {})
            if self.rank != 0:
                return None
            if not meeting.appears("outcome", self.timeout):
                raise PrewarmError(meeting.absence()["message"])
            texts = []
            for rank in range(self.world_size):
                packed_text = base64.b85decode(meeting.store.get(f"text/{rank}"))
                texts.append(zlib.decompress(packed_text).decode())
            return texts

    def _next_meeting(self) -> "_Meeting":
        self._meetings += 1
        return _Meeting(self, self._store, f"meeting/{self._meetings}")

    def _failure(self, error: BaseException) -> dict[str, Any]:
        lines = [line for line in str(error).splitlines() if line.strip()][:3]
        cause = ": ".join([type(error).__name__, *([" ".join(lines)[:500]] if lines else [])])
        where = f"on rank {self.rank} (pipeline stage {self.stage}) in {self.current[0]}"
        return {"rank": self.rank, "message": f"pipeline prewarm failed {where}: {cause}"}


class _Meeting:
    """What the ranks do together on the store once: who has come, and what became of it."""

    def __init__(self, rendezvous: Rendezvous, steps: Store, name: str, polls: bool = False):
        self.rendezvous, self.steps, self.name, self.polls = rendezvous, steps, name, polls
        self.store = PrefixStore(name, steps)

    def count_in(self, name: str) -> bool:
        """Counts this rank in; True on the last."""
        self.store.set(f"{name}/{self.rendezvous.rank}", "1")
        return self.store.add(name, 1) == self.rendezvous.world_size

    def settle(self, key: str, value: Any) -> None:
        """Sets ``key``, unless some rank has."""
        self.store.compare_set(key, "", json.dumps(value))

    def settle_by_one(self, key: str, make: Callable[[], Any]) -> None:
        """Sets ``key`` to what one rank makes; others make it when that rank does not."""
        if self.store.add(f"{key}/makers", 1) == 1 or not self.appears(key, ANSWER_TIMEOUT):
            self.settle(key, make())

    def read(self, key: str) -> Any:
        return json.loads(self.store.get(key))

    def appears(self, key: str, seconds: float) -> bool:
        """Whether ``key`` is set within ``seconds``. RuntimeError when the store has gone."""
        end = time.monotonic() + seconds
        if not self.polls:
            # Whole milliseconds, of which 0 would wait forever. A time-out comes as one of several RuntimeErrors.
            with contextlib.suppress(RuntimeError):
                self.store.wait([key], timedelta(seconds=max(seconds, 0) + 0.01))
                return True
        while not self.store.check([key]):
            if time.monotonic() >= end:
                return False
            time.sleep(POLL_INTERVAL)
        return True

    def conclude(self, failure: dict[str, Any]) -> str:
        """Waits until every rank has seen the failure, and returns the message for this one.

        Only then may the failing rank's process go away: it may hold the store, and the collectives that
        break with it would look like failures of their own.
        """
        if self.count_in("seen"):
            self.settle("silent", "")
        elif not self.appears("silent", ANSWER_TIMEOUT):
            self.settle_by_one("silent", lambda: self._absent("seen"))
        silent = self.read("silent")
        if self.count_in("read"):
            self.settle("all read", True)
        elif self.rendezvous.rank == 0:
            self.appears("all read", MARGIN if silent else ANSWER_TIMEOUT)
        message = failure["message"]
        if silent:
            message += f". No answer from {silent}: look there first, it has died or hangs"
        if failure["rank"] is None:
            message += ". See their logs, or train without --pipeline-prewarm"
        elif failure["rank"] != self.rendezvous.rank:
            message += (
                f". See rank {failure['rank']}'s traceback, or train without --pipeline-prewarm"
            )
        return message

    def absence(self) -> dict[str, Any]:
        """The failure that ranks did not arrive in time."""
        message = f"pipeline prewarm failed: after {self.rendezvous.timeout:g} s, {TIMEOUT_FLAG}"
        return {"rank": None, "message": f"{message}, still missing: {self._absent('arrived')}"}

    def _absent(self, name: str) -> str:
        """The ranks that were not counted in, and what the first of them do; found by halving."""
        absent, ranges = [], [range(self.rendezvous.world_size)]
        while ranges:
            ranks = ranges.pop()
            if self.store.check([f"{name}/{rank}" for rank in ranks]):
                continue
            if len(ranks) > 1:
                middle = len(ranks) // 2
                ranges += [ranks[middle:], ranks[:middle]]
            else:
                absent.append(ranks[0])
        named = [self._described(rank) for rank in absent[:MAX_NAMED]]
        if len(absent) > MAX_NAMED:
            named.append(f"and {len(absent) - MAX_NAMED} more")
        return ", ".join(named)

    def _described(self, rank: int) -> str:
        if not self.steps.check([f"step/{rank}"]):
            return f"rank {rank} before prewarm"
        stage, step = json.loads(self.steps.get(f"step/{rank}"))
        return f"rank {rank} (pipeline stage {stage}) in {step}"


class _Watcher(threading.Thread):
    """Waits for the outcome of a guard while the main thread works, and watches that thread's time-out."""

    def __init__(self, rendezvous: Rendezvous, meeting: _Meeting):
        super().__init__(name="pipeline prewarm watcher", daemon=True)
        self.rendezvous = rendezvous
        steps, polls = rendezvous._watched or meeting.steps, rendezvous._watched is None
        self.meeting = _Meeting(rendezvous, steps, meeting.name, polls)
        self.left_body = threading.Event()
        self.message: str | None = None  # "" for success

    def result(self) -> str:
        """The failure's message, "" for success. Unlike a wait on the store, Ctrl-C interrupts it."""
        while self.is_alive():
            self.join(max(self._remaining(), 0) + 5 * ANSWER_TIMEOUT)
            if self._remaining() < -4 * ANSWER_TIMEOUT:
                break  # it waits for the store alone
        return _lost_store("it does not answer") if self.message is None else self.message

    def run(self) -> None:
        try:
            self.message = self._await_outcome()
        except Exception as error:
            self.message = _lost_store(f"{type(error).__name__}: {error}")
        if self.message and not self.left_body.is_set():
            # At once, and not by sys.stderr, whose lock the main thread may hold: as the failed rank's process ends,
            # NCCL's own watchdog may end this one.
            os.write(2, f"rank {self.rendezvous.rank}: {self.message}\n".encode())
            if not self.left_body.wait(ABORT_AFTER):
                self._end_body()

    def _await_outcome(self) -> str:
        me, meeting = self.rendezvous, self.meeting
        while not meeting.appears("outcome", self._remaining()):
            if self._remaining() > 0:
                continue
            if not self.left_body.is_set():
                text = f"rank {me.rank} (pipeline stage {me.stage}) has been in {me.current[0]} for"
                text = f"pipeline prewarm failed: {text} more than {me.timeout:g} s, {TIMEOUT_FLAG}"
                meeting.settle("outcome", {"rank": me.rank, "message": text})
            elif (steps := meeting.steps.add("steps", 0)) != me.steps_of_all:
                # Some rank has more chunks, or slower ones, than this: none is stuck that does not say so.
                me.steps_of_all, me.current = steps, (me.current[0], time.monotonic())
            else:
                meeting.settle_by_one("outcome", meeting.absence)
        failure = meeting.read("outcome")
        return meeting.conclude(failure) if failure else ""

    def _remaining(self) -> float:
        """Seconds that the main thread may still be where it is; another step may begin meanwhile."""
        margin = MARGIN if self.left_body.is_set() else 0
        return self.rendezvous.current[1] + self.rendezvous.timeout + margin - time.monotonic()

    def _end_body(self) -> None:
        """Frees a main thread that does not come back, or ends the process.

        NCCL's collectives end when they are aborted. gloo's do not: they end as the failed rank's process
        does, or at their own time-out.
        """
        # In a thread of its own, as it may itself hang.
        abort = threading.Thread(
            target=_abort_collectives, name="pipeline prewarm abort", daemon=True
        )
        abort.start()
        if self.left_body.wait(EXIT_AFTER):
            abort.join(EXIT_AFTER)
            return
        me = self.rendezvous
        os.write(
            2, f"rank {me.rank}: ended, as it does not come back from {me.current[0]}\n".encode()
        )
        faulthandler.dump_traceback(2)
        os._exit(1)


def _abort_collectives() -> None:
    abort = getattr(distributed_c10d, "_abort_process_group", None)  # private: may go
    if abort is None or not torch.distributed.is_initialized():
        return
    try:
        abort()
    except Exception as error:
        os.write(2, f"pipeline prewarm: aborting the process groups: {error}\n".encode())


def _lost_store(cause: str) -> str:
    return (
        f"pipeline prewarm failed: torch.distributed's store is lost ({cause}). Rank 0's process, or torchrun's"
        " on its node, holds it: see its log, or train without --pipeline-prewarm"
    )


@contextlib.contextmanager
def _loss_of_store_named() -> Iterator[None]:
    try:
        yield
    except PrewarmError:
        raise
    except RuntimeError as error:
        raise PrewarmError(_lost_store(f"{type(error).__name__}: {error}")) from error
