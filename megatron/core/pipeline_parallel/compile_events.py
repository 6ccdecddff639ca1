"""Records what this process compiles, and when.

Where the events come from (measured with torch 2.11 and Triton 3.6):
- torch.compile: ``torch._dynamo.utils.log_compilation_event`` gets the metrics of every frame and of every backward
  graph that is compiled at the first backward (with dynamic shapes it is part of the frame's compilation), once
  each and from whatever thread compiled. Dynamo's start and end callbacks name no function and leave out
  compilations that overlap; ``get_compilation_metrics`` keeps only the last 64.
- Triton: ``triton.knobs.compilation.listener``. Unlike ``knobs.runtime.jit_post_compile_hook`` it gets times, says
  whether the kernel came from the cache on disk (then nothing was compiled), and sees autotuning too.
- CuTe DSL: ``cutlass.cute.compile`` (4.8); not what ``@cute.jit`` functions compile when they are called without it.
- NVRTC: ``cuda.bindings.nvrtc.nvrtcCompileProgram``; not what libraries compile by calling NVRTC from C++.
- C++ extensions: what ``torch.utils.cpp_extension`` builds, or waits for while another process builds it.

Modules are watched that are imported, or become so meanwhile; none is imported for the sake of it. What was compiled
during a torch.compile, such as the Triton kernels that Inductor writes, is part of it and has no entry of its own.
"""

import functools
import importlib.abc
import importlib.machinery
import logging
import os
import sys
import threading
import time
import types
from dataclasses import dataclass
from typing import Any, Callable, Collection, Sequence

logger = logging.getLogger(__name__)

TORCH_COMPILE = "torch.compile"
SKIPPED_FRAME = "skipped frame"
SKIPPED_FRAME_SECONDS = 1.0  # frames that Dynamo gives up on sooner than that have no entry


@dataclass(frozen=True)
class Compilation:
    """Something that was compiled.

    Attributes:
        kind: "torch.compile", "Triton", "CuTe DSL", "NVRTC", "extension", or "skipped frame": Dynamo worked on a frame
            for a second or longer, and then ran it as it is.
        name: A function with its place, "bias_swiglu (fused_bias_swiglu.py:35)", or a kernel, "_fwd_kernel".
        start: Seconds since the epoch.
        end: Seconds since the epoch.
    """

    kind: str
    name: str
    start: float
    end: float


