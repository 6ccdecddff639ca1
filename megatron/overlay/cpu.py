"""The CPU device: stand-ins for what Megatron-LM asks of ``torch.cuda``, so that it trains over gloo.

Stock Megatron-LM assumes a GPU wherever it allocates, counts memory or orders streams. ``install`` answers
those calls from the CPU and sends ``device="cuda"`` and ``.cuda()`` there. What has no meaning on a CPU (CUDA
graphs) raises. ``torch.cuda.is_available()`` stays False: torch itself must not look for a driver.

Stock checks that no stand-in can satisfy are lifted by layers that ask ``active()``.
"""

import contextlib
import functools
import logging
import os
import resource
import sys
import time
import types
import warnings
from typing import Any, Callable

import torch
from torch.utils.data import DataLoader

from megatron.overlay import optional_packages

_saved: list[tuple[Any, str, Any]] = []
_ABSENT = object()
_STATM = "/proc/self/statm"
_FACTORIES = (
    "arange as_tensor asarray empty empty_like empty_strided eye full full_like linspace load logspace "
    "normal ones ones_like rand rand_like randint randint_like randn randn_like randperm tensor zeros zeros_like"
).split()
_METHODS = "new_empty new_full new_ones new_tensor new_zeros to".split()


class NoGPUError(RuntimeError):
    """Something was asked for that only a GPU can do."""


def has_gpu() -> bool:
    """Whether this machine has a GPU that torch can use."""
    return torch.cuda.is_available()


def active() -> bool:
    """Whether the CPU device is on in this process."""
    return bool(_saved)


def install() -> None:
    """Turns the CPU device on, once.

    Raises:
        NoGPUError: this process already uses a GPU, or asked torch whether there is one.
    """
    if active():
        return
    # CUDA reads this once, when something first counts the GPUs.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if torch.cuda.is_initialized() or has_gpu():
        raise NoGPUError(
            "device='cpu': this process already uses or has counted its GPUs. Call "
            "megatron.overlay.install(device='cpu') before anything asks torch.cuda."
        )
    for package in ("transformer_engine", "transformer_engine_torch", "apex"):
        optional_packages.hide(package)  # their kernels would be handed CPU tensors
    # Stock insists on this where tensor or context parallelism is used.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    # What stock says where the packages hidden above are absent, and torch of a toolkit without a GPU.
    warnings.filterwarnings("ignore", r"(Transformer Engine and )?Apex (is|are) not installed")
    warnings.filterwarnings("ignore", r"Only transformer-engine>=")
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    for name, value in _cuda_stand_ins().items():
        _replace(torch.cuda, name, value)
    _replace(torch.cuda.random, "get_rng_state", torch.cuda.get_rng_state)
    _replace(torch.cuda.random, "set_rng_state", torch.cuda.set_rng_state)
    for name in _FACTORIES:
        _replace(torch, name, _on_cpu(getattr(torch, name)))
    for name in _METHODS:
        _replace(torch.Tensor, name, _on_cpu(getattr(torch.Tensor, name)))
    _replace(DataLoader, "__iter__", _keeping_rng_state(DataLoader.__iter__))
    _replace(torch.Tensor, "cuda", lambda self, *args, **kwargs: self)
    _replace(torch.Tensor, "record_stream", lambda self, stream: None)
    _replace(torch.Tensor, "pin_memory", lambda self, *args, **kwargs: self)
    _replace(torch.Tensor, "type", _type_as_on_cuda(torch.Tensor.type))
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(_one_generator_serves_both)


def uninstall() -> None:
    """Gives every attribute of torch back. Modules that were imported meanwhile keep what they took."""
    while _saved:
        owner, name, value = _saved.pop()
        if value is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, value)
    logging.getLogger("megatron.core.tensor_parallel.random").removeFilter(
        _one_generator_serves_both
    )


def _replace(owner: Any, name: str, value: Any) -> None:
    _saved.append((owner, name, vars(owner).get(name, _ABSENT)))
    setattr(owner, name, value)


