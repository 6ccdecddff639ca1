"""What is recorded of compilations, with the compilers themselves where they run without a GPU."""

import copy
import importlib
import sys
import threading
import time
import types

import pytest
import torch
import torch._dynamo.utils as dynamo_utils

from megatron.core.pipeline_parallel import compile_events
from megatron.core.pipeline_parallel.compile_events import CompilationWatch

WATCHED = [
    "torch._dynamo.utils",
    "triton.knobs",
    "cutlass.cute",
    "cuda.bindings.nvrtc",
    "torch.utils.cpp_extension",
]


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def names(compilations):
    return [(one.kind, one.name) for one in compilations]


def place(function):
    """As a compilation is named: file and line of the first decorator, if there is one."""
    return f"(test_compile_events.py:{function.__code__.co_firstlineno})"


def sine(x):
    return x.sin() * 2


def cosine(x):
    return x.cos() + x


def step(function, size=4):
    function(torch.ones(size, requires_grad=True)).sum().backward()


# --- torch.compile


def test_forward_and_lazy_backward_are_one_entry_each_and_only_at_the_first_call():
    found = []
    function = torch.compile(sine, backend="aot_eager")
    before = time.time()
    with CompilationWatch(found):
        step(function)
        between = list(found)
        step(function)
    after = time.time()
    assert names(found) == [
        ("torch.compile", f"sine {place(sine)}"),
        ("torch.compile", f"sine backward {place(sine)}"),
    ]
    assert found == between
    forward, backward = found
    assert before - 1e-6 <= forward.start < forward.end <= backward.start < backward.end <= after


def test_a_new_static_shape_is_a_compilation_of_the_same_name():
    found = []
    function = torch.compile(sine, backend="eager", dynamic=False)
    with CompilationWatch(found):
        function(torch.ones(4))
        function(torch.ones(5))
        function(torch.ones(4))
    assert names(found) == [("torch.compile", f"sine {place(sine)}")] * 2


def test_with_a_dynamic_shape_the_backward_is_part_of_the_forwards_compilation():
    found = []
    function = torch.compile(sine, backend="aot_eager")
    step(function)
    with CompilationWatch(found):
        step(function, size=5)
        step(function, size=6)
    assert names(found) == [("torch.compile", f"sine {place(sine)}")]


def test_both_parts_of_a_broken_graph_are_named():
    def broken(x):
        y = x.sin()
        torch._dynamo.graph_break()
        return y.cos()

    found = []
    with CompilationWatch(found):
        torch.compile(broken, backend="eager")(torch.ones(4))
    line = broken.__code__.co_firstlineno + 2
    assert [one.name.split(" (")[0] for one in found] == [
        "broken",
        f"torch_dynamo_resume_in_broken_at_{line}",
    ]


def test_compilations_of_other_threads_are_recorded():
    step(torch.compile(cosine, backend="aot_eager"))  # this thread has compiled; the other has not
    found = []
    with CompilationWatch(found):
        function = torch.compile(sine, backend="aot_eager")
        thread = threading.Thread(target=step, args=(function,))
        thread.start()
        thread.join(timeout=120)
        step(torch.compile(cosine, backend="aot_eager", dynamic=False), size=5)
    assert [one.name.split(" (")[0] for one in found] == [
        "sine",
        "sine backward",
        "cosine",
        "cosine backward",
    ]


def test_a_backward_finds_the_name_of_a_forward_from_before_the_watch():
    found = []
    output = torch.compile(sine, backend="aot_eager")(torch.ones(4, requires_grad=True))
    with CompilationWatch(found):
        output.sum().backward()
    assert names(found) == [("torch.compile", f"sine backward {place(sine)}")]


def test_nothing_is_lost_to_the_limit_of_torchs_own_list():
    limit = dynamo_utils._compilation_metrics.maxlen
    dynamo_utils.set_compilation_metrics_limit(1)
    try:
        found = []
        with CompilationWatch(found):
            step(torch.compile(sine, backend="aot_eager"))
            step(torch.compile(cosine, backend="aot_eager"))
        assert len(found) == 4
        assert dynamo_utils._compilation_metrics.maxlen == 1
    finally:
        dynamo_utils.set_compilation_metrics_limit(limit)


