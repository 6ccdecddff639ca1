"""The finder and the interleaved execution of layer over stock.

For a module that both the wheel and a layer tree hold, the statements of both files are run in one
namespace: stock up to and including the definition of a name that the layer claims, which becomes
``upstream.<name>``; then the layer up to its own definition, which takes the name over; and so on.
What is left of stock, then of the layer, runs last. Code keeps its own file and line numbers.
"""

import __future__

import argparse
import ast
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Sequence

from megatron.overlay import optional_packages, pin, sources
from megatron.overlay.definitions import NAMESPACE, Definition, OverlayError, Source, claims

EXTRA_TREES = "MEGATRON_OVERLAY_PATH"
_upstream: dict[str, types.SimpleNamespace] = {}
_finder: "Finder | None" = None


def upstream_of(module: str) -> types.SimpleNamespace:
    """What the layers of ``module`` have taken over so far; in a layer: ``upstream_of(__name__)``."""
    if module not in _upstream:
        raise OverlayError(
            f"{module} runs as a layer, but megatron.overlay is not installed in this process, or the "
            "wheel has no such module. Call megatron.overlay.install() before any megatron import."
        )
    return _upstream[module]


def installed() -> "Finder | None":
    """The finder that ``install`` put in place, or None."""
    return _finder


def install(device: str = "auto") -> None:
    """Puts the layers over the stock wheel, for every ``megatron`` import from now on.

    A second call changes nothing.

    Args:
        device: "cuda", "cpu" (the CPU device, ``megatron.overlay.cpu``), or "auto": CPU without a GPU.

    Raises:
        OverlayError: called after a ``megatron`` import; Python, the wheel or a symbol is not what the pin says.
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
            f"megatron.overlay.install() came too late: {early[0]} was imported before it. "
            "Move it above the first megatron import, or use: python -m megatron.overlay run SCRIPT ARGS..."
        )
    finder = Finder(trees())
    finder.verify()
    sources.install()
    sys.meta_path[:0] = [optional_packages.Guard(), finder]
    _finder = finder

    from megatron.overlay import cpu  # not at the top: it imports torch

    if device == "cpu" or (device == "auto" and not cpu.has_gpu()):
        cpu.install()


def device_argument(argv: list[str]) -> str:
    """The value of ``--device`` in a command line that something else will parse; "auto" without it."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--device", default="auto")
    return parser.parse_known_args(argv)[0].device


def trees() -> list[Path]:
    """Folders with ``core/`` and ``training/`` layers: ours, then those of MEGATRON_OVERLAY_PATH."""
    here = Path(__file__).resolve().parent
    ours = here / "layers" if (here / "layers").is_dir() else here.parent
    return [ours, *(Path(p) for p in os.environ.get(EXTRA_TREES, "").split(os.pathsep) if p)]


def pin_of(tree: Path) -> Path:
    """The pin of a tree: ``upstream.toml`` in it; for our own, beside this file."""
    ours = trees()[0]
    return (Path(__file__).resolve().parent if tree == ours else tree) / "upstream.toml"


@dataclass
class Layered:
    """A module that both the wheel and at least one tree hold, parsed."""

    stock: Source
    layers: list[Source]

    def takers(self) -> dict[str, Source]:
        """Claimed name -> the layer that takes it over, in the order in which stock defines them.

        Raises:
            OverlayError: two layers claim one name, or see ``definitions.claims``.
        """
        found: dict[str, Source] = {}
        for layer in self.layers:
            for name in claims(self.stock, layer):
                if name in found:
                    raise OverlayError(
                        f"two layers claim {name} of {self.stock.path}: {found[name].path} and "
                        f"{layer.path}. Merge them into one."
                    )
                found[name] = layer
        statement = {name: self.stock.definitions[name].statement for name in found}
        return dict(sorted(found.items(), key=lambda item: statement[item[0]]))


