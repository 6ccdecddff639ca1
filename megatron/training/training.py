"""Layer of megatron/training/training.py.

Same as upstream but for:
- train: prewarms the pipeline first, where --pipeline-prewarm asks for it. Before all that the loop sets up,
  so that no timer, tracer, CUDA graph or straggler detector sees the synthetic passes.
- train_step: the first one is watched for what it still compiles.
"""

from megatron.overlay import upstream_of
from megatron.training import pipeline_prewarm

upstream = upstream_of(__name__)


def train_step(*args, **kwargs):
    """As upstream's."""
    with pipeline_prewarm.first_iteration():
        return upstream.train_step(*args, **kwargs)


def train(
    forward_step_func,
    model,
    optimizer,
    opt_param_scheduler,
    train_data_iterator,
    valid_data_iterator,
    process_non_loss_data_func,
    config,
    *args,
    **kwargs,
):
    """As upstream's, after pipeline prewarm."""
    with pipeline_prewarm.startup(model, optimizer, config, kwargs.get("pg_collection")):
        return upstream.train(
            forward_step_func,
            model,
            optimizer,
            opt_param_scheduler,
            train_data_iterator,
            valid_data_iterator,
            process_non_loss_data_func,
            config,
            *args,
            **kwargs,
        )