def run_uncompilable_frames():
    def without_operations(n):
        return n

    def unsupported(x):
        torch._dynamo.graph_break()
        return x + 1

    def failing_backend(module, inputs):
        raise RuntimeError("no such device")

    torch.compile(without_operations, backend="eager")(3)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(unsupported, backend="eager", fullgraph=True)(torch.ones(2))
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed):
        torch.compile(sine, backend=failing_backend)(torch.ones(2))


def test_frames_that_dynamo_skips_or_fails_on_do_not_count():
    found = []
    with CompilationWatch(found):
        run_uncompilable_frames()
    assert found == []


def test_frames_that_dynamo_gives_up_on_late_are_a_kind_of_their_own(monkeypatch):
    monkeypatch.setattr(compile_events, "SKIPPED_FRAME_SECONDS", 0.0)
    found = []
    with CompilationWatch(found):
        run_uncompilable_frames()
    assert [(one.kind, one.name.split(" (")[0]) for one in found] == [
        ("skipped frame", "without_operations"),
        ("skipped frame", "unsupported"),
        ("skipped frame", "sine"),
    ]


def test_a_switched_off_log_is_said(monkeypatch, caplog):
    with torch._dynamo.config.patch(log_compilation_metrics=False), CompilationWatch([]):
        pass
    assert "log_compilation_metrics is off" in caplog.text


# --- hooks of others


def hooks():
    """All that a watch replaces, as it is now."""
    import triton.knobs
    from cuda.bindings import nvrtc
    from torch.utils import cpp_extension

    return (
        dynamo_utils.log_compilation_event,
        triton.knobs.compilation.listener,
        dict(vars(triton.knobs.compilation)),
        nvrtc.nvrtcCompileProgram,
        cpp_extension._jit_compile,
        list(sys.meta_path),
    )


def test_no_hook_is_left_behind_also_after_an_exception(monkeypatch):
    import triton.knobs

    monkeypatch.delitem(vars(triton.knobs.compilation), "listener", raising=False)  # as at import
    before = hooks()
    assert before[1] is None
    with pytest.raises(KeyError), CompilationWatch([]):
        during = hooks()
        raise KeyError("the body's")
    assert all(ours != theirs for ours, theirs in zip(during, before))
    assert hooks() == before


def test_hooks_that_were_there_go_on_and_stay(monkeypatch):
    events = []

    def log(metrics):
        events.append(metrics.co_name)

    def start(arguments):
        events.append(f"start {arguments.compile_id}")

    monkeypatch.setattr(dynamo_utils, "log_compilation_event", log)
    torch._dynamo.callback_handler.register_start_callback(start)
    try:
        with CompilationWatch([]):
            torch.compile(sine, backend="eager")(torch.ones(4))
        assert dynamo_utils.log_compilation_event is log
        assert events == ["start 0/0", "sine"]
        assert start in torch._dynamo.callback_handler.start_callbacks
    finally:
        torch._dynamo.callback_handler.remove_start_callback(start)


def test_a_hook_set_over_ours_is_not_taken_away(monkeypatch):
    monkeypatch.setattr(dynamo_utils, "log_compilation_event", dynamo_utils.log_compilation_event)
    found, logged = [], []
    with CompilationWatch(found):
        ours = dynamo_utils.log_compilation_event

        def log(metrics):
            logged.append(metrics.co_name)
            ours(metrics)

        dynamo_utils.log_compilation_event = log
        torch.compile(sine, backend="eager")(torch.ones(4))
    torch.compile(cosine, backend="eager")(torch.ones(4))
    assert dynamo_utils.log_compilation_event is log
    assert logged == ["sine", "cosine"]
    assert names(found) == [("torch.compile", f"sine {place(sine)}")]


def test_a_watch_may_be_nested_and_repeated():
    before = hooks()
    found, others = [], []
    watch = CompilationWatch(found)
    with watch:
        with watch, CompilationWatch(others):
            torch.compile(sine, backend="eager")(torch.ones(4))
        torch.compile(cosine, backend="eager")(torch.ones(4))
    with watch:
        torch.compile(cosine, backend="eager", dynamic=False)(torch.ones(5))
    torch.compile(sine, backend="eager", dynamic=False)(torch.ones(5))
    assert [one.name.split(" (")[0] for one in found] == ["sine", "cosine", "cosine"]
    assert [one.name.split(" (")[0] for one in others] == ["sine"]
    assert hooks() == before


