"""Everything that a pass through model chunks could change, as one flat dict that can be compared.

``fingerprint`` walks the chunks (attributes, parameters, gradients, buffers, hooks, what hangs on them) and all
that lives in the imported modules of Megatron-LM: globals, class attributes, closures, defaults of functions.
Nothing is listed by name, so that state which nobody thought of is found too.
"""

import collections.abc
import dataclasses
import enum
import functools
import hashlib
import os
import random
import sys
import types
from typing import Any

import numpy as np
import torch

PLAIN = (type(None), bool, int, float, str, bytes, enum.Enum, torch.dtype, torch.device, torch.Size)


def fingerprint(chunks: list[torch.nn.Module]) -> dict[str, str]:
    """Path -> description of what is there, tensors by their bytes."""
    walk = _Walk()
    walk.visit("generator of Python", random.getstate())
    walk.visit("generator of NumPy", np.random.get_state())
    walk.visit("generator of torch", torch.get_rng_state())
    walk.visit("torch is recording gradients", torch.is_grad_enabled())
    walk.visit("save_for_backward", torch.autograd.function.FunctionCtx.save_for_backward)
    walk.visit("environment", dict(os.environ))
    for index, chunk in enumerate(chunks):
        walk.visit(f"chunks[{index}]", chunk)
    for name, module in sorted(sys.modules.items()):
        if name.startswith(("megatron.core.", "megatron.training.")):
            walk.module(name, module)
    return walk.found


def differences(before: dict[str, str], after: dict[str, str]) -> list[tuple[str, Any, Any]]:
    """(path, before, after), None where there is no such path."""
    return [
        (path, before.get(path), after.get(path))
        for path in sorted(before.keys() | after.keys())
        if before.get(path) != after.get(path)
    ]


class _Walk:
    def __init__(self) -> None:
        self.found: dict[str, str] = {}
        self.paths: dict[int, str] = {}  # of objects, by id
        self.storages: dict[int, str] = {}  # of tensors
        self.alive: list[Any] = []  # lest an id is given away again

    def module(self, name: str, module: types.ModuleType) -> None:
        for attribute, value in list(vars(module).items()):
            path = f"{name}.{attribute}"
            if attribute.startswith("__"):
                continue
            if isinstance(value, type) and value.__module__ == name:
                for key, member in list(vars(value).items()):
                    if not key.startswith("__") or key == "__call__":
                        self.visit(f"{path}.{key}", _function_of(member))
            else:
                self.visit(path, value)

    def visit(self, path: str, value: Any) -> None:
        if isinstance(value, PLAIN):
            self.found[path] = repr(value)
            return
        first = self.paths.setdefault(id(value), path)
        if first != path:
            self.found[path] = f"same as {first}"
            return
        self.alive.append(value)
        self.found[path] = f"{type(value).__module__}.{type(value).__qualname__}"
        if isinstance(value, torch.Tensor):
            self._tensor(path, value)
        elif isinstance(value, torch.Generator):
            self.found[path] += f" {_digest(value.get_state())}"
        elif isinstance(value, np.ndarray):
            self.found[path] += f" {_hash(value.tobytes())}"
        elif isinstance(value, collections.abc.Mapping):
            self.found[path] += f" of {len(value)}"
            # The keys of hooks are numbers that torch never gives out again.
            numbered = path.endswith("_hooks")
            for index, (key, element) in enumerate(list(value.items())):
                plain = isinstance(key, PLAIN) and not numbered
                self.visit(f"{path}[{repr(key) if plain else index}]", element)
        elif isinstance(value, (list, tuple, collections.deque)):
            self.found[path] += f" of {len(value)}"
            for index, element in enumerate(value):
                self.visit(f"{path}[{index}]", element)
        elif isinstance(value, (set, frozenset)):
            plain_elements = [repr(element) for element in value if isinstance(element, PLAIN)]
            self.found[path] += f" of {len(value)}: {sorted(plain_elements)}"
        elif isinstance(value, types.FunctionType):
            self._function(path, value)
        elif isinstance(value, functools._lru_cache_wrapper):
            self.found[path] += f" of {value.cache_info().currsize}"
        elif isinstance(value, types.MethodType):
            self.found[path] += f" {value.__qualname__}"
        elif isinstance(value, functools.partial):
            self.visit(f"{path}.args", (value.func, value.args, value.keywords))
        elif isinstance(value, (type, types.ModuleType)):
            self.found[path] += f" {value.__name__}"
        elif _is_opened(value):
            for name, element in list(vars(value).items()):
                if name in ("_modules", "_parameters", "_buffers"):
                    for key, registered in element.items():
                        self.visit(f"{path}.{key}", registered)
                else:
                    self.visit(f"{path}.{name}", element)

    def _tensor(self, path: str, tensor: torch.Tensor) -> None:
        first = self.storages.setdefault(tensor.untyped_storage()._cdata, path)
        self.found[path] += (
            f" {tensor.dtype} {list(tensor.shape)} {_digest(tensor)} in the storage of {first}, "
            f"requires_grad={tensor.requires_grad}"
        )
        if tensor.is_leaf:
            self.visit(f"{path}.grad", tensor.grad)
        for name, value in list(vars(tensor).items()):
            self.visit(f"{path}.{name}", value)

    def _function(self, path: str, function: types.FunctionType) -> None:
        # One that is made anew for every use, as DDP's hooks are, is the same as another of its name.
        local = "<locals>" in function.__qualname__
        self.found[path] += f" {function.__qualname__} {'' if local else id(function)}"
        for name in ("__dict__", "__defaults__", "__kwdefaults__"):
            if getattr(function, name):
                self.visit(f"{path}.{name}", getattr(function, name))
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
            try:
                self.visit(f"{path}.{name}", cell.cell_contents)
            except ValueError:  # not bound yet
                self.found[f"{path}.{name}"] = "unbound"


def _is_opened(value: Any) -> bool:
    """Whether the walk goes into an object's attributes."""
    if isinstance(value, torch.nn.Module) or dataclasses.is_dataclass(value):
        return True
    return hasattr(value, "__dict__") and type(value).__module__.startswith(
        ("megatron.core", "megatron.training", "types", "test")
    )


def _function_of(member: Any) -> Any:
    if isinstance(member, (staticmethod, classmethod)):
        return member.__func__
    return member.fget if isinstance(member, property) else member


def _digest(tensor: torch.Tensor) -> str:
    tensor = tensor.detach().contiguous().reshape(-1)
    return _hash(tensor.view(torch.uint8).numpy().tobytes() if tensor.numel() else b"")


def _hash(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()
