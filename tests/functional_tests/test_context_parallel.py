"""A sequence split over context parallel ranks trains as it does whole, up to rounding.

Gradient norms are compared too: Adam's steps, and so the losses, hardly tell a gradient that is scaled wrongly.
"""

import pytest

from tests.functional_tests import cases

MLA = dict(
    multi_latent_attention=True,
    q_lora_rank=32,
    kv_lora_rank=32,
    qk_head_dim=16,
    qk_pos_emb_head_dim=16,
    v_head_dim=16,
)
MODELS = {
    "dense": dict(group_query_attention=True, num_query_groups=2),
    "window": dict(window_size="12,0", softmax_type="off-by-one"),
    # The mask of a sample then ends where documents do.
    "documents": dict(reset_attention_mask=True, reset_position_ids=True),
    "mla": dict(MLA, v_head_dim=24),
    # Indexer and attention weights far from uniform. Of a mean over each rank's tokens upstream takes the
    # indexer's gradient times the context parallel size; of a sum, as here, it takes the gradient itself.
    "dsa": dict(
        **MLA,
        experimental_attention_variant="dsa",
        dsa_indexer_n_heads=4,
        dsa_indexer_head_dim=32,
        dsa_indexer_topk=16,
        dsa_indexer_loss_coeff=1,
        init_method_std=0.2,
        calculate_per_token_loss=True,
        cp_comm_type="allgather",
    ),
}
TAGS = ["lm loss", "grad-norm"]
# WORLD_SIZE and flags, for each model.
SPLITS = {"whole": (1, {}), "cp2": (2, dict(context_parallel_size=2))}
ITERATIONS = 4


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("context_parallel")
    runs = {}
    for model, flags in MODELS.items():
        for split, (ranks, more) in SPLITS.items():
            runs[f"{model}_{split}"] = {
                **cases.arguments(
                    **flags, **more, train_iters=ITERATIONS, attention_dropout=0, hidden_dropout=0
                ),
                "WORLD_SIZE": ranks,
            }
    print(cases.run(runs, folder))
    return folder


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.timeout(900)
def test_two_ranks_train_as_one(trained, model):
    for tag in TAGS + ["indexer loss"] * (model == "dsa"):
        whole = cases.losses(trained, f"{model}_whole", tag)
        assert len(whole) == ITERATIONS
        assert cases.losses(trained, f"{model}_cp2", tag) == pytest.approx(whole, rel=1e-5)


def test_the_models_differ(trained):
    first = {cases.losses(trained, f"{model}_whole")[0] for model in MODELS}
    assert len(first) == len(MODELS)