class CompilationWatch:
    """Context manager that appends to ``compilations`` what any thread compiles while it is active.

    It may be entered again, also while it is active. Hooks that were there go on being called and are put back.
    """

    def __init__(self, compilations: list[Compilation]) -> None:
        self._compilations = compilations
        self._functions: dict[str, tuple[str, str]] = {}  # Dynamo's compile id -> function, place
        self._replaced: list[tuple[Any, str, bool, Any, Any]] = []
        self._importer = _ImportWatch(_ATTACH.keys(), self._attach)
        self._lock = threading.Lock()
        self._depth = 0

    def __enter__(self) -> "CompilationWatch":
        with self._lock:
            self._depth += 1
            first = self._depth == 1
        if first:
            sys.meta_path.insert(0, self._importer)
            for name in _ATTACH:
                if (module := sys.modules.get(name)) is not None:
                    self._attach(name, module)
        return self

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._depth -= 1
            last = self._depth == 0
        if last:
            sys.meta_path.remove(self._importer)
            while self._replaced:
                owner, name, own, original, replacement = self._replaced.pop()
                if getattr(owner, name, None) is not replacement:
                    continue  # replaced again by somebody else, whose hook may call ours: it passes calls on
                if own:
                    setattr(owner, name, original)
                else:
                    delattr(owner, name)

    def _attach(self, name: str, module: types.ModuleType) -> None:
        if self._depth:
            _ATTACH[name](self, module)

    def _replace(self, owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
        """Puts ``wrap(what owner.name is)`` in its place until the watch ends."""
        try:
            original = getattr(owner, name)
        except AttributeError:
            logger.warning("%r has no %s: what it compiles is not recorded", owner, name)
            return
        replacement = wrap(original)
        self._replaced.append((owner, name, name in vars(owner), original, replacement))
        setattr(owner, name, replacement)

    def _record(self, kind: str, name: str, start: float, end: float) -> None:
        if not self._depth:
            return
        with self._lock:
            if kind in (TORCH_COMPILE, SKIPPED_FRAME):
                self._compilations[:] = [
                    other
                    for other in self._compilations
                    if other.kind in (TORCH_COMPILE, SKIPPED_FRAME)
                    or other.start < start
                    or other.end > end
                ]
            self._compilations.append(Compilation(kind, name, start, end))

    def _time(self, kind: str, describe: Callable[..., str]) -> Callable[[Any], Any]:
        """Wraps a compiler: each of its calls that returns is recorded as ``describe(*its arguments)``."""

        def wrap(compiler: Any) -> Any:
            @functools.wraps(compiler)
            def call(*args: Any, **kwargs: Any) -> Any:
                start = time.time()
                result = compiler(*args, **kwargs)
                self._record(kind, describe(*args, **kwargs), start, time.time())
                return result

            return call

        return wrap

    def _attach_dynamo(self, utils: Any) -> None:
        for metrics in utils.get_compilation_metrics():  # a backward may belong to one of these
            self._remember(metrics)
        if not utils.config.log_compilation_metrics:
            logger.warning(
                "torch._dynamo.config.log_compilation_metrics is off: torch.compile's compilations are not recorded"
            )

        def wrap(log: Any) -> Any:
            def log_compilation_event(metrics: Any) -> None:
                self._dynamo_finished(metrics)
                log(metrics)

            return log_compilation_event

        self._replace(utils, "log_compilation_event", wrap)

    def _remember(self, metrics: Any) -> None:
        if metrics.co_name is not None:
            place = f"{os.path.basename(metrics.co_filename)}:{metrics.co_firstlineno}"
            self._functions[metrics.compile_id] = (metrics.co_name, place)

    def _dynamo_finished(self, metrics: Any) -> None:
        """Takes the ``torch._dynamo.utils.CompilationMetrics`` of a frame or of a backward graph."""
        if (
            metrics.is_runtime
        ):  # Inductor's autotuning and CUDA graphs, at the first call of what it compiled
            return
        self._remember(metrics)
        function, place = self._functions.get(
            metrics.compile_id, (f"graph {metrics.compile_id}", "")
        )
        if metrics.is_forward is False:
            function += " backward"
            compiled = metrics.fail_type is None
        else:
            # A frame without operations has "guarded code" that is empty, but no graph.
            compiled = bool(metrics.has_guarded_code) and metrics.graph_op_count is not None
        start, end = metrics.start_time_us / 1e6, metrics.end_time_us / 1e6
        if compiled or end - start >= SKIPPED_FRAME_SECONDS:
            kind = TORCH_COMPILE if compiled else SKIPPED_FRAME
            self._record(kind, f"{function} ({place})" if place else function, start, end)

    def _attach_triton(self, knobs: Any) -> None:
        def wrap(other: Any) -> Any:
            def listener(**event: Any) -> None:  # triton.knobs.CompilationListener
                if not event["cache_hit"]:
                    end = time.time()
                    start = end - event["times"].total / 1e6
                    self._record("Triton", event["src"].name, start, end)
                if other is not None:
                    other(**event)

            return listener

        self._replace(knobs.compilation, "listener", wrap)

    def _attach_cute(self, cute: Any) -> None:
        compiler = getattr(cute, "compile", None)
        if compiler is None or isinstance(compiler, types.FunctionType):
            self._replace(cute, "compile", self._time("CuTe DSL", _function_name))
        else:  # an object whose cute.compile[options] are objects of its class
            self._replace(type(compiler), "__call__", self._time("CuTe DSL", _method_argument))

    def _attach_nvrtc(self, nvrtc: Any) -> None:
        # The program that it is called with does not tell its name.
        self._replace(nvrtc, "nvrtcCompileProgram", self._time("NVRTC", _caller))

    def _attach_extensions(self, cpp_extension: Any) -> None:
        versions = cpp_extension.JIT_EXTENSION_VERSIONER

        def wrap(compiler: Any) -> Any:
            def _jit_compile(name: str, *args: Any, **kwargs: Any) -> Any:
                before, start = versions.get_version(name), time.time()
                result = compiler(name, *args, **kwargs)
                if (
                    versions.get_version(name) != before
                ):  # else it was built in this process already
                    self._record("extension", name, start, time.time())
                return result

            return _jit_compile

        self._replace(cpp_extension, "_jit_compile", wrap)


_ATTACH: dict[str, Callable[[CompilationWatch, Any], None]] = {
    "torch._dynamo.utils": CompilationWatch._attach_dynamo,
    "triton.knobs": CompilationWatch._attach_triton,
    "cutlass.cute": CompilationWatch._attach_cute,
    "cuda.bindings.nvrtc": CompilationWatch._attach_nvrtc,
    "torch.utils.cpp_extension": CompilationWatch._attach_extensions,
}


def _function_name(*args: Any, **kwargs: Any) -> str:
    """The name of a compiler's first argument: a function, or an object that can be called."""
    function = args[0] if args else kwargs.get("func")
    return getattr(function, "__qualname__", type(function).__qualname__)


def _method_argument(self: Any, *args: Any, **kwargs: Any) -> str:
    """The same for a compiler that is a method."""
    return _function_name(*args, **kwargs)


def _caller(*args: Any, **kwargs: Any) -> str:
    """The function, and its place, that called into this file."""
    frame: types.FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    if frame is None:
        return "unknown"
    return f"{frame.f_code.co_name} ({os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno})"


class _ImportWatch(importlib.abc.MetaPathFinder):
    """Finds nothing itself: calls ``imported(name, module)`` after the import of one of ``names``."""

    def __init__(self, names: Any, imported: Callable[[str, types.ModuleType], None]) -> None:
        self._names = names
        self._imported = imported
        self._searching: set[str] = set()

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self._names or name in self._searching:
            return None
        self._searching.add(name)  # another watch's finder asks this one in turn
        try:
            found = (finder.find_spec(name, path, target) for finder in list(sys.meta_path))
            spec = next(filter(None, found), None)
        finally:
            self._searching.remove(name)
        loader = spec.loader if spec is not None else None
        if loader is None:
            return spec
        execute = loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            vars(loader).pop("exec_module", None)
            execute(module)
            self._imported(name, module)

        setattr(loader, "exec_module", exec_module)
        return spec
