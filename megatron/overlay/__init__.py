"""The fork's loader: runs this repository's layers over the stock megatron-core wheel.

    import megatron.overlay
    megatron.overlay.install()      # before any other megatron import

or, for a script that must stay as it is, ``python -m megatron.overlay run SCRIPT ARGS...``.
"""

import sys

from megatron.overlay.errors import OverlayError

if sys.version_info < (3, 12):  # first of all: what follows does not import there
    raise OverlayError(
        "Python %d.%d.%d is too old: megatron-core's wheel and this fork need 3.12 or later. "
        "Make the virtual environment with python3.12 or python3.13." % tuple(sys.version_info[:3])
    )

from megatron.overlay.interleaving import upstream_of  # noqa: E402
from megatron.overlay.loader import device_argument, install, installed  # noqa: E402

__all__ = ["OverlayError", "device_argument", "install", "installed", "upstream_of"]
