"""Installs the layers in the processes that ``multiprocessing`` starts afresh (spawn, forkserver).

Such a process runs nothing of its parent but the main script, and that only down to its
``if __name__ == "__main__"``: without this it would import stock modules, silently.
"""

from multiprocessing import spawn
from typing import Any

_IN_CHILD = """
import sys
sys.path[:] = path
import megatron.overlay
megatron.overlay.install(device)
"""


class _Install:
    """Pickled here, it is unpickled there as the call of ``install``."""

    def __init__(self, path: list[str], device: str):
        self._names = {"path": path, "device": device}

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (_IN_CHILD, self._names)


def install(device: str) -> None:
    """Makes every later spawned process call ``megatron.overlay.install(device)`` before all else."""
    preparation_data = spawn.get_preparation_data

    def with_layers(name: str) -> dict[str, Any]:
        data = preparation_data(name)
        return {**data, "megatron.overlay": _Install(data["sys_path"], device)}

    spawn.get_preparation_data = with_layers
