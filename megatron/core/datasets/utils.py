"""Layer of megatron/core/datasets/utils.py.

Same as upstream but for:
- compile_helpers: nothing to do where the built helper imports. Stock runs ``make`` in a folder for which the wheel ships no
  Makefile, and ends the program when that fails; but the wheel ships the helper built.
"""

import importlib.util

from megatron.overlay import upstream_of

upstream = upstream_of(__name__)


def compile_helpers():
    """Builds the C++ dataset helpers, unless ``megatron.core.datasets.helpers_cpp`` is there."""
    if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is None:
        upstream.compile_helpers()