# --- Triton


@pytest.fixture
def compile_kernel(tmp_path):
    """Compiles a kernel for an H100, which needs no GPU; what is compiled again comes from the cache on disk.

    Calls triton.compile as JITFunction._do_compile (triton/runtime/jit.py) does at a kernel's first launch. It calls
    the listener at its end: listener(src=, metadata=, metadata_group=, times=, cache_hit=), times in microseconds.
    """
    triton = pytest.importorskip("triton", reason="this build of PyTorch comes without Triton")
    from triton import language as tl
    from triton.backends.compiler import GPUTarget

    @triton.jit
    def _increment_kernel(x, value):
        tl.store(x, tl.load(x) + value)

    cache = triton.knobs.cache.dir
    triton.knobs.cache.dir = str(tmp_path)

    def compile_(element):
        source = triton.compiler.ASTSource(
            _increment_kernel, signature={"x": f"*{element}", "value": element}
        )
        return triton.compile(source, target=GPUTarget("cuda", 90, 32))

    yield compile_
    triton.knobs.cache.dir = cache


def test_triton_kernels_are_recorded_unless_they_come_from_disk(compile_kernel):
    found = []
    with CompilationWatch(found):
        before = time.time()
        compile_kernel("fp32")
        between = time.time()
        compile_kernel("fp32")
        compile_kernel("i32")
    assert names(found) == [("Triton", "_increment_kernel")] * 2
    assert before <= found[0].start < found[0].end <= between


def test_tritons_times_are_microseconds():
    knobs = pytest.importorskip("triton.knobs", reason="this build of PyTorch comes without Triton")
    times = knobs.CompileTimes(1_000_000, [("ttir", 500_000), ("cubin", 250_000)], 4_000)
    source = types.SimpleNamespace(name="_fwd_kernel")
    found = []
    with CompilationWatch(found):
        knobs.compilation.listener(
            src=source, metadata={}, metadata_group={}, times=times, cache_hit=False
        )
    (one,) = found
    assert one.name == "_fwd_kernel"
    assert one.end - one.start == pytest.approx(1.754, abs=1e-6)


def test_a_triton_listener_that_was_there_gets_the_same_events(compile_kernel):
    import triton.knobs

    events = []

    def listener(*, src, metadata, metadata_group, times, cache_hit):
        events.append((src.name, cache_hit, times.total > 0, metadata["name"]))

    triton.knobs.compilation.listener = listener
    try:
        with CompilationWatch([]):
            compile_kernel("fp32")
            compile_kernel("fp32")
        assert triton.knobs.compilation.listener is listener
    finally:
        triton.knobs.compilation.listener = None
    assert [event[:2] for event in events] == [
        ("_increment_kernel", False),
        ("_increment_kernel", True),
    ]


def test_kernels_that_torch_compile_makes_are_part_of_it(compile_kernel):
    def backend(module, inputs):
        compile_kernel("fp32")
        return module.forward

    found = []
    with CompilationWatch(found):
        compile_kernel("i32")
        torch.compile(sine, backend=backend)(torch.ones(4))
        compile_kernel("i64")
    assert names(found) == [
        ("Triton", "_increment_kernel"),
        ("torch.compile", f"sine {place(sine)}"),
        ("Triton", "_increment_kernel"),
    ]


# --- modules that are imported meanwhile, or never

CUTE = """
class CompileCallable:  # as in nvidia-cutlass-dsl 4.8: compile[options] is another one
    def __init__(self, options=None):
        self.options = options
    def __getitem__(self, options):
        return CompileCallable(options)
    def __call__(self, *args, **kwargs):
        if not callable(args[0]):
            raise TypeError("not callable")
        return self.options, args, kwargs

compile = CompileCallable()
"""