def _on_cpu(function: Callable) -> Callable:
    """``function`` with every CUDA device among its arguments replaced by the CPU, nothing pinned."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("pin_memory", None)
        for key in ("device", "map_location"):
            if key in kwargs:
                kwargs[key] = _cpu_for(kwargs[key])
        return function(*map(_cpu_for_cuda, args), **kwargs)

    return wrapper


def _cpu_for(device: Any) -> Any:
    return "cpu" if isinstance(device, int) else _cpu_for_cuda(device)


def _cpu_for_cuda(value: Any) -> Any:
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type == "cuda" else value
    return "cpu" if isinstance(value, str) and value.split(":")[0] == "cuda" else value


def _keeping_rng_state(function: Callable) -> Callable:
    """``DataLoader.__iter__`` draws a seed from the CPU's generator, which here stands for CUDA's too.

    A resumed run makes its iterators after it has loaded the generators' states, so that draw would
    give it other dropout masks than the run that was saved.
    """

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with torch.random.fork_rng(devices=[]):
            return function(*args, **kwargs)

    return wrapper


def _type_as_on_cuda(function: Callable) -> Callable:
    """``tensor.type()``: stock optimizers recognise parameters by 'torch.cuda.FloatTensor' and its like."""

    @functools.wraps(function)
    def type_(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is not None:
            return function(self, dtype, *args, **kwargs)
        return function(self).replace("torch.", "torch.cuda.", 1)

    return type_


def _one_generator_serves_both(record: logging.LogRecord) -> bool:
    """Stock warns when the CPU's generator moves inside a fork of CUDA's; here they are one."""
    return record.getMessage() != "CPU RNG state changed within GPU RNG context"


class _Stream:
    """Work on a CPU is done when the call returns: every ordering holds already."""

    cuda_stream = 0
    device = torch.device("cpu")

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def __enter__(self) -> "_Stream":
        return self

    def __exit__(self, *args: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    wait_event = wait_stream

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def record_event(self, event: "_Event | None" = None) -> "_Event":
        event = event or _Event()
        event.record()
        return event

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, 0


class _Event:
    """An event on the wall clock."""

    def __init__(self, *args: Any, **kwargs: Any):
        self._time = 0.0

    def record(self, stream: Any = None) -> None:
        self._time = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: "_Event") -> float:
        """Milliseconds until ``end``."""
        return (end._time - self._time) * 1e3


class _Generators:
    """``torch.cuda.default_generators``: operations on CPU tensors draw from torch's default one."""

    def __getitem__(self, device: Any) -> torch.Generator:
        return torch.default_generator


class _Refused:
    """Stands for ``what`` of ``torch.cuda``: exists, so that annotations and imports work; raises when used."""

    def __init__(self, *args: Any, **kwargs: Any):
        raise NoGPUError(
            f"torch.cuda.{type(self).__name__} needs a GPU, and this process runs on the CPU device. "
            "Leave CUDA graphs and memory pools off (--cuda-graph-impl none), or run with --device cuda."
        )


def _resident_bytes() -> int:
    """The process's memory, in bytes, for want of a device's."""
    if os.path.exists(_STATM):
        with open(_STATM) as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    return _peak_resident_bytes()


def _peak_resident_bytes() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    # Linux counts the two apart, and lets the peak lag.
    return max(peak, _resident_bytes()) if os.path.exists(_STATM) else peak


def _cuda_stand_ins() -> dict[str, Any]:
    """Attribute of ``torch.cuda`` -> what answers for it.

    Each answer is an object of its own: dynamo keeps its rules by identity.
    """
    stream = _Stream()
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    properties = types.SimpleNamespace(
        name="cpu", major=9, minor=0, total_memory=total, multi_processor_count=os.cpu_count()
    )
    without_effect = "_lazy_init empty_cache manual_seed_all reset_peak_memory_stats set_device set_stream synchronize"
    refused = "CUDAGraph ExternalStream MemPool graph"
    return {
        **{name: _always(None) for name in without_effect.split()},
        **{name: _always(contextlib.nullcontext()) for name in ("device", "stream")},
        **{name: _always(stream) for name in ("current_stream", "default_stream")},
        **{name: type(name, (_Refused,), {}) for name in refused.split()},
        "Event": _Event,
        "Stream": _Stream,
        "_lazy_call": lambda function, **kwargs: function(),
        "current_device": _always(torch.device("cpu")),
        "default_generators": _Generators(),
        "device_count": _always(1),
        "device_memory_used": lambda *args: _resident_bytes(),
        "get_device_capability": _always((properties.major, properties.minor)),
        "get_device_name": _always(properties.name),
        "get_device_properties": _always(properties),
        "get_rng_state": lambda device="cuda": torch.get_rng_state(),
        "is_current_stream_capturing": _always(False),
        "manual_seed": lambda seed: torch.manual_seed(seed),
        "max_memory_allocated": lambda *args: _peak_resident_bytes(),
        "max_memory_reserved": lambda *args: _peak_resident_bytes(),
        "memory_allocated": lambda *args: _resident_bytes(),
        "memory_reserved": lambda *args: _resident_bytes(),
        "memory_stats": _always(_MemoryStats()),
        "set_rng_state": lambda new_state, device="cuda": torch.set_rng_state(new_state),
    }


def _always(answer: Any) -> Callable:
    return lambda *args, **kwargs: answer


class _MemoryStats(dict):
    """``torch.cuda.memory_stats``: no allocator keeps statistics here, so every one of them is 0."""

    def __missing__(self, key: str) -> int:
        return 0
