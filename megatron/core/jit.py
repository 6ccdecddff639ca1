"""Layer of megatron/core/jit.py.

Same as upstream but for:
- enable_jit_fuser: on the CPU device the fuser stays off. Inductor would start a C++ compiler for some
  forty small functions in every process, which costs minutes and gains nothing there. For tests and
  measurements of what compiling costs, MEGATRON_OVERLAY_CPU_COMPILE names a backend of torch.compile.
"""

import functools
import os

from megatron.overlay import cpu, upstream_of

upstream = upstream_of(__name__)


def enable_jit_fuser():
    """Fuses with torch.compile on a GPU; by default leaves functions as they are on the CPU device."""
    global jit_fuser
    backend = os.environ.get("MEGATRON_OVERLAY_CPU_COMPILE")
    if not cpu.active():
        upstream.enable_jit_fuser()
    elif backend:
        import torch

        jit_fuser = functools.partial(torch.compile, backend=backend)
    else:
        disable_jit_fuser()  # noqa: F821  (stock, same namespace)
