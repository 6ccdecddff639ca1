"""Layer of megatron/training/initialize.py.

Same as upstream but for:
- initialize_megatron: starts without CUDA on the CPU device, and says so once.
"""

from megatron.overlay import cpu, upstream_of

upstream = upstream_of(__name__)


def initialize_megatron(allow_no_cuda=False, *args, **kwargs):
    """As upstream's; ``allow_no_cuda`` is implied on the CPU device."""
    result = upstream.initialize_megatron(allow_no_cuda or cpu.active(), *args, **kwargs)
    if cpu.active():
        print_rank_0("> no GPU is used: CPU device, collectives over gloo")  # noqa: F821
    return result
