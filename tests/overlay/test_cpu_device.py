"""The CPU device: off, it changes nothing of torch; on, what is meant for CUDA happens on the CPU."""

import copy
import pickle
import resource
import time

import pytest
import torch

from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.overlay import cpu
from tests.overlay.layer_trees import error_of, json_of

SNAPSHOT = """
import json, os, sys, warnings
import torch, torch.cuda.random, torch.cuda.memory
import megatron.overlay
OWNERS = (torch, torch.cuda, torch.cuda.random, torch.cuda.memory, torch.Tensor, torch.nn.Module, torch.Generator)
def snapshot():
    return [dict(vars(owner)) for owner in OWNERS]
def changed(before):
    found = set()
    for owner, old, new in zip(OWNERS, before, snapshot()):
        for name in old.keys() | new.keys():
            if old.get(name, snapshot) is not new.get(name, snapshot):
                found.add(f"{owner.__name__}.{name}")
    return sorted(found)
before = snapshot()
"""


def test_off_no_attribute_of_torch_changes():
    script = SNAPSHOT + "megatron.overlay.install('cuda')\nprint(json.dumps(changed(before)))"
    assert json_of("-c", script) == []


def test_on_and_given_back():
    script = SNAPSHOT + """
megatron.overlay.install("cpu")
on = changed(before)
rng = torch.cuda.get_rng_state().equal(torch.get_rng_state())
from megatron.overlay import cpu
cpu.install()
twice = changed(before) == on
cpu.uninstall()
print(json.dumps([on, rng, twice, cpu.active(), changed(before)]))
"""
    on, rng, twice, active, left = json_of("-W", "ignore", "-c", script)
    expected = "torch.zeros torch.cuda.current_device torch.cuda.random.get_rng_state Tensor.cuda"
    assert set(expected.split()) <= set(on)
    assert "torch.cuda.is_available" not in on
    assert rng and twice
    assert (active, left) == (False, [])


def test_auto_without_a_gpu_is_the_cpu_device():
    script = """
import json, torch, megatron.overlay
torch.cuda.is_available = lambda: {answer}
megatron.overlay.install()
from megatron.overlay import cpu
print(json.dumps(cpu.active()))
"""
    assert json_of("-c", script.format(answer=False)) is True
    assert json_of("-c", script.format(answer=True)) is False


@pytest.mark.parametrize("asked", ["is_initialized", "is_available"])
def test_refuses_a_process_that_knows_a_gpu(asked):
    """And leaves the layers out: a second try must not find them half installed."""
    script = f"""
    import torch, megatron.overlay
    torch.cuda.{asked} = lambda: True
    cuda = torch.Tensor.cuda
    try:
        megatron.overlay.install("cpu")
    finally:
        assert megatron.overlay.installed() is None and torch.Tensor.cuda is cuda
    """
    error = error_of(script)
    assert "NoGPUError: device='cpu': this process already uses or has counted its GPUs" in error


def test_it_is_on_here_and_torch_knows_of_no_gpu():
    assert cpu.active()
    assert torch.cuda.is_available() is False
    assert torch.zeros(1, device="cuda").is_cuda is False


DEVICES = ["cuda", "cuda:0", torch.device("cuda"), torch.device("cuda", 0), 0, None]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "make",
    [
        lambda device: torch.zeros(2, device=device),
        lambda device: torch.empty((2,), dtype=torch.int64, device=device, pin_memory=True),
        lambda device: torch.tensor([1, 2], device=device),
        lambda device: torch.arange(2, device=device),
        lambda device: torch.full((2,), 3.0, device=device),
        lambda device: torch.randn(2, device=device),
        lambda device: torch.rand_like(torch.ones(2), device=device),
        lambda device: torch.ones(2).new_empty(2, device=device),
        lambda device: torch.ones(2).to(device=device),
        lambda device: torch.ones(2).to(device=device, dtype=torch.bfloat16, non_blocking=True),
        lambda device: torch.ones(2).cuda(device, non_blocking=True),
        lambda device: torch.nn.Linear(1, 2, device=device).bias,
        lambda device: torch.nn.Linear(1, 2).to(device=device).bias,
        lambda device: torch.nn.Linear(1, 2).cuda().bias,
    ],
)
def test_what_is_made_for_cuda_is_on_the_cpu(make, device):
    made = make(device)
    assert (made.device.type, made.shape) == ("cpu", (2,))


def test_devices_given_by_position():
    x = torch.ones(2)
    for device in ("cuda:0", torch.device("cuda"), torch.cuda.current_device()):
        assert x.to(device).device.type == "cpu"
        assert x.to(device, torch.float64, True).dtype == torch.float64
        assert torch.nn.Linear(1, 2).to(device).weight.device.type == "cpu"
    assert torch.zeros(3, 2).shape == (3, 2) and torch.full((2,), 7).tolist() == [7, 7]
    assert torch.randint(0, 1, (4,), device="cuda").tolist() == [0] * 4


