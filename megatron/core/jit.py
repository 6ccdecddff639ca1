"""Layer of megatron/core/jit.py.

Same as upstream but for:
- enable_jit_fuser: on the CPU device the fuser stays off. Inductor would start a C++ compiler for some
  forty small functions in every process, which costs minutes and gains nothing there.
"""

from megatron.overlay import cpu, upstream_of

upstream = upstream_of(__name__)


def enable_jit_fuser():
    """Fuses with torch.compile on a GPU; leaves functions as they are on the CPU device."""
    if cpu.active():
        disable_jit_fuser()  # noqa: F821  (stock, same namespace)
    else:
        upstream.enable_jit_fuser()
