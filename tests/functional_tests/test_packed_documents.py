"""Packed documents over every kind of pipeline stage."""

import pytest

from tests.functional_tests import cases

LAYOUTS = {
    "pp4": (4, dict(pipeline_model_parallel_size=4)),
    "pp2_vpp2": (2, dict(pipeline_model_parallel_size=2, num_layers_per_virtual_pipeline_stage=1)),
    "tp2_pp2": (
        4,
        dict(tensor_model_parallel_size=2, pipeline_model_parallel_size=2, sequence_parallel=True),
    ),
}
ITERATIONS = 2


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packed")
    runs = {
        name: {
            **cases.arguments(None, **layout, train_iters=ITERATIONS),
            "--dataloader-inter-document-masking": True,
            "WORLD_SIZE": ranks,
        }
        for name, (ranks, layout) in LAYOUTS.items()
    }
    print(cases.run(runs, folder, record=True))
    return folder


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.timeout(900)
def test_every_stage_and_rank_gets_the_same_packs(trained, name):
    ranks, layout = LAYOUTS[name]
    first = cases.packs(trained, name, 0)
    chunks = 2 if "num_layers_per_virtual_pipeline_stage" in layout else 1
    assert len(first) == chunks * ITERATIONS * 2  # two microbatches an iteration
    for cu_seqlens, max_seqlen in first:
        assert cu_seqlens[0] == 0 and cu_seqlens[-1] == 128  # two samples of 64 tokens, one row
        lengths = [end - start for start, end in zip(cu_seqlens, cu_seqlens[1:])]
        assert 64 in cu_seqlens and max(lengths) == max_seqlen
    assert any(len(cu_seqlens) > 3 for cu_seqlens, _ in first)  # documents end within a sample
    for rank in range(1, ranks):
        assert sorted(cases.packs(trained, name, rank)) == sorted(first)