@pytest.fixture
def cutlass(tmp_path, monkeypatch):
    """Makes cutlass.cute importable, and unknown again; returns its folder."""
    folder = tmp_path / "cutlass" / "cute"
    folder.mkdir(parents=True)
    (tmp_path / "cutlass" / "__init__.py").write_text("")
    (folder / "__init__.py").write_text(CUTE)
    for name in ("cutlass", "cutlass.cute"):
        monkeypatch.setitem(sys.modules, name, None)
        del sys.modules[name]
    monkeypatch.syspath_prepend(tmp_path)
    return folder


class Kernel:
    def __call__(self, x):
        return x


def test_cute_is_watched_when_it_is_imported_under_the_watch(cutlass):
    found, others = [], []
    with CompilationWatch(found), CompilationWatch(others):
        assert "cutlass.cute" not in sys.modules
        cute = importlib.import_module("cutlass.cute")
        assert cute.compile(sine, 1, flag=2) == (None, (sine, 1), {"flag": 2})
        assert cute.compile["O3"](Kernel())[0] == "O3"
        with pytest.raises(TypeError, match="not callable"):
            cute.compile(3)
    cute.compile(sine)
    assert names(found) == names(others) == [("CuTe DSL", "sine"), ("CuTe DSL", "Kernel")]
    assert cute.CompileCallable.__call__.__code__.co_filename == cute.__file__
    assert "exec_module" not in vars(cute.__spec__.loader)


def test_cute_is_watched_when_it_was_imported_before_also_as_a_function(cutlass):
    (cutlass / "__init__.py").write_text("def compile(function, *args):\n    return args\n")
    cute = importlib.import_module("cutlass.cute")
    before, found = cute.compile, []
    with CompilationWatch(found):
        assert cute.compile(sine, 1) == (1,)
    assert names(found) == [("CuTe DSL", "sine")]
    assert cute.compile is before


def test_a_compiler_that_changed_its_name_is_said_and_training_goes_on(cutlass, caplog):
    (cutlass / "__init__.py").write_text("")
    with CompilationWatch([]):
        importlib.import_module("cutlass.cute")
    assert "has no compile: what it compiles is not recorded" in caplog.text


def test_no_module_is_imported_or_found_for_the_sake_of_it(monkeypatch):
    for name in WATCHED:
        monkeypatch.setitem(sys.modules, name, None)
        del sys.modules[name]
    modules = copy.copy(sys.modules)
    with CompilationWatch([]):
        assert sys.modules == modules
        with pytest.raises(ModuleNotFoundError, match="no_such_cute"):
            importlib.import_module("no_such_cute")
    assert sys.modules == modules


def test_nvrtc_programs_are_named_by_their_caller():
    nvrtc = pytest.importorskip("cuda.bindings.nvrtc", reason="needs a CUDA build of PyTorch")
    source = b'extern "C" __global__ void add(float *x) { x[threadIdx.x] += 1; }'
    found = []
    with CompilationWatch(found), CompilationWatch([]):
        error, program = nvrtc.nvrtcCreateProgram(source, b"add.cu", 0, [], [])
        assert error == nvrtc.nvrtcResult.NVRTC_SUCCESS
        (error,) = nvrtc.nvrtcCompileProgram(program, 1, [b"--gpu-architecture=sm_90"])
        line = sys._getframe().f_lineno - 1
    assert error == nvrtc.nvrtcResult.NVRTC_SUCCESS
    test = "test_nvrtc_programs_are_named_by_their_caller"
    assert names(found) == [("NVRTC", f"{test} (test_compile_events.py:{line})")]


def test_extensions_are_recorded_when_they_are_built(monkeypatch, tmp_path):
    from torch.utils import cpp_extension

    built = []
    monkeypatch.setattr(
        cpp_extension,
        "_write_ninja_file_and_build_library",
        lambda **arguments: built.append(arguments["name"]),
    )
    monkeypatch.setattr(cpp_extension, "_import_module_from_library", lambda name, *_: name)
    source = tmp_path / "share.cpp"
    source.write_text("// 1")
    found = []

    def load():
        return cpp_extension.load("share_storage_test", [str(source)], build_directory=tmp_path)

    with CompilationWatch(found):
        assert load() == "share_storage_test"
        load()
        source.write_text("// 2")
        assert load() == "share_storage_test_v1"
    assert built == ["share_storage_test", "share_storage_test_v1"]
    assert names(found) == [("extension", "share_storage_test")] * 2
