"""Runs attention over context parallel ranks, on gloo, for test_context_parallel_attention.py.

    python context_parallel_ranks.py FOLDER

Megatron-LM is imported once, and a process forked for each rank. FOLDER/cases.pt: {name: case}, whole sequences
among it; what rank r of n makes of its part goes to FOLDER/{n}.{r}.pt, what it prints to FOLDER/{n}.{r}.log.
"""

import sys
from datetime import timedelta
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import megatron.overlay  # noqa: E402

megatron.overlay.install(device="cpu")

import torch  # noqa: E402

from megatron.core import parallel_state  # noqa: E402
from megatron.core.tensor_parallel.random import (  # noqa: E402
    get_cuda_rng_tracker,
    model_parallel_cuda_manual_seed,
)
from megatron.core.transformer.dot_product_attention import DotProductAttention  # noqa: E402
from megatron.core.transformer.multi_token_prediction import roll_tensor  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402
from megatron.core.utils import get_batch_on_this_cp_rank  # noqa: E402
from tests.unit_tests import forked_ranks  # noqa: E402

SIZES = (2, 4)
TIMEOUT = 60  # seconds for the ranks of one size; they take about 2


def main(folder: Path) -> int:
    """Runs the ranks of every size; returns 1 if one of them failed."""
    cases = torch.load(folder / "cases.pt", weights_only=False)
    for size in SIZES:
        body = partial(_attend, folder, cases, size)
        log = lambda rank: folder / f"{size}.{rank}.log"  # noqa: E731
        if not forked_ranks.run(size, body, log, TIMEOUT):
            return 1
    return 0


def _attend(folder: Path, cases: dict, size: int, rank: int) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo",
        store=torch.distributed.FileStore(str(folder / f"store{size}"), size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=TIMEOUT),
    )
    parallel_state.initialize_model_parallel(context_parallel_size=size)
    results = {name: _run(case, size) for name, case in cases.items()}
    torch.save(results, folder / f"{size}.{rank}.pt")
    torch.distributed.barrier()


def _run(case: dict, size: int) -> dict[str, list[torch.Tensor]]:
    """Outputs and gradients for each of the case's seeds."""
    group = parallel_state.get_context_parallel_group()
    batch = get_batch_on_this_cp_rank(dict(case["batch"]), is_hybrid_cp=False, cp_group=group)
    if "tokens" in batch:
        rolled, total = roll_tensor(batch["tokens"], cp_group=group)
        return {"outputs": [rolled], "total": [total]}

    config = TransformerConfig(**case["config"], context_parallel_size=size)
    layer = DotProductAttention(config, **case["layer"]).cuda()
    assert layer.config is config and config.context_parallel_size == size
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.copy_(case["parameters"][name])
    inputs = [batch[name].transpose(0, 1).requires_grad_() for name in ("query", "key", "value")]
    outputs, grads, moved = [], [], []
    for seed in case["seeds"]:
        model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
        before = torch.get_rng_state(), get_cuda_rng_tracker().get_states()["model-parallel-rng"]
        output = layer(*inputs, batch.get("attention_mask"))
        after = torch.get_rng_state(), get_cuda_rng_tracker().get_states()["model-parallel-rng"]
        outputs.append(output.detach())
        grads.append(
            torch.autograd.grad(
                (output * batch["weight"].transpose(0, 1)).sum(), inputs + list(layer.parameters())
            )
        )
        moved.append([not torch.equal(*states) for states in zip(before, after)])
    return {"outputs": outputs, "grads": grads, "generators_moved": moved}


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
