"""How ranks agree, wait for each other and fail together around prewarm (the multi-rank cases: rendezvous_ranks.py)."""

import json
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from megatron.core.pipeline_parallel import prewarm_rendezvous
from megatron.core.pipeline_parallel.prewarm_rendezvous import PrewarmError, Rendezvous
from tests.unit_tests import forked_ranks

RANKS = Path(__file__).parent / "rendezvous_ranks.py"
LAUNCH_TIMEOUT = 200  # seconds; it takes about 30
TIME_OUT = "s, the run's own time-out (--distributed-timeout-minutes)"
NO_KERNEL = "chunk 0 backward: ValueError: no kernel"
NEXT = "traceback, or train without --pipeline-prewarm"


class Cases:
    """What all ranks of all cases met."""

    def __init__(self, folder):
        self.folder = folder
        self.ended = json.loads((folder / "ended.json").read_text())

    def statuses(self, case):
        """Each rank's exit status; None for one that was still running after a minute, or when all others had ended."""
        return [status for _, status in sorted(self.ended[case].items())]

    def result(self, case, rank):
        file = self.folder / f"{case}.{rank}.json"
        assert file.exists(), self.log(case, rank)
        return json.loads(file.read_text())

    def results(self, case):
        return [self.result(case, rank) for rank in range(len(self.ended[case]))]

    def log(self, case, rank):
        return (self.folder / f"{case}.{rank}.log").read_text()

    def message(self, case, rank):
        """The PrewarmError with which a rank ended, having ended its watcher too."""
        result = self.result(case, rank)
        assert (result["ended"], result["threads"]) == ("PrewarmError", []), self.log(case, rank)
        return result["message"]


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rendezvous")
    forked_ranks.launch(RANKS, folder, LAUNCH_TIMEOUT)
    return Cases(folder)


def failure(rank, cause):
    return f"pipeline prewarm failed on rank {rank} (pipeline stage {10 + rank}) in {cause}"


def test_success_keeps_all_ranks_until_the_last_and_tells_all_of_them_the_same(cases):
    results = cases.results("success")
    assert [result["ended"] for result in results] == ["returned"] * 3, cases.log("success", 0)
    assert [result["threads"] for result in results] == [[]] * 3
    values = [result["value"] for result in results]
    for value in values:
        assert value["nothing"] == {}
        assert value["agreed"] == {"1": "reason of 1", "2": "reason of 2"}
        assert value["last_had_left"]
        assert value["agreed_again"] == {"0": "again"}
    texts = [["µ of 0", 7], ["µ of 1", 70_000], ["µ of 2", 7]]
    assert [value["gathered"] for value in values] == [texts, None, None]


@pytest.mark.parametrize(
    "case, rank, cause",
    [
        ("raises", 1, f"{NO_KERNEL} for this shape"),
        ("store_host_raises", 0, NO_KERNEL),
        ("raises_beside_collective", 1, NO_KERNEL),
        ("raises_beside_steps", 1, NO_KERNEL),
    ],
    ids=["beside-waiting-ranks", "with-the-store", "beside-a-collective", "beside-ranks-at-work"],
)
def test_all_ranks_end_with_the_failure_of_the_one_that_raised(cases, case, rank, cause):
    assert set(cases.statuses(case)) == {0}
    for other in range(len(cases.statuses(case))):
        expected = failure(rank, cause)
        if other != rank:
            expected += f". See rank {rank}'s {NEXT}"
        assert cases.message(case, other) == expected
    assert cases.result(case, rank)["cause"] == "ValueError"


def test_a_collective_that_breaks_with_the_failed_rank_is_the_cause_of_its_failure_only(cases):
    causes = [result["cause"] for result in cases.results("raises_beside_collective")]
    assert causes == ["RuntimeError", "ValueError", "RuntimeError"]
    assert "Connection closed by peer" in cases.log("raises_beside_collective", 0)


