"""The call that puts the layers in place, and the finder that brings them over the stock modules."""

import argparse
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from functools import cached_property
from pathlib import Path
from typing import Any, Sequence

from megatron.overlay import children, optional_packages, pin, sources
from megatron.overlay.definitions import Source
from megatron.overlay.errors import OverlayError
from megatron.overlay.interleaving import InterleavingLoader, Layered

EXTRA_TREES = "MEGATRON_OVERLAY_PATH"
_finder: "Finder | None" = None


def installed() -> "Finder | None":
    """The finder that ``install`` put in place, or None."""
    return _finder


def install(device: str = "auto") -> None:
    """Puts the layers over the stock wheel, for every ``megatron`` import from now on.

    A second call changes nothing.

    Args:
        device: "cuda", "cpu" (the CPU device, ``megatron.overlay.cpu``), or "auto": CPU without a GPU.

    Raises:
        OverlayError: called after a ``megatron`` import; the wheel or a symbol is not what the pin says.
        NoGPUError: "cpu", in a process that uses a GPU already.
        ValueError: unknown ``device``.
    """
    global _finder
    if device not in ("auto", "cuda", "cpu"):
        raise ValueError(f"device={device!r}: expected 'auto', 'cuda' or 'cpu'")
    if _finder is not None:
        return
    early = [
        name
        for name in sys.modules
        if name.startswith("megatron.") and not name.startswith("megatron.overlay")
    ]
    if early:
        raise OverlayError(
            f"megatron.overlay.install() came too late: {min(early)} was imported before it. "
            "Move it above the first megatron import, or use: python -m megatron.overlay run SCRIPT ARGS..."
        )
    finder = Finder(trees())
    finder.verify()

    from megatron.overlay import cpu  # not at the top: it imports torch

    if device == "cpu" or (device == "auto" and not cpu.has_gpu()):
        cpu.install()
    else:
        optional_packages.hide_broken_transformer_engine()
    sources.install()
    children.install("cpu" if cpu.active() else "cuda")
    sys.meta_path.insert(0, finder)
    _finder = finder


