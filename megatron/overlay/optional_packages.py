"""Treats a half-installed Transformer Engine as absent.

Megatron-LM guards its optional imports with ``except ImportError``. A Transformer Engine whose
compiled part is missing raises AssertionError instead (others OSError or RuntimeError), which would
kill ``import megatron.core``.
"""

import importlib.abc
import importlib.machinery
import sys
import types
import warnings
from typing import Any, Sequence

GUARDED = "transformer_engine"


class Guard(importlib.abc.MetaPathFinder):
    """Wraps the loaders of ``transformer_engine``: a failing import becomes an explained ImportError."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] != GUARDED:
            return None
        spec = next_spec(self, name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _GuardedLoader(spec.loader)
        return spec


class _GuardedLoader(importlib.abc.Loader):
    def __init__(self, loader: Any):
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        try:
            self._loader.exec_module(module)
        except Exception as error:
            hide(GUARDED)
            reason = f"{type(error).__name__}: {error}"
            warnings.warn(
                f"Transformer Engine is installed but {module.__name__} does not import ({reason}). "
                "It is treated as absent. Uninstall it, or reinstall it with its compiled parts: "
                "pip install 'transformer-engine[core_cu13,pytorch]'",
                RuntimeWarning,
                stacklevel=2,
            )
            raise ImportError(
                f"{module.__name__} does not import: {reason}", name=module.__name__
            ) from error


def hide(package: str) -> None:
    """Makes every later import of ``package`` raise ModuleNotFoundError, as if it were absent."""
    for name in [n for n in sys.modules if n.partition(".")[0] == package]:
        del sys.modules[name]
    sys.modules[package] = None  # type: ignore[assignment]


def next_spec(
    finder: Any, name: str, path: Sequence[str] | None, target: types.ModuleType | None
) -> importlib.machinery.ModuleSpec | None:
    """The spec that the finders behind ``finder`` on ``sys.meta_path`` give."""
    for other in sys.meta_path[sys.meta_path.index(finder) + 1 :]:
        spec = other.find_spec(name, path, target)
        if spec is not None:
            return spec
    return None