def test_of_two_failures_all_ranks_report_the_same(cases):
    messages = [cases.message("two_raise", rank) for rank in range(3)]
    first = min(messages, key=len)  # the failing rank's own, without what to do next
    assert first in [failure(rank, f"{NO_KERNEL} on {rank}") for rank in range(2)]
    assert [message for message in messages if not message.startswith(first)] == []
    assert cases.result("two_raise", 0)["cause"] == "ValueError"
    assert cases.result("two_raise", 1)["cause"] == "ValueError"


def test_an_interrupt_passes_and_is_told_to_the_others(cases):
    assert cases.result("interrupted", 1)["ended"] == "KeyboardInterrupt"
    expected = failure(1, "chunk 0 backward: KeyboardInterrupt. See rank 1's ") + NEXT
    assert cases.message("interrupted", 0) == expected


def test_a_rank_that_cannot_leave_a_collective_prints_the_failure_and_ends(cases):
    assert cases.statuses("raises_and_stays") == [1, None, 1]
    for rank in (0, 2):
        log = cases.log("raises_and_stays", rank)
        assert f"rank {rank}: {failure(1, NO_KERNEL)}. See rank 1's {NEXT}\n" in log
        assert f"rank {rank}: ended, as it does not come back from chunk 0 backward\n" in log
        assert "in raises_beside_collective" in log  # where its main thread was


def test_a_rank_that_stays_in_a_step_is_named_on_all_and_ends(cases):
    assert cases.statuses("stuck") == [0, 1, 0]
    stuck = "pipeline prewarm failed: rank 1 (pipeline stage 11) has been in chunk 0 backward"
    stuck += f" for more than 3 {TIME_OUT}"
    for rank in (0, 2):
        assert cases.message("stuck", rank) == f"{stuck}. See rank 1's {NEXT}"
    assert f"rank 1: {stuck}\n" in cases.log("stuck", 1)


@pytest.mark.parametrize(
    "case, statuses, missing",
    [
        ("absent", [0, 0, None], "rank 2 (pipeline stage 2) in chunk 7 forward"),
        ("killed", [0, 0, -signal.SIGKILL], "rank 2 (pipeline stage 12) in chunk 0 backward"),
        ("nobody_to_agree_with", [0, None], "rank 1 before prewarm"),
    ],
)
def test_a_rank_that_does_not_come_is_named_with_what_it_did_last(cases, case, statuses, missing):
    assert cases.statuses(case) == statuses
    for rank in range(len(statuses) - 1):
        message = cases.message(case, rank)
        assert f"after 3 {TIME_OUT}, still missing: {missing}. No answer from {missing}:" in message


def test_a_rank_killed_in_a_collective_is_named_beside_the_error_that_it_made(cases):
    assert cases.statuses("killed_beside_collective") == [0, 0, -signal.SIGKILL]
    for rank in (0, 1):
        message = cases.message("killed_beside_collective", rank)
        assert "in chunk 0 backward: RuntimeError: " in message
        assert ". No answer from rank 2 (pipeline stage 12) in chunk 0 backward: look" in message


def test_the_store_lost_with_rank_0_is_told_as_such(cases):
    assert cases.statuses("store_host_killed") == [-signal.SIGKILL, 0, 0]
    for rank in (1, 2):
        message = cases.message("store_host_killed", rank)
        assert "torch.distributed's store is lost (DistNetworkError: " in message
        assert "Rank 0's process, or torchrun's on its node, holds it" in message


@pytest.mark.parametrize("case", ["file_store", "polled_store"])
def test_other_stores_do_too(cases, case):
    failed = failure(1, "the start of prewarm: ValueError: no kernel")
    values = [result["value"] for result in cases.results(case)]
    assert [value["agreed"] for value in values] == [{"1": "reason"}] * 2
    assert [value["gathered"] for value in values] == [["text 0", "text 1"], None]
    assert [value["failed"] for value in values] == [f"{failed}. See rank 1's {NEXT}", failed]