class Finder(importlib.abc.MetaPathFinder):
    """Finds the modules of the layer trees.

    Attributes:
        files: module name -> its files in the trees, in the trees' order.
        pins: for each tree, its pin.
    """

    def __init__(self, roots: list[Path]):
        self.files: dict[str, list[Path]] = {}
        self.pins = {root: pin.Pin.read(pin_of(root)) for root in roots}
        self._parsed: dict[str, Layered] = {}
        for root in roots:
            for package in ("core", "training"):
                for path in sorted((root / package).rglob("*.py")):
                    parts = path.relative_to(root).with_suffix("").parts
                    parts = parts[:-1] if parts[-1] == "__init__" else parts
                    self.files.setdefault(".".join(("megatron", *parts)), []).append(path)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self.files:
            return None
        stock = optional_packages.next_spec(self, name, path, target)
        if stock is not None and stock.origin and name in self._parsed:
            loader = _InterleavingLoader(self._parsed[name])
            return importlib.util.spec_from_file_location(name, stock.origin, loader=loader)
        file = self.files[name][0]
        folder = [str(file.parent)] if file.name == "__init__.py" else None
        return importlib.util.spec_from_file_location(
            name, file, submodule_search_locations=folder
        )

    def stock_file(self, name: str) -> Path | None:
        """The stock file of module ``name``, found without importing it."""
        import megatron

        for folder in megatron.__path__:
            module = Path(folder).joinpath(*name.split(".")[1:])
            for path in (module.with_suffix(".py"), module / "__init__.py"):
                if path.is_file() and path not in self.files.get(name, []):
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
            lines: list[str] = []
            layers = self.layers_of(root)
            for module in sorted(one.symbols.keys() | layers.keys()):
                if module not in layers:
                    symbols = ", ".join(one.symbols[module]) or "all"
                    lines.append(f"{module}: pinned ({symbols}), but gone from the wheel or {root}")
                    continue
                parsed = self._parse(module)
                layer = next(one for one in parsed.layers if one.path == layers[module])
                lines += pin.differences(one.symbols.get(module, {}), parsed.stock, layer)
                parsed.takers()
            if lines:
                pin.drifted(
                    f"the layers do not fit the installed megatron-core ({one.version} is pinned):\n  "
                    + "\n  ".join(lines)
                    + f"\nRead what changed, mend the layer, then run: {pin.REFRESH}"
                )

    def _parse(self, module: str) -> Layered:
        if module not in self._parsed:
            stock = self.stock_file(module)
            assert stock is not None  # callers give only modules that the wheel has
            if stock.name == "__init__.py":
                raise OverlayError(
                    f"{self.files[module][0]}: {module} is a package of the wheel, and an __init__ "
                    "cannot be layered. Layer the module that defines what you want to change."
                )
            self._parsed[module] = Layered(
                Source.read(stock), [Source.read(file) for file in self.files[module]]
            )
        return self._parsed[module]


class _InterleavingLoader(importlib.abc.Loader):
    def __init__(self, layered: Layered):
        self._layered = layered

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        stock = self._layered.stock
        takers = self._layered.takers()
        namespace = _upstream[module.__name__] = types.SimpleNamespace()
        setattr(module, NAMESPACE, namespace)
        running = _Running(stock)
        layers = {layer.path: _Running(layer, is_layer=True) for layer in self._layered.layers}
        for name, taker in takers.items():
            theirs, layer = stock.definitions[name], layers[taker.path]
            running.run(module, theirs.statement)
            layer.run_leading_imports(module)
            if isinstance(theirs.node, ast.ClassDef):
                _bind_two_argument_super(theirs.node)
            running.run(module, theirs.statement + 1)
            setattr(namespace, name, _set_aside(module, theirs))
            layer.run(module, taker.definitions[name].statement + 1)
        for rest in (running, *layers.values()):
            rest.run(module, len(rest.source.tree.body))


class _Running:
    """One file on its way through: ``position`` is the first statement not yet run."""

    def __init__(self, source: Source, is_layer: bool = False):
        self.source, self.position = source, 0
        self._is_layer = is_layer
        self._flags = 0
        for node in source.tree.body:
            if isinstance(node, ast.ImportFrom) and node.module == "__future__":
                for alias in node.names:
                    self._flags |= getattr(__future__, alias.name).compiler_flag

    def run_leading_imports(self, module: types.ModuleType) -> None:
        """Runs a layer's imports before the first stock definition it takes over exists.

        A module that they import, and that imports this one back, must not find and keep the stock
        definition: it gets an ImportError, and the layer's author imports it inside a function.
        """
        body = self.source.tree.body
        if self.position == 0:
            after = 0
            while after < len(body) and (
                isinstance(body[after], (ast.Import, ast.ImportFrom)) or _is_text(body[after])
            ):
                after += 1
            self.run(module, after)

    def run(self, module: types.ModuleType, until: int) -> None:
        """Runs the statements before index ``until`` that have not run yet."""
        nodes = [
            node
            for node in self.source.tree.body[self.position : until]
            if not (isinstance(node, ast.ImportFrom) and node.module == "__future__")
            and not (_is_text(node) and (self._is_layer or self.position))  # __doc__ is stock's
        ]
        start, self.position = self.position, max(self.position, until)
        if not nodes:
            return
        path = str(self.source.path)
        code = compile(
            ast.Module(nodes, []), path, "exec", flags=self._flags, dont_inherit=True
        )
        exec(code, module.__dict__)
        for definition in self.source.all_definitions:
            if start <= definition.statement < until and isinstance(definition.node, ast.ClassDef):
                defined = module.__dict__.get(definition.name)
                if isinstance(defined, type) and defined.__module__ == module.__name__:
                    sources.remember(defined, path, _first_line(definition.node))


def _set_aside(module: types.ModuleType, definition: Definition) -> Any:
    """Returns what ``definition`` bound, named ``upstream.<name>``: there pickle still finds it."""
    value = module.__dict__[definition.name]
    if isinstance(value, (type, types.FunctionType)) and value.__module__ == module.__name__:
        value.__qualname__ = f"{NAMESPACE}.{value.__qualname__}"
    return value


def _bind_two_argument_super(node: ast.ClassDef) -> None:
    """``super(X, self)`` in stock class X would find the layer's X by name, and recurse for ever."""
    for call in ast.walk(node):
        if (
            isinstance(call, ast.Call)
            and isinstance(call.func, ast.Name)
            and call.func.id == "super"
            and len(call.args) == 2
            and isinstance(call.args[0], ast.Name)
            and call.args[0].id == node.name
        ):
            call.args[0].id = "__class__"


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _first_line(node: ast.ClassDef) -> int:
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
