"""Packages that Megatron-LM uses where it finds them, and that must be as good as absent where they do not work."""

import importlib
import sys
import warnings

TRANSFORMER_ENGINE = "transformer_engine"


def hide_broken_transformer_engine() -> None:
    """Hides a Transformer Engine that is installed but does not import, and warns with the reason.

    Without its compiled part its import raises AssertionError, FileNotFoundError or OSError. Megatron-LM
    guards its own with ``except ImportError`` or less, so ``import megatron.core`` would not survive.
    """
    try:
        importlib.import_module(f"{TRANSFORMER_ENGINE}.pytorch")
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == TRANSFORMER_ENGINE:
            return  # not installed
        hide(TRANSFORMER_ENGINE)
        warnings.warn(
            f"Transformer Engine is installed but does not import ({type(error).__name__}: {error}). It is "
            "treated as absent. Uninstall it, or reinstall it with its compiled parts: "
            "pip install 'transformer-engine[core_cu13,pytorch]'",
            RuntimeWarning,
            stacklevel=3,
        )


def hide(package: str) -> None:
    """Makes every later import of ``package`` raise ModuleNotFoundError, as if it were absent."""
    for name in [n for n in sys.modules if n.partition(".")[0] == package]:
        del sys.modules[name]
    sys.modules[package] = None  # type: ignore[assignment]