def device_argument(argv: list[str]) -> str:
    """The value of ``--device`` in a command line that something else will parse; "auto" without it."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--device", default="auto")
    return parser.parse_known_args(argv)[0].device


def trees() -> list[Path]:
    """Folders with ``core/`` and ``training/`` layers: ours, then those of MEGATRON_OVERLAY_PATH.

    Raises:
        OverlayError: one of them does not exist, or is not laid out as a tree of layers.
    """
    here = Path(__file__).resolve().parent
    ours = here / "layers" if (here / "layers").is_dir() else here.parent
    extra = [Path(p).resolve() for p in os.environ.get(EXTRA_TREES, "").split(os.pathsep) if p]
    for tree in extra:
        if not tree.is_dir():
            raise OverlayError(f"{EXTRA_TREES} names {tree}, which is no folder.")
        if (
            any(tree.rglob("*.py"))
            and not any(tree.glob("core/**/*.py"))
            and not any(tree.glob("training/**/*.py"))
        ):
            raise OverlayError(
                f"{EXTRA_TREES} names {tree}, which has neither core/ nor training/: a layer of "
                "megatron/core/utils.py lies at core/utils.py in it."
            )
    return list(dict.fromkeys([ours, *extra]))


def pin_of(tree: Path) -> Path:
    """The pin of a tree: ``upstream.toml`` in it; for our own, beside this file."""
    ours = trees()[0]
    return (Path(__file__).resolve().parent if tree == ours else tree) / "upstream.toml"


class Finder(importlib.abc.MetaPathFinder):
    """Finds the modules of the layer trees.

    Attributes:
        files: module name -> its files in the trees, in the trees' order.
        roots: the trees.
        stock_root: the folder ``megatron`` of the stock wheel, or None.
    """

    def __init__(self, roots: list[Path], stock_root: Path | None = None):
        self.files: dict[str, list[Path]] = {}
        self.roots, self.stock_root = roots, stock_root or _stock_root(roots)
        self._parsed: dict[str, Layered] = {}
        for root in roots:
            for package in ("core", "training"):
                for path in sorted((root / package).rglob("*.py")):
                    parts = path.relative_to(root).with_suffix("").parts
                    parts = parts[:-1] if parts[-1] == "__init__" else parts
                    self.files.setdefault(".".join(("megatron", *parts)), []).append(path)

    @cached_property
    def pins(self) -> dict[Path, pin.Pin]:
        """For each tree, its pin."""
        return {root: pin.Pin.read(pin_of(root)) for root in self.roots}

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self.files:
            return None
        stock = self._next_spec(name, path, target)
        if stock is not None and stock.origin and name in self._parsed:
            checked = self._parsed[name].stock.path
            if Path(stock.origin).resolve() != checked.resolve():
                raise OverlayError(
                    f"{name} is {checked} for the layers, and {stock.origin} by sys.path as it is now. "
                    "Change sys.path before megatron.overlay.install()."
                )
            loader = InterleavingLoader(self._parsed[name])
            return importlib.util.spec_from_file_location(name, stock.origin, loader=loader)
        file = self.files[name][0]
        folder = [str(file.parent)] if file.name == "__init__.py" else None
        return importlib.util.spec_from_file_location(name, file, submodule_search_locations=folder)

    def _next_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None
    ) -> importlib.machinery.ModuleSpec | None:
        for other in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            spec = other.find_spec(name, path, target)
            if spec is not None:
                return spec
        return None

    def stock_file(self, name: str) -> Path | None:
        """The stock file of module ``name``, found without importing it."""
        if self.stock_root is not None:
            module = self.stock_root.joinpath(*name.split(".")[1:])
            for path in (module.with_suffix(".py"), module / "__init__.py"):
                if path.is_file():
                    return path
        return None

    def layers_of(self, root: Path) -> dict[str, Path]:
        """Module name -> file, for those modules of ``root`` that the wheel has too."""
        return {
            module: file
            for module, files in self.files.items()
            for file in files
            if file.is_relative_to(root) and self.stock_file(module)
        }

    def verify(self) -> None:
        """Parses every layer and its target.

        Raises:
            OverlayError: the installed wheel is not what the pins say, or a layer does not fit it.
        """
        for root, one in self.pins.items():
            pin.require_environment(one.version)
            lines = [
                f"{module}: {line}"
                for module, file in self.layers_and_pinned(root).items()
                for line in self.misfits(root, module, file)
            ]
            if lines:
                pin.drifted(
                    f"the layers do not fit the installed megatron-core ({one.version} is pinned):\n  "
                    + "\n  ".join(lines)
                    + f"\nRead what changed, mend the layer, then run: {pin.REFRESH}"
                )
        for module, files in self.files.items():
            if len(files) > 1 and not self.stock_file(module):
                raise OverlayError(
                    f"two trees bring {module}, which the wheel has not: {files[0]} and {files[1]}. "
                    "Rename one."
                )

    def layers_and_pinned(self, root: Path) -> dict[str, Path | None]:
        """As ``layers_of``, and None for each module that only the pin of ``root`` names."""
        return dict(
            sorted({**dict.fromkeys(self.pins[root].symbols), **self.layers_of(root)}.items())
        )

    def misfits(self, root: Path, module: str, file: Path | None) -> list[str]:
        """One line for each symbol of ``module`` on which tree ``root``, its pin and the wheel disagree.

        Raises:
            OverlayError: the layer cannot run over the wheel's module at all.
        """
        pinned = self.pins[root].symbols.get(module, {})
        if file is None:
            symbols = ", ".join(pinned) or "nothing of it"
            return [f"pinned ({symbols}), but gone from {self.stock_root} or from {root}"]
        layered = self.layered(module)
        layered.takers()
        return pin.differences(pinned, layered.stock, layered.layer(file))

    def layered(self, module: str) -> Layered:
        """A module for which ``layers_of`` a tree has a file, parsed."""
        if module not in self._parsed:
            stock = self.stock_file(module)
            assert stock is not None  # layers_of gives only modules that the wheel has
            if stock.name == "__init__.py":
                raise OverlayError(
                    f"{self.files[module][0]}: {module} is a package of the wheel, and an __init__ "
                    "cannot be layered. Layer the module that defines what you want to change."
                )
            self._parsed[module] = Layered(
                Source.read(module, stock),
                [Source.read(module, file) for file in self.files[module]],
            )
        return self._parsed[module]


def _stock_root(trees: list[Path]) -> Path | None:
    """The folder ``megatron`` that Python takes ``megatron.core`` from: there it is a package."""
    import megatron

    for folder in map(Path, megatron.__path__):
        if Path(folder, "core", "__init__.py").is_file() and folder.resolve() not in trees:
            return folder
    return None
