"""Layers laid out by hand, with multi-token prediction on a stage that is neither first nor last."""

import pytest
import torch

from tests.functional_tests import cases

ITERATIONS = 3


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("layout")
    flags = {
        **cases.arguments(
            None,
            pipeline_model_parallel_size=4,
            pipeline_model_parallel_layout="Et|tt|tm|L",
            mtp_num_layers=1,
            train_iters=ITERATIONS,
            save_interval=ITERATIONS,
            save=folder / "saved",
            ckpt_format="torch",
        ),
        "WORLD_SIZE": 4,
    }
    print(cases.run({"layout": flags}, folder))
    return folder


@pytest.mark.timeout(300)
def test_copies_of_the_embedding_stay_equal_and_the_output_layer_its_own(trained):
    losses = cases.losses(trained, "layout")
    assert len(losses) == ITERATIONS and losses[-1] < losses[0] - 0.1
    first, _, prediction, last = (
        cases.parameters(trained / "saved", rank, ITERATIONS) for rank in range(4)
    )
    embedding = first["model.embedding.word_embeddings.weight"]
    assert torch.equal(prediction["model.embedding.word_embeddings.weight"], embedding)
    assert not torch.equal(last["model.output_layer.weight"], embedding)
