"""The interleaved execution of layers over a stock module.

The statements of all files are run in one namespace: stock up to and including the definition of a name
that a layer claims, which becomes ``upstream.<name>``; then the layer up to its own definition, which takes
the name over; and so on. What is left of stock, then of the layers, runs last. Code keeps its own file and
line numbers.
"""

import __future__

import ast
import importlib.abc
import importlib.machinery
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.overlay import sources
from megatron.overlay.definitions import NAMESPACE, Source, claims, require_same_imports
from megatron.overlay.errors import OverlayError

_upstream: dict[str, types.SimpleNamespace] = {}


def upstream_of(module: str) -> types.SimpleNamespace:
    """What the layers of ``module`` have taken over so far; in a layer: ``upstream_of(__name__)``."""
    if module not in _upstream:
        raise OverlayError(
            f"{module} runs as a layer, but megatron.overlay is not installed in this process, or the "
            "wheel has no such module. Call megatron.overlay.install() before any megatron import."
        )
    return _upstream[module]


@dataclass
class Layered:
    """A module that both the wheel and at least one tree hold, parsed."""

    stock: Source
    layers: list[Source]

    def takers(self) -> dict[str, Source]:
        """Claimed name -> the layer that takes it over, in the order in which stock defines them.

        Raises:
            OverlayError: two layers define one name, or see ``definitions.claims``.
        """
        found: dict[str, Source] = {}
        for index, layer in enumerate(self.layers):
            found.update(dict.fromkeys(claims(self.stock, layer), layer))
            for other in self.layers[:index]:
                require_same_imports(other, layer)
                both = (other.definitions.keys() & layer.definitions.keys()) - {NAMESPACE}
                if both:
                    raise OverlayError(
                        f"two layers claim {', '.join(sorted(both))} of {layer.module}: {other.path} "
                        f"and {layer.path}. Merge them into one."
                    )
        statement = {name: self.stock.definitions[name].statement for name in found}
        return dict(sorted(found.items(), key=lambda item: statement[item[0]]))

    def layer(self, path: Path) -> Source:
        """The layer in file ``path``."""
        return next(layer for layer in self.layers if layer.path == path)


class Upstream(types.SimpleNamespace):
    """What the layers of a module have taken over: stock definitions, by name."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{NAMESPACE}.{name} does not exist (yet): stock defines {name} later than that, or under a "
            f"condition that does not hold here. Define {name} in a statement of its own, and under "
            f"stock's condition."
        )


class InterleavingLoader(importlib.abc.Loader):
    def __init__(self, layered: Layered):
        self._layered = layered

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        stock, takers = self._layered.stock, self._layered.takers()
        upstream = _upstream[module.__name__] = Upstream()
        setattr(module, NAMESPACE, upstream)
        running = _Running(stock)
        layers = {layer.path: _Running(layer, is_layer=True) for layer in self._layered.layers}
        for definition in stock.all_definitions:
            if definition.name in takers and isinstance(definition.node, ast.ClassDef):
                _bind_two_argument_super(definition.node)
        for name, taker in takers.items():
            statement = stock.definitions[name].statement
            if running.position <= statement:
                running.run(module, statement + 1)
                for other in takers:
                    if stock.definitions[other].statement == statement:
                        _set_aside(module, upstream, other)
            layers[taker.path].run(module, taker.definitions[name].statement + 1)
            if name in vars(upstream):  # the layer's may stand in an if that does not hold
                vars(module).setdefault(name, getattr(upstream, name))
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
        code = compile(ast.Module(nodes, []), path, "exec", flags=self._flags, dont_inherit=True)
        try:
            exec(code, module.__dict__)
        except ImportError as error:
            if not self._is_layer:
                raise
            raise OverlayError(
                f"layer {path} does not import: {error}. If what it imports needs this module in turn, "
                "import it inside the function that uses it."
            ) from error
        for definition in self.source.all_definitions:
            if start <= definition.statement < until and isinstance(definition.node, ast.ClassDef):
                defined = module.__dict__.get(definition.name)
                if isinstance(defined, type) and defined.__module__ == module.__name__:
                    sources.remember(defined, path, _first_line(definition.node))


def _set_aside(module: types.ModuleType, upstream: Upstream, name: str) -> None:
    """Moves what stock bound to ``name`` to ``upstream.<name>``, where pickle still finds it.

    Until the layer defines it, the module has no such name: what the layer imports, and imports this
    module back, must not find and keep the stock definition. Python's ImportError says so.
    """
    if name not in vars(module):
        return  # stock defines it under a condition that does not hold
    value = vars(module).pop(name)
    if isinstance(value, (type, types.FunctionType)) and value.__module__ == module.__name__:
        value.__qualname__ = f"{NAMESPACE}.{value.__qualname__}"
    setattr(upstream, name, value)


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
