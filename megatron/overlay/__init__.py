"""The fork's loader: runs this repository's layers over the stock megatron-core wheel.

    import megatron.overlay
    megatron.overlay.install()      # before any other megatron import

or, for a script that must stay as it is, ``python -m megatron.overlay run SCRIPT ARGS...``.
"""

from megatron.overlay.definitions import OverlayError
from megatron.overlay.loader import device_argument, install, installed, upstream_of

__all__ = ["OverlayError", "device_argument", "install", "installed", "upstream_of"]
