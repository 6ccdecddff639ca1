"""Communicators that iteration 1 would create, on four ranks over gloo."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron.core.pipeline_parallel.prewarm_communicators import reduce_once, reduced_groups
from megatron.core.process_groups_config import ProcessGroupCollection
from tests.unit_tests import forked_ranks
from tests.unit_tests.pipeline_parallel.model_chunks import build

RANKS = Path(__file__).with_name("communicator_ranks.py")


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What each rank saw of every case, by the number of pipeline stages."""
    folder = tmp_path_factory.mktemp("communicators")
    forked_ranks.launch(RANKS, folder)
    ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(4)]
    return {size: [rank[f"{size} stages"] for rank in ranks] for size in (2, 4)}


# Names in their order, with the group's ranks on two and on four pipeline stages of four ranks.
REDUCED = {
    "dense": {"tp": (1, 1), "intra_dp_cp": (2, 1), "mp": (2, 4)},
    "experts": {
        "tp": (1, 1),
        "intra_dp_cp": (2, 1),
        "intra_expt_dp": (2, 1),
        "tp_ep_pp": (2, 4),
        "mp": (2, 4),
    },
    "distributed optimizer": {
        "tp": (1, 1),
        "intra_dp_cp": (2, 1),
        "intra_dist_opt": (4, 4),
        "mp": (2, 4),
    },
    "two optimizers": {
        "tp": (1, 1),
        "intra_dp_cp": (1, 1),
        "dp_cp": (2, 1),
        "intra_expt_dp": (2, 1),
        "tp_ep_pp": (2, 4),
        "inter_dist_opt": (4, 4),
        "intra_dist_opt": (4, 4),
        "mp": (2, 4),
    },
    "tied": {"tp": (1, 1), "intra_dp_cp": (2, 1), "mp": (2, 4), "embd": (2, 2)},
    "multi-token prediction": {"tp": (1, 1), "intra_dp_cp": (2, 1), "mp": (2, 4), "embd": (2, 2)},
}


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("run", REDUCED)
def test_each_group_that_the_run_needs_is_used_by_all_its_ranks(seen, run, stages):
    """Nobody waits for a rank that is in no embedding group: of four stages the two in the middle."""
    for rank, found in enumerate(seen[stages]):
        expected = {
            name: [sizes[stages == 4]] * 2  # its size, and a sum of ones over it
            for name, sizes in REDUCED[run].items()
            if name != "embd" or stages == 2 or rank in (0, 3)
        }
        assert list(found["reduced"][run].items()) == list(expected.items())


def test_what_is_no_group_is_left_out(single_rank):
    world = torch.distributed.group.WORLD
    other, unused = torch.distributed.new_group(), torch.distributed.new_group()
    groups = SimpleNamespace(
        tp=world, intra_dp_cp=None, dp_cp=other, mp=world, embd=-100, inter_dist_opt=unused
    )
    config = SimpleNamespace(num_moe_experts=None, mtp_num_layers=2)
    model = SimpleNamespace(share_embeddings_and_output_weights=True)  # without a wrapper
    assert reduced_groups(groups, config, model) == {"tp": world, "dp_cp": other}


def test_groups_of_a_real_chunk(fresh_process):
    """The optimizer is described by the wrapper, the embedding by what it wraps."""
    groups = ProcessGroupCollection.use_mpu_process_groups()
    (chunk,) = build("dsa mtp", ["last"])
    expected = "tp intra_dp_cp intra_expt_dp tp_ep_pp intra_dist_opt mp embd".split()
    assert list(reduced_groups(groups, chunk.config, chunk)) == expected
    (chunk,) = build("stubs", ["middle"])
    assert list(reduced_groups(groups, chunk.config, chunk)) == ["tp", "intra_dp_cp", "mp"]


def test_one_zero_is_reduced(single_rank, monkeypatch):
    reduced = []
    monkeypatch.setattr(
        torch.distributed,
        "all_reduce",
        lambda tensor, group: reduced.append((tensor.tolist(), group)),
    )
    reduce_once(torch.distributed.group.WORLD)
    assert reduced == [([0], torch.distributed.group.WORLD)]


WAYS = ("batched", "one by one")
FORWARD, BACKWARD = (["recv_prev", "tensor_send_next"], ["recv_next", "tensor_send_prev"])


def neighbours(stages, rank, ring):
    """The ranks of the stages before and behind, each None at an end of the pipeline."""
    step, stage = 4 // stages, rank // (4 // stages)
    return [
        (rank + way * step) % 4 if ring or 0 <= stage + way < stages else None for way in (-1, 1)
    ]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("stages", [2, 4])
def test_neighbours_have_exchanged_and_nothing_is_left_over(seen, stages, chunks, way):
    for rank, found in enumerate(seen[stages]):
        before, behind = neighbours(stages, rank, ring=chunks == 2)
        exchanged = found[f"{chunks} chunks, {way}"]["exchanged"]
        assert exchanged == [
            [end for end, other in zip(ends, others) if other is not None]
            for ends, others in ((FORWARD, (before, behind)), (BACKWARD, (behind, before)))
        ]
        # Rank r then sends r + 1 onwards and 10 times that back; a zero would be exchange_once's own.
        assert found[f"{chunks} chunks, {way}"]["received"] == [
            None if before is None else before + 1,
            None if behind is None else 10 * (behind + 1),
        ]


@pytest.mark.parametrize("stages", [2, 4])
def test_the_config_stays_as_it_is(seen, stages):
    """It is given with timers, and without virtual stages with variable_seq_lengths."""
    for rank in seen[stages]:
        assert all(
            rank[f"{chunks} chunks, {way}"]["unchanged"] for chunks in (1, 2) for way in WAYS
        )
