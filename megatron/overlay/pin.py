"""The pin: which stock wheel the layers were written against, and a digest of all that they take over.

``upstream.toml`` holds the wheel's version and, for each claimed symbol, a digest of its syntax tree.
"""

import os
import tomllib
import warnings
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from megatron.overlay.definitions import Source, claims, digests, members
from megatron.overlay.errors import OverlayError

DISTRIBUTION = "megatron-core"
ALLOW_DRIFT = "MEGATRON_OVERLAY_ALLOW_DRIFT"
REFRESH = "python -m megatron.overlay refresh"


@dataclass
class Pin:
    """Contents of ``upstream.toml``: ``symbols[module][symbol]`` is a hex digest."""

    version: str
    symbols: dict[str, dict[str, str]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> "Pin":
        if not path.is_file():
            raise OverlayError(f"{path} is missing: it pins the layers beside it. Run: {REFRESH}")
        try:
            data = tomllib.loads(path.read_text())
            version = data.pop(DISTRIBUTION)
        except (tomllib.TOMLDecodeError, KeyError) as error:
            raise OverlayError(
                f"{path} is no pin ({error!r}). Write it again: {REFRESH}"
            ) from error
        return cls(version, data)

    def write(self, path: Path) -> None:
        lines = [f"# Written by `{REFRESH}`: what the layers take over, as they last saw it.", ""]
        lines += [f'{DISTRIBUTION} = "{self.version}"']
        for module, symbols in sorted(self.symbols.items()):
            lines += ["", f'["{module}"]']
            lines += [f'"{symbol}" = "{value}"' for symbol, value in sorted(symbols.items())]
        path.write_text("\n".join(lines) + "\n")


def require_environment(pinned: str) -> None:
    """Raises OverlayError unless the pinned wheel is installed."""
    version = installed_version()
    if version is None:
        raise OverlayError(
            f"{DISTRIBUTION} is not installed: the layers need the stock wheel. "
            f"Run: pip install {DISTRIBUTION}=={pinned}"
        )
    if version != pinned:
        drifted(
            f"{DISTRIBUTION} {version} is installed, but the layers are pinned to {pinned}. "
            f"Run: pip install {DISTRIBUTION}=={pinned}, or see what {version} changes: "
            f"python -m megatron.overlay check --against {version}"
        )


def installed_version() -> str | None:
    """The installed wheel's version, or None."""
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return None


def drifted(message: str) -> None:
    """Raises OverlayError, or warns where MEGATRON_OVERLAY_ALLOW_DRIFT=1."""
    if os.environ.get(ALLOW_DRIFT) != "1":
        raise OverlayError(message)
    warnings.warn(f"{ALLOW_DRIFT}=1: {message}", RuntimeWarning, stacklevel=2)


def current(stock: Source, layer: Source) -> dict[str, str]:
    """Digests of all that ``layer`` relies on in ``stock``, as ``refresh`` writes them."""
    found: dict[str, str] = {}
    for name in claims(stock, layer):
        found.update(digests(name, stock, layer))
    return found


def differences(pinned: dict[str, str], stock: Source, layer: Source) -> list[str]:
    """One line for each symbol of which ``layer``, ``stock`` and the pin do not say the same."""
    found = current(stock, layer)
    lines = []
    for symbol in sorted(pinned.keys() | found.keys()):
        if symbol not in found:
            where = (
                f"pinned, but {layer.path} no longer takes it over"
                if _has(stock, symbol)
                else f"the target of {layer.path} is gone from {stock.path}"
            )
            lines.append(f"{symbol}: {where}")
        elif symbol not in pinned:
            lines.append(f"{symbol}: {layer.path} takes it over, but it is not pinned")
        elif pinned[symbol] != found[symbol]:
            lines.append(f"{symbol}: changed in {stock.path}, which {layer.path} builds on")
    return lines


def _has(source: Source, symbol: str) -> bool:
    name, _, member = symbol.partition(".")
    definition = source.definitions.get(name)
    return definition is not None and (not member or member in members(definition.node))