def test_other_devices_are_left_alone():
    assert torch.zeros(2, device="meta").device.type == "meta"
    assert torch.ones(2).to("meta").device.type == "meta"
    assert torch.ones(2).to(torch.int8).dtype == torch.int8
    assert torch.ones(2).to(torch.zeros(1, dtype=torch.float64)).dtype == torch.float64


def test_cuda_leaves_gradients_and_parameters_alone():
    x = torch.ones(2, requires_grad=True)
    x.cuda().sum().backward()
    assert x.grad.tolist() == [1, 1]
    layer = torch.nn.Linear(2, 2)
    weight = layer.weight
    assert layer.cuda().weight is weight
    assert copy.deepcopy(layer).cuda().weight is not weight


def test_checkpoints_of_a_gpu_load_here(tmp_path):
    torch.save({"x": torch.ones(3)}, tmp_path / "x.pt")
    assert torch.load(tmp_path / "x.pt", map_location="cuda")["x"].tolist() == [1, 1, 1]
    assert pickle.loads(pickle.dumps(torch.ones(2).cuda())).tolist() == [1, 1]


def test_types_read_as_on_cuda():
    assert torch.ones(1).type() == "torch.cuda.FloatTensor"
    assert torch.ones(1, dtype=torch.bfloat16).type() == "torch.cuda.BFloat16Tensor"
    assert torch.ones(1).type(torch.int32).dtype == torch.int32
    assert torch.ones(1).type("torch.DoubleTensor").dtype == torch.float64


@pytest.mark.parametrize("name", ["CUDAGraph", "MemPool", "graph", "ExternalStream"])
def test_what_needs_a_gpu_is_refused(name):
    with pytest.raises(
        cpu.NoGPUError, match=f"torch.cuda.{name} needs a GPU, .*--cuda-graph-impl none"
    ):
        getattr(torch.cuda, name)()


def test_streams_and_events():
    stream = torch.cuda.Stream()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(stream), torch.cuda.device(0):
        stream.wait_stream(torch.cuda.current_stream())
        start.record(stream)
        time.sleep(0.05)
        end.record()
    stream.wait_event(stream.record_event())
    end.synchronize()
    assert end.query() and stream.query()
    assert start.elapsed_time(end) >= 50.0
    assert start.elapsed_time(end) == -end.elapsed_time(start)
    torch.cuda.synchronize()


def test_memory_figures():
    def resident():
        return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()

    before = resident()
    block = torch.ones(2**24)  # 64 MiB
    after = torch.cuda.memory_allocated()
    assert after - before > 60 * 2**20
    assert abs(after - resident()) < 8 * 2**20
    assert torch.cuda.max_memory_allocated() >= after
    assert torch.cuda.max_memory_reserved() >= torch.cuda.memory_reserved()
    assert torch.cuda.get_device_properties(0).total_memory > after
    assert torch.cuda.memory_stats()["allocated_bytes.all.current"] == 0
    assert torch.cuda.device_count() == 1
    assert len(block) == 2**24


def test_one_generator_serves_both():
    torch.cuda.manual_seed(5)
    state = torch.cuda.get_rng_state()
    first = torch.rand(3, device="cuda")
    assert torch.get_rng_state().equal(torch.cuda.get_rng_state())
    torch.cuda.set_rng_state(state)
    assert torch.rand(3).equal(first)
    torch.manual_seed(5)
    assert torch.rand(3, device="cuda").equal(first)


def test_rng_tracker_forks_deterministically_and_leaves_the_default_stream_alone():
    def draws():
        tracker = CudaRNGStatesTracker()
        torch.manual_seed(1)
        tracker.add("one", 11)
        tracker.add("two", 22)
        seen = [torch.rand(2)]
        for name in ("one", "two", "one"):
            with tracker.fork(name):
                seen.append(torch.nn.functional.dropout(torch.ones(64), 0.5))
            seen.append(torch.rand(2))
        return seen

    first, second = draws(), draws()
    assert all(a.equal(b) for a, b in zip(first, second))
    torch.manual_seed(1)
    outside = [torch.rand(2) for _ in range(4)]
    assert all(a.equal(b) for a, b in zip(first[::2], outside)), "as if nothing had been forked"
    one, two, one_again = first[1::2]
    assert not one.equal(two) and not one.equal(one_again)
    torch.manual_seed(11)
    assert torch.nn.functional.dropout(torch.ones(64), 0.5).equal(one)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_torch_compile(backend):
    """Dynamo meets the stand-ins, and breaks the graph over none of them."""

    def step(x, scale):
        mask = torch.arange(x.shape[0], device=torch.cuda.current_device()) < 2
        buffer = torch.zeros_like(x, device="cuda").to("cuda")
        return torch.where(mask, x * scale.cuda(), buffer)

    x, scale = torch.tensor([1.0, 2.0, 3.0], requires_grad=True), torch.tensor(2.0)
    out = torch.compile(step, backend=backend, fullgraph=True)(x, scale)
    assert out.tolist() == [2.0, 4.0, 0.0]
    out.sum().backward()
    assert x.grad.tolist() == [2.0, 2.0, 0.0]
