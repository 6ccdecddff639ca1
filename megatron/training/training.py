"""Layer of megatron/training/training.py.

Same as upstream but for:
- train: prewarms the pipeline first, where --pipeline-prewarm asks for it. Before all that the loop sets up,
  so that no timer, tracer, CUDA graph or straggler detector sees the synthetic passes.
- train_step: the first one is watched for what it still compiles.
"""

import inspect

from megatron.overlay import upstream_of
from megatron.training import pipeline_prewarm

upstream = upstream_of(__name__)


def train_step(*args, **kwargs):
    """As upstream's."""
    with pipeline_prewarm.first_iteration():
        return upstream.train_step(*args, **kwargs)


def train(*args, **kwargs):
    """As upstream's, after pipeline prewarm."""
    given = inspect.signature(upstream.train).bind(*args, **kwargs).arguments
    with pipeline_prewarm.startup(
        given["model"], given["optimizer"], given["config"], given.get("pg_collection")
    ):
        return upstream.train(*args, **kwargs)
