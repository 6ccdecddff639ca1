"""What a module defines, read from its syntax tree: the facts that layers and the pin rest on.

A *definition* is a class, a function, or an assignment to a plain name, at the top level of a
module or inside a top-level ``if``, ``try`` or ``with``. A layer *claims* each name that both it and
the stock module define.
"""

import ast
import hashlib
from dataclasses import dataclass
from functools import cached_property
from importlib.util import resolve_name
from pathlib import Path
from typing import Iterator

from megatron.overlay.errors import OverlayError

NAMESPACE = "upstream"  # the fixed name under which a layer reaches what it took over


@dataclass(frozen=True)
class Definition:
    """``node`` defines ``name``; it is, or lies in, ``module.body[statement]``."""

    name: str
    node: ast.stmt
    statement: int


@dataclass(frozen=True)
class Source:
    """A parsed file of ``module``, and all that it defines, in order."""

    module: str
    path: Path
    tree: ast.Module
    all_definitions: tuple[Definition, ...]

    @cached_property
    def definitions(self) -> dict[str, Definition]:
        """Each name's last definition."""
        return {definition.name: definition for definition in self.all_definitions}

    @cached_property
    def imports(self) -> dict[str, set[str]]:
        """Each name that an import statement binds, and all that it may stand for."""
        found: dict[str, set[str]] = {}
        for node in _flat(self.tree.body):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    first = alias.name.partition(".")[0]
                    found.setdefault(alias.asname or first, set()).add(
                        alias.name if alias.asname else first
                    )
            elif isinstance(node, ast.ImportFrom):
                package = self.module.rpartition(".")[0]
                origin = resolve_name("." * node.level + (node.module or ""), package)
                for alias in node.names:
                    found.setdefault(alias.asname or alias.name, set()).add(
                        f"{origin}.{alias.name}"
                    )
        return found

    @classmethod
    def read(cls, module: str, path: Path) -> "Source":
        tree = ast.parse(path.read_bytes(), str(path))
        found = [
            Definition(name, node, index)
            for index, statement in enumerate(tree.body)
            for name, node in _defined([statement])
        ]
        return cls(module, path, tree, tuple(found))


def _flat(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of ``body``, those inside ``if``, ``try`` and ``with`` in place of these."""
    for statement in body:
        if isinstance(statement, (ast.If, ast.Try, ast.With)):
            for field in ("body", "handlers", "orelse", "finalbody"):
                for child in getattr(statement, field, ()):
                    yield from _flat(
                        child.body if isinstance(child, ast.ExceptHandler) else [child]
                    )
        else:
            yield statement


def _defined(body: list[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    for statement in _flat(body):
        if isinstance(statement, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield statement.name, statement
        elif isinstance(statement, ast.Assign):
            for target in statement.targets:
                if isinstance(target, ast.Name):
                    yield target.id, statement
        elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
            if isinstance(statement.target, ast.Name):
                yield statement.target.id, statement


def claims(stock: Source, layer: Source) -> list[str]:
    """The names that ``layer`` takes over from ``stock``, in the order in which stock defines them.

    Raises:
        OverlayError: the layer defines a claimed name twice, orders its claims otherwise than stock
            does, or asks ``upstream`` for a name that one of the two does not define; or a name that
            one of the two imports is something else in the other.
    """
    require_same_imports(stock, layer)
    ours, theirs = layer.definitions, stock.definitions
    claimed = sorted(
        (name for name in ours if name in theirs and name != NAMESPACE),
        key=lambda name: (theirs[name].statement, ours[name].statement),
    )
    for name in claimed:
        if len({d.statement for d in layer.all_definitions if d.name == name}) > 1:
            raise OverlayError(
                f"two layers claim {name}: {layer.path} defines it twice. Merge them into one."
            )
    by_layer = sorted(claimed, key=lambda name: ours[name].statement)
    if [ours[name].statement for name in claimed] != [ours[name].statement for name in by_layer]:
        raise OverlayError(
            f"{layer.path} defines {', '.join(by_layer)} in this order; {stock.path} defines "
            f"{', '.join(claimed)}. Layer and stock run interleaved: follow stock's order."
        )
    for name in _asked_of_upstream(layer.tree):
        if name not in theirs:
            raise OverlayError(
                f"{layer.path} takes over {NAMESPACE}.{name}, but {stock.path} does not define "
                f"{name}: the target is gone. Find where it went and move or delete the layer, "
                "then run: python -m megatron.overlay refresh"
            )
        if name not in ours:
            raise OverlayError(
                f"{layer.path} uses {NAMESPACE}.{name} but does not define {name}: nothing was "
                f"taken over. Use {name} itself; layer and stock share one namespace."
            )
    return claimed


def require_same_imports(one: Source, other: Source) -> None:
    """Raises OverlayError where a name that one file imports is something else in the other.

    Both run in one namespace: the functions of one would silently use what the other meant.
    """
    for first, second in ((one, other), (other, one)):
        for name, origins in first.imports.items():
            if name in first.definitions or origins & second.imports.get(name, set()):
                continue
            if name in second.definitions or name in second.imports:
                verb = "defines" if name in second.definitions else "imports from elsewhere"
                raise OverlayError(
                    f"{first.path} imports {name}, which {second.path} {verb}. They share one "
                    "namespace: in the layer, use another name for it."
                )


def _asked_of_upstream(tree: ast.Module) -> list[str]:
    return sorted(
        {
            node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == NAMESPACE
        }
    )


def digests(name: str, stock: Source, layer: Source) -> dict[str, str]:
    """What the claim on ``name`` relies on in stock: symbol -> digest.

    A class extended by the layer: its bases, and each overridden method or attribute that stock's
    body holds. Anything else: the whole definition.
    """
    theirs, ours = stock.definitions[name].node, layer.definitions[name].node
    if not (isinstance(theirs, ast.ClassDef) and isinstance(ours, ast.ClassDef) and extends(ours)):
        # Every definition: an if and its else may each hold one.
        return {name: digest(*(d.node for d in stock.all_definitions if d.name == name))}
    found = {name: digest(theirs.bases, theirs.keywords)}
    stock_members = members(theirs)
    for member in members(ours):
        if member in stock_members:
            found[f"{name}.{member}"] = digest(stock_members[member])
    return found


def members(node: ast.stmt) -> dict[str, ast.stmt]:
    """What the body of a class defines; nothing for any other node."""
    body = node.body if isinstance(node, ast.ClassDef) else []
    return dict(_defined(body))


def extends(layered: ast.ClassDef) -> bool:
    """Whether the layered class derives from ``upstream.<its name>``."""
    return any(
        isinstance(base, ast.Attribute)
        and isinstance(base.value, ast.Name)
        and (base.value.id, base.attr) == (NAMESPACE, layered.name)
        for base in layered.bases
    )


def digest(*nodes: object) -> str:
    """16 hex digits of a syntax tree: blind to comments, layout, docstrings and Python's version."""
    return hashlib.sha256(repr([_plain(node) for node in nodes]).encode()).hexdigest()[:16]


def _plain(node: object) -> object:
    if isinstance(node, list):
        return [
            _plain(item)
            for item in node
            if not (
                isinstance(item, ast.Expr)
                and isinstance(item.value, ast.Constant)
                and isinstance(item.value.value, str)
            )
        ]
    if isinstance(node, ast.AST):
        fields = [(name, _plain(value)) for name, value in ast.iter_fields(node)]
        return type(node).__name__, [
            (name, value) for name, value in fields if value not in (None, [])
        ]
    return node
