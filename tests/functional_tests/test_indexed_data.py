"""Training on indexed data: a blend of two datasets, split."""

import math

import numpy
import pytest
import torch

from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from tests.functional_tests import cases

EOD = 256


def _write(prefix, byte: int) -> str:
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.uint16)
    for length in range(20, 120):
        builder.add_item(torch.tensor([byte] * length + [EOD]))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("indexed")
    flags = cases.arguments(
        None,
        mock_data=None,
        vocab_size=None,
        tokenizer_type="ByteLevelTokenizer",
        data_path=f"0.5 {_write(folder / 'a', 65)} 0.5 {_write(folder / 'b', 66)}",
        split="80,20,0",
        data_cache_path=folder / "cache",
        eod_mask_loss=True,
        train_iters=20,
        lr=1e-2,
        eval_iters=1,
        eval_interval=20,
    )
    print(cases.run({"indexed": flags}, folder))
    return folder


@pytest.mark.timeout(300)
def test_learns_two_letters_of_two_datasets(trained):
    losses = cases.losses(trained, "indexed")
    assert losses[0] > math.log(258) - 0.5
    # A document goes on with its letter: had other data been read, there would be nothing to learn.
    assert losses[-1] < 0.2
    assert cases.losses(trained, "indexed", "lm loss validation")[-1] < 0.2
