"""Creates communicators on four gloo ranks, for test_prewarm_communicators.py.

    python communicator_ranks.py FOLDER

Megatron-LM is imported once, and a process forked for each rank; rank r writes what it saw of every case to
FOLDER/{r}.json, and what it prints to FOLDER/{r}.log.
"""

import copy
import json
import sys
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import megatron.overlay  # noqa: E402

megatron.overlay.install(device="cpu")

import torch  # noqa: E402

from megatron.core import parallel_state  # noqa: E402
from megatron.core.model_parallel_config import ModelParallelConfig  # noqa: E402
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator  # noqa: E402
from megatron.core.pipeline_parallel.prewarm_communicators import (  # noqa: E402
    exchange_once,
    reduce_once,
    reduced_groups,
)
from megatron.core.process_groups_config import ProcessGroupCollection  # noqa: E402
from tests.unit_tests import forked_ranks  # noqa: E402

RANKS = 4
TIMEOUT = 60  # seconds for all of it; it takes about 2
SIZES = (2, 4)  # of the pipeline
# What decides which groups there are to reduce over: see reduced_groups.
RUNS: dict[str, dict[str, Any]] = {
    "dense": {},
    "experts": {"experts": 4},
    "distributed optimizer": {"distributed": True},
    "two optimizers": {"experts": 4, "distributed": True, "instances": 2},
    "tied": {"tied": True},
    "multi-token prediction": {"prediction": 1},
}
VIRTUAL = (None, 2)
ALONE = torch.zeros(1, 1, 1).shape


def main(folder: Path) -> int:
    """Runs the ranks; returns 1 if one of them failed or hung."""
    log = lambda rank: folder / f"{rank}.log"  # noqa: E731
    return int(not forked_ranks.run(RANKS, partial(_see, folder), log, TIMEOUT))


def _see(folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo",
        store=torch.distributed.FileStore(str(folder / "store"), RANKS),
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=TIMEOUT / 2),
    )
    seen = {f"{size} stages": _run(size, rank) for size in SIZES}
    (folder / f"{rank}.json").write_text(json.dumps(seen))
    torch.distributed.barrier()


def _run(size: int, rank: int) -> dict:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=size)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    seen: dict = {"reduced": {name: _reduce(groups, **run) for name, run in RUNS.items()}}
    for virtual in VIRTUAL:
        for batched in (True, False):
            config = ModelParallelConfig(
                pipeline_model_parallel_size=size,
                virtual_pipeline_model_parallel_size=virtual,
                pipeline_dtype=torch.bfloat16,
                batch_p2p_comm=batched,
                variable_seq_lengths=virtual is None,
            )
            case = f"{virtual or 1} chunks, {'batched' if batched else 'one by one'}"
            seen[case] = _exchange(groups, config, rank)
    parallel_state.destroy_model_parallel()
    return seen


def _reduce(
    groups, experts=None, distributed=False, instances=1, tied=False, prediction=None
) -> dict:
    """For each group its size, and the sum of a reduction of ones that follows prewarm's."""
    if instances > 1:  # parallel_state needs einops for it: each rank alone, and all of them
        alone, _ = torch.distributed.new_subgroups(1)
        groups = copy.copy(groups)
        groups.intra_dp_cp = alone
        groups.inter_dist_opt = torch.distributed.new_group()
    config = SimpleNamespace(num_moe_experts=experts, mtp_num_layers=prediction)
    model = SimpleNamespace(
        share_embeddings_and_output_weights=tied,
        ddp_config=SimpleNamespace(
            use_distributed_optimizer=distributed, num_distributed_optimizer_instances=instances
        ),
    )
    found = reduced_groups(groups, config, model)
    for group in found.values():
        reduce_once(group)
    sums = {}
    for name, group in found.items():
        ones = torch.ones(1)
        torch.distributed.all_reduce(ones, group=group)
        sums[name] = [group.size(), int(ones)]
    return sums


def _exchange(groups: ProcessGroupCollection, config: ModelParallelConfig, rank: int) -> dict:
    """What arrives from the stages before and behind, sent as a schedule sends it after exchange_once."""

    def untouched(*args, **kwargs):
        raise AssertionError("a timer was started")

    exchanged: list[list[str]] = []
    communicate = P2PCommunicator._communicate

    def noting(self, *, tensor_shape, wait_on_reqs=True, **ends):
        used = [end for end, what in ends.items() if what is not None and what is not False]
        exchanged.append(sorted(used))
        return communicate(self, tensor_shape=tensor_shape, wait_on_reqs=wait_on_reqs, **ends)

    config.timers = untouched
    before = dict(vars(config))
    setattr(P2PCommunicator, "_communicate", noting)
    try:
        exchange_once(groups, config)
    finally:
        setattr(P2PCommunicator, "_communicate", communicate)
    unchanged = vars(config) == before
    config.timers = None
    config.variable_seq_lengths = False
    pipeline = P2PCommunicator(groups.pp, config)
    ring = config.virtual_pipeline_model_parallel_size is not None
    after_first = ring or not pipeline.is_pp_first_stage
    before_last = ring or not pipeline.is_pp_last_stage
    own = torch.full(ALONE, rank + 1, dtype=torch.bfloat16)
    received = [
        pipeline.send_forward_recv_forward(own if before_last else None, after_first, ALONE),
        pipeline.send_backward_recv_backward(own * 10 if after_first else None, before_last, ALONE),
    ]
    return {
        "unchanged": unchanged,
        "exchanged": exchanged,
        "received": [None if value is None else int(value) for value in received],
    }


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
