"""Makes ``inspect`` find the source of classes in modules that two files make up.

``inspect`` looks a class up by name in its module's one ``__file__``, so of a layered class and the
stock class that it hides it would show the same text, or none. Functions need nothing: their code
objects know their file. Megatron-LM's argument factory reads config classes by ``inspect.getsource``.
"""

import inspect
import linecache
from typing import Any
from weakref import WeakKeyDictionary

_sources: "WeakKeyDictionary[type, tuple[str, int]]" = WeakKeyDictionary()


def remember(cls: type, path: str, line: int) -> None:
    """``cls`` is defined in file ``path``, its first decorator or ``class`` on 1-based ``line``."""
    _sources[cls] = (path, line)


def install() -> None:
    """Teaches ``inspect.getfile`` and ``inspect.findsource`` the remembered classes."""
    getfile, findsource = inspect.getfile, inspect.findsource

    def getfile_of_layered(object: Any) -> str:
        known = _lookup(object)
        return known[0] if known else getfile(object)

    def findsource_of_layered(object: Any) -> tuple[list[str], int]:
        known = _lookup(object)
        if known is None:
            return findsource(object)
        linecache.checkcache(known[0])
        return linecache.getlines(known[0]), known[1] - 1

    inspect.getfile, inspect.findsource = getfile_of_layered, findsource_of_layered


def _lookup(object: Any) -> tuple[str, int] | None:
    return _sources.get(object) if inspect.isclass(object) else None