def watchers():
    return [thread for thread in threading.enumerate() if "prewarm" in thread.name]


def local(seconds=60.0, **arguments):
    return Rendezvous(stage=3, timeout=timedelta(seconds=seconds), **arguments)


def test_one_process_without_process_groups():
    assert not torch.distributed.is_initialized()
    rendezvous = local()
    assert rendezvous.agree(None) == {}
    assert rendezvous.agree("reason") == {0: "reason"}
    with rendezvous.guard():
        rendezvous.step("chunk 0 forward")
        assert len(watchers()) == 1
    assert rendezvous.gather("text") == ["text"]
    with pytest.raises(PrewarmError) as caught, rendezvous.guard():
        rendezvous.step("chunk 1 forward")
        raise ValueError("no kernel\n\nfor this\nshape\nat all")
    expected = "rank 0 (pipeline stage 3) in chunk 1 forward: ValueError: no kernel for this shape"
    assert str(caught.value) == f"pipeline prewarm failed on {expected}"
    assert isinstance(caught.value.__cause__, ValueError)
    assert watchers() == []


def test_a_prewarm_finds_nothing_of_an_earlier_one_on_the_same_store():
    store = torch.distributed.HashStore()
    alone = {"store": store, "rank": 0, "world_size": 1}
    with pytest.raises(PrewarmError, match="no kernel"), local(**alone).guard():
        raise ValueError("no kernel")
    again = local(**alone)
    assert again.agree("reason") == {0: "reason"}
    with again.guard():
        pass


def test_a_world_of_one_leaves_the_process_groups_store_alone(single_rank):
    store = torch.distributed.distributed_c10d._get_default_store()
    before = store.num_keys()
    with local().guard():
        pass
    assert store.num_keys() == before


def test_each_step_has_the_whole_time_out():
    rendezvous = local(seconds=2.0)
    with rendezvous.guard():
        for chunk in range(3):
            rendezvous.step(f"chunk {chunk} forward")
            time.sleep(1)
    expected = "rank 0 .pipeline stage 3. has been in chunk 9 forward for more than 0.2 s"
    with pytest.raises(PrewarmError, match=expected):
        rendezvous = local(seconds=0.2)
        with rendezvous.guard():
            rendezvous.step("chunk 9 forward")
            time.sleep(1)
    assert watchers() == []


def test_a_rank_waits_as_long_as_another_makes_steps(cases):
    results = cases.results("slower_than_the_time_out")
    assert [result["ended"] for result in results] == ["returned"] * 2, results


def test_collectives_are_aborted_under_a_main_thread_that_is_still_at_work(monkeypatch):
    aborted = threading.Event()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    abort = torch.distributed.distributed_c10d
    monkeypatch.setattr(abort, "_abort_process_group", aborted.set)
    monkeypatch.setattr(prewarm_rendezvous, "ABORT_AFTER", 0.1)
    store = torch.distributed.HashStore()
    with pytest.raises(PrewarmError, match="has been in the start of prewarm"):
        with local(seconds=0.1, store=store, rank=0, world_size=1).guard():
            aborted.wait(10)  # less than EXIT_AFTER
    assert aborted.is_set()
    assert watchers() == []


def test_of_many_missing_ranks_eight_are_named(monkeypatch):
    monkeypatch.setattr(prewarm_rendezvous, "ANSWER_TIMEOUT", 0.1)
    monkeypatch.setattr(prewarm_rendezvous, "MARGIN", 0.1)
    store = torch.distributed.HashStore()
    ranks = [local(seconds=0.2, store=store, rank=rank, world_size=20) for rank in range(20)]
    ranks[4].step("chunk 2 backward")
    with pytest.raises(PrewarmError) as caught, ranks[3].guard():
        pass
    missing = str(caught.value).split("still missing: ")[1].split(". No answer from ")
    names = [f"rank {rank} (pipeline stage 3) in the start of prewarm" for rank in range(9)]
    names[4] = "rank 4 (pipeline stage 3) in chunk 2 backward"
    del names[3]
    expected = ", ".join(names) + ", and 11 more"
    assert missing[0] == expected
    assert missing[1].startswith(expected)


def test_a_gather_names_who_did_not_come():
    store = torch.distributed.HashStore()
    with pytest.raises(PrewarmError, match="still missing: rank 1 before prewarm"):
        local(seconds=0.1, store=store, rank=0, world_size=2).gather("text")


def test_who_comes_after_a_failure_is_told_it_and_leaves_at_its_next_step(monkeypatch):
    monkeypatch.setattr(prewarm_rendezvous, "ANSWER_TIMEOUT", 30)
    store = torch.distributed.HashStore()
    first, late = (local(store=store, rank=rank, world_size=2) for rank in range(2))

    def fail():
        with pytest.raises(PrewarmError), first.guard():
            raise ValueError("no kernel")

    failing = threading.Thread(target=fail)
    failing.start()
    with pytest.raises(
        PrewarmError, match="on rank 0 .*no kernel. See rank 0's traceback"
    ) as caught:
        with late.guard():
            failing.join(30)
            time.sleep(0.5)
            late.step("chunk 0 forward")
            raise AssertionError("it goes on")
    assert "it goes on" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert watchers() == []


def test_a_second_failure_does_not_replace_the_first():
    store = torch.distributed.HashStore()
    ranks = [local(store=store, rank=rank, world_size=3) for rank in range(3)]
    messages = {}

    def fail(rank):
        with pytest.raises(PrewarmError) as caught, ranks[rank].guard():
            raise ValueError(f"no kernel on {rank}")
        messages[rank] = str(caught.value)

    failing = [threading.Thread(target=fail, args=(rank,)) for rank in range(3)]
    for thread in failing:
        thread.start()
        time.sleep(0.5)  # after which the failure before is most likely on the store
    for thread in failing:
        thread.join(60)
    first = min(messages.values(), key=len)
    assert len(messages) == 3
    assert [message for message in messages.values() if not message.startswith(first)] == []


def test_rank_0_keeps_the_store_until_the_others_have_read_the_failure(monkeypatch):
    read, order = prewarm_rendezvous._Meeting.read, []

    def read_late(meeting, key):
        if key == "silent" and meeting.rendezvous.rank == 1:
            time.sleep(0.5)
            order.append("rank 1 has read")
        return read(meeting, key)

    monkeypatch.setattr(prewarm_rendezvous._Meeting, "read", read_late)
    store = torch.distributed.HashStore()
    ranks = [local(store=store, rank=rank, world_size=2) for rank in range(2)]

    def fail():
        with pytest.raises(PrewarmError), ranks[0].guard():
            raise ValueError("no kernel")
        order.append("rank 0 leaves")

    failing = threading.Thread(target=fail)
    failing.start()
    with pytest.raises(PrewarmError), ranks[1].guard():
        pass
    failing.join(60)
    assert order == ["rank 1 has read", "rank 0 leaves"]


@pytest.mark.parametrize("call", ["agree", "gather", "step"])
def test_a_lost_store_is_named_outside_a_guard_too(call):
    host = torch.distributed.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    client = torch.distributed.TCPStore("127.0.0.1", host.port, None, False, wait_for_workers=False)
    rendezvous = local(store=client, rank=1, world_size=2)
    del host
    with pytest.raises(PrewarmError, match="store is lost .DistNetworkError: .*Rank 0's process"):
        getattr(rendezvous, call)("text")


def test_a_fake_process_group_has_nobody_to_wait_for(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: "fake")
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 3)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 8)
    with local().guard():
        pass
    assert local().agree("reason") == {0: "reason"}
