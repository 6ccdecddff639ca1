"""tools/benchmarks/startup.py on hand-made reports and logs, and on a script that only looks like training."""

import json
import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
import yaml
from torch.utils.tensorboard import SummaryWriter

from tools.benchmarks import startup
from tools.benchmarks.startup import Run, Startup

DSA_CASE = Path(__file__).resolve().parents[2] / "functional_tests" / "dsa" / "model_config.yaml"
LINE = (
    " [2026-11-29 19:52:57.747557] iteration {:8d}/{:8d} | consumed samples:            8 | elapsed time per "
    "iteration (ms): {} | learning rate: 1.000000E-03 | global batch size:     8 | lm loss: {} | "
    "load_balancing_loss: 1.006130E+00 | loss scale: 1.0 | grad norm: {} | number of skipped iterations:   0 | "
    "number of nan iterations:   0 |"
)

# Prints and reports as training does, at once. What it does for which flags is in the variable STUB.
STUB = '''
import json, os, sys, time
flags = sys.argv[1:]
value = lambda flag: flags[flags.index(flag) + 1]
case = {**json.loads(os.environ["STUB"])}
case = case.get("prewarm" if "--pipeline-prewarm" in flags else "plain", {})
stages, rank = int(value("--pipeline-model-parallel-size")), int(os.environ["RANK"])
open(os.environ["TRITON_CACHE_DIR"] + "/kernel", "x")
if case.get("hangs") == rank:
    open(case["pid"], "w").write(str(os.getpid()))
    time.sleep(300)
if case.get("fails") == [stages, rank]:
    sys.exit("the stub fails, as it was told")
if rank == stages - 1:
    for n in range(1, int(value("--train-iters")) + 1):
        line = case["line"].format(n, 5, 250.0 * n, case["loss"], "1.142")
        print(line.replace("| learning", f"| throughput per GPU (TFLOP/s/GPU): {time.time()} | learning"))
if rank == 0:
    spans = lambda r: [
        {"name": "chunk 0 forward", "kind": "compute", "chunk": 0, "phase": "prewarm", "start": 10.0, "end": 10.5 + r},
        {"name": "iteration 1", "kind": "compute", "chunk": None, "phase": "iteration", "start": 20.0, "end": case["end"]},
    ]
    ranks = [
        {"rank": r, "stage": r, "started": 10.0, "spans": spans(r)["--pipeline-prewarm" not in flags :], "compilations": []}
        for r in range(stages)
    ]
    open(value("--pipeline-prewarm-report"), "w").write(json.dumps({"format": 1, "prewarm": "--pipeline-prewarm" in flags, "ranks": ranks}))
'''


def span(name, start, end, phase="prewarm", kind="compute"):
    return {"name": name, "kind": kind, "phase": phase, "start": start, "end": end}


def compilation(kind, name, start, end):
    return {"kind": kind, "name": name, "start": start, "end": end}


def report(*ranks):
    names = ("rank", "started", "spans", "compilations")
    return {"format": 1, "ranks": [dict(zip(names, (n, *rank))) for n, rank in enumerate(ranks)]}


def run(kind, number=1, layout="4x2", total=8.0, later=1.0, **what):
    start = Startup(total, *((4.5, 4.0) if kind else (0.0, 0.0)), what.pop("leftovers", []))
    return Run("moe", layout, kind, number, Path("/nowhere"), startup=start, later=later, **what)


def options(*words):
    return startup.parse(["--device", "cpu", *words])


def test_all_that_an_iteration_printed_is_read_and_nothing_else():
    text = "\n".join(
        [
            "iteration 1 compiled nothing | that counts",
            LINE.format(1, 5, "7822.0", "1.058089E+01", "7.058"),
            "[Rank 1] memory " + LINE.format(2, 5, "886.2", "nan", "27.153") + "> a rank's own",
        ]
    )
    logged = startup.read_log(text)
    assert list(logged) == [1, 2]
    assert logged[1] == {
        "consumed samples": "8",
        "elapsed time per iteration (ms)": "7822.0",
        "learning rate": "1.000000E-03",
        "global batch size": "8",
        "lm loss": "1.058089E+01",
        "load_balancing_loss": "1.006130E+00",
        "loss scale": "1.0",
        "grad norm": "7.058",
        "number of skipped iterations": "0",
        "number of nan iterations": "0",
    }
    assert (logged[2]["lm loss"], logged[2]["grad norm"]) == ("nan", "27.153")


def test_start_up_is_the_longest_ranks_and_a_stages_own_work_has_no_waits():
    first = [
        span("collectives", 100.0, 100.25),
        span("chunk 0 forward", 100.25, 102.25),
        span("chunk 0 backward", 102.25, 103.0),
        span("other stages", 103.0, 105.5, kind="wait"),
        span("send/receive", 105.75, 106.0, "iteration", "wait"),  # listed before what holds it
        span("iteration 1", 105.5, 107.5, "iteration"),
    ]
    second = [span("chunk 0 forward", 101.0, 105.0), span("iteration 1", 105.5, 108.0, "iteration")]
    compiled = [
        compilation("Triton", "_softmax", 101.0, 102.0),
        compilation("Triton", "_adam", 106.0, 106.5),
        compilation("Triton", "_adam", 106.5, 106.75),
        compilation("torch.compile", "swiglu (a.py:1)", 105.5, 107.5),
    ]
    # The second started later: its clock runs from 100.5, and 108.0 is 7.5 s after that.
    found = startup.read_report(report((99.75, first, compiled), (100.5, second, compiled[:2])))
    assert found == Startup(
        total=7.75,  # rank 0, from 99.75 to 107.5
        prewarm=5.75,  # rank 0's wait for the others, to 105.5
        slowest_stage=4.0,
        leftovers=[
            "torch.compile swiglu (a.py:1): 2.00 s, 1 rank",
            "Triton _adam: 0.75 s, 2 ranks",
        ],
    )


def test_a_plain_run_has_no_prewarm():
    spans = [span("iteration 1", 50.5, 52.0, "iteration")]
    assert startup.read_report(report((50.0, spans, []))) == Startup(2.0, 0.0, 0.0, [])


def test_a_report_that_ends_too_early_or_is_of_another_format_is_refused():
    whole = (1.0, [span("iteration 1", 1.0, 2.0, "iteration")], [])
    with pytest.raises(ValueError, match="rank 1 has no span 'iteration 1'"):
        startup.read_report(report(whole, (1.0, [span("p2p", 1.0, 2.0)], [])))
    with pytest.raises(ValueError, match="format=2"):
        startup.read_report({**report(whole), "format": 2})


def test_the_table_has_medians_extremes_and_ratios():
    runs = [
        run(False, total=15.0),
        run(True, total=6.0, leftovers=["Triton _adam: 0.75 s, 2 ranks"]),
        run(False, 2, total=17.0, later=1.5),
        run(True, 2, total=7.0),
        run(False, 3, total=16.0, later=1.25),
        Run("moe", "4x2", True, 3, Path("/nowhere"), error="rank 0 ended with status 1"),
        run(False, 1, "4x1"),
    ]
    lines = [line.split() for line in startup.table(runs).splitlines()]
    assert lines[1] == (
        "4x2 without 3 16.00 (15.00..17.00) 1.25 (1.00..1.50) 14.75 (14.00..15.50)".split()
    )
    assert lines[2] == (
        "4x2 with 2 6.50 (6.00..7.00) 1.00 (1.00..1.00) 5.50 (5.00..6.00) "
        "4.50 (4.50..4.50) 4.00 (4.00..4.00) 1.12".split()
    )
    assert lines[3] == "without/with: start-up 2.46, lazy part 2.68".split()
    assert lines[4] == "compiled after the prewarm: Triton _adam: 0.75 s, 2 ranks".split()
    assert lines[5][:4] == ["4x1", "without", "1", "8.00"]
    assert lines[6] == ["4x1", "with", "0"]
    assert len(lines) == 7


def test_one_digit_of_one_run_is_a_difference():
    same = {"logged": {1: {"lm loss": "4.8", "grad norm": "1.1"}, 2: {"lm loss": "4.7"}}}
    other = {"logged": {1: {"lm loss": "4.8", "grad norm": "1.2"}, 2: {"lm loss": "4.7"}}}
    assert startup.differences([run(False, **same), run(True, **same)]) == []
    assert startup.differences([run(False, **same), run(True, **same), run(True, 2, **other)]) == [
        "printed: iteration 1, grad norm: moe-4x2-without-1 1.1, moe-4x2-with-1 1.1, moe-4x2-with-2 1.2"
    ]
    assert startup.differences([run(False, **same), run(True, logged={1: same["logged"][1]})]) == [
        "printed: iteration 2, lm loss: moe-4x2-without-1 4.7, moe-4x2-with-1 None"
    ]


def test_tensorboards_values_are_compared_beyond_the_printed_digits(tmp_path):
    for name, loss in (("a", 4.75), ("b", 4.75 + 2**-20), ("c", 4.75)):
        with SummaryWriter(str(tmp_path / name)) as writer:
            writer.add_scalar("lm loss", float("nan"), 1)
            writer.add_scalar("lm loss", loss, 2)
    a, b, c = (startup.read_tensorboard(tmp_path / name) for name in "abc")
    assert a == {"lm loss": ["1: nan", "2: 4.75"]}
    assert startup.differences([run(False, exact=a), run(True, exact=c)]) == []
    (line,) = startup.differences([run(False, exact=a), run(True, exact=b)])
    assert line.startswith("TensorBoard: lm loss: ")


def flags_of(model, layout, *words):
    words = startup.model_flags(model, layout, options("--layouts", layout, *words))
    return {flag: value for flag, value in zip(words, [*words[1:], ""]) if flag.startswith("--")}


@pytest.mark.parametrize(
    "layout, layers, stages, per_chunk",
    [
        ("4x1", "16", "4", None),
        ("4x2", "16", "4", "2"),
        ("4x4", "16", "4", "1"),
        ("1x2", "4", "1", "2"),
    ],
)
def test_layers_are_spread_over_stages_and_chunks(layout, layers, stages, per_chunk):
    flags = flags_of("dense", layout, "--num-layers", layers)
    assert flags["--pipeline-model-parallel-size"] == stages
    assert flags.get("--num-layers-per-virtual-pipeline-stage") == per_chunk
    assert "--num-experts" not in flags


def test_the_tiny_dsa_model_is_the_functional_cases():
    case = yaml.safe_load(DSA_CASE.read_text())
    flags = flags_of("dsa-moe", "2x1")
    for flag in set(case) - {"WORLD_SIZE", "--multi-latent-attention", "--init-method-std"}:
        expected = case[flag]
        assert flags[flag] == expected or float(flags[flag]) == expected, flag
    assert {"--multi-latent-attention", "--no-rope-fusion", "--num-experts"} <= set(flags)


@pytest.mark.parametrize(
    "words, message",
    [
        (["--layouts", "4x3"], "--num-layers 8 with layout 4x3: expected a multiple of 12"),
        (["--layouts", "4"], "--layouts '4': expected PPxVPP"),
        (["--layouts", "0x1"], "--layouts '0x1': expected PPxVPP"),
        (["--iterations", "2"], "2 iterations, 3 rounds: expected at least 3 and 1"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_does(words, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        options(*words)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


def test_identity_is_one_run_of_each_kind():
    found = options("--identity", "50", "--rounds", "3")
    assert (found.iterations, found.rounds) == (50, 1)


@pytest.mark.parametrize("caches, folders", [("per-rank", 2), ("shared", 1)])
def test_every_compilers_cache_is_empty_and_the_ranks_own_where_asked(
    caches, folders, tmp_path, monkeypatch
):
    monkeypatch.setenv("TRITON_CACHE_DIR", "/warm")
    ranks = startup.environments(options("--caches", caches), 2, tmp_path)
    assert [rank["RANK"] for rank in ranks] == ["0", "1"]
    for variable in startup.CACHES:
        found = {Path(rank[variable]) for rank in ranks}
        assert len(found) == folders
        assert all(tmp_path in path.parents and not any(path.iterdir()) for path in found)
    assert len({rank[variable] for rank in ranks for variable in startup.CACHES}) == folders * len(
        startup.CACHES
    )


def test_on_the_cpu_the_fuser_is_on_and_ranks_that_share_a_gpu_are_all_local_rank_0(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    chosen = options()
    on_cpu = startup.environments(chosen, 2, tmp_path)
    chosen.device = "cuda"
    on_gpu = startup.environments(chosen, 2, tmp_path)
    assert [rank["LOCAL_RANK"] for rank in on_cpu + on_gpu] == ["0", "1", "0", "0"]
    assert on_cpu[0]["MEGATRON_OVERLAY_CPU_COMPILE"] == "inductor"
    assert "MEGATRON_OVERLAY_CPU_COMPILE" not in on_gpu[0]


def gone(pid):
    """Whether the process has ended, or ends within 20 s."""
    for _ in range(200):
        status = Path(f"/proc/{pid}/stat")
        if not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.1)
    return False


@pytest.mark.parametrize(
    "status, message",
    [(3, "rank 1 ended with status 3"), (None, "still running after 60 s (--timeout)")],
)
def test_no_process_outlives_a_launch_that_fails(status, message, tmp_path, monkeypatch):
    pids = tmp_path / "pids"
    child = f"""
import os, subprocess, sys, time
if os.environ["RANK"] == "0":
    inner = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    with open({str(tmp_path / "part")!r}, "w") as file:
        file.write(f"{{os.getpid()}} {{inner.pid}}")
    os.rename({str(tmp_path / "part")!r}, {str(pids)!r})
    time.sleep(300)
while not os.path.exists({str(pids)!r}):
    time.sleep(0.05)
time.sleep(300) if {status} is None else sys.exit({status})
"""
    # A minute passes as soon as the processes are there.
    clock = types.SimpleNamespace(monotonic=lambda: 61.0 * pids.exists(), sleep=time.sleep)
    if status is None:
        monkeypatch.setattr(startup, "time", clock)
    ranks = [{**os.environ, "RANK": str(rank)} for rank in range(2)]
    command = [sys.executable, "-c", child]
    assert startup.launch(command, ranks, tmp_path / "log", 60) == message
    assert all(gone(pid) for pid in pids.read_text().split())


@pytest.fixture
def stub(tmp_path, monkeypatch):
    """Makes the command line that trains with the stub; its arguments say what the stub does."""

    def make(plain=None, prewarm=None):
        (tmp_path / "stub.py").write_text(STUB)
        base = {"line": LINE, "loss": "4.882846E+00"}
        cases = {
            "plain": {**base, "end": 26.0, **(plain or {})},
            "prewarm": {**base, "end": 22.0, **(prewarm or {})},
        }
        monkeypatch.setenv("STUB", json.dumps(cases))
        words = ["--device", "cpu", "--script", str(tmp_path / "stub.py"), "--rounds", "2"]
        return [
            *words,
            "--output",
            str(tmp_path / "out"),
            "--layouts",
            "2x1",
            "1x2",
            "--timeout",
            "60",
        ]

    return make


def test_all_layouts_and_rounds_are_run_and_summed_up(stub, tmp_path, capsys):
    assert startup.main(stub()) == 0
    printed = capsys.readouterr().out
    order = [line.split()[1] for line in printed.splitlines() if line.startswith("[")]
    assert order == [
        *("moe-2x1-without-1:", "moe-2x1-with-1:", "moe-2x1-with-2:", "moe-2x1-without-2:"),
        *("moe-1x2-without-1:", "moe-1x2-with-1:", "moe-1x2-with-2:", "moe-1x2-without-2:"),
    ]
    # Iterations 3 to 5 of the stub take 0.75, 1.0 and 1.25 s; it ends 16 s after its start, or 12.
    assert "2x1     without     2  16.00 (16.00..16.00)  1.00 (1.00..1.00)     15.00 (" in printed
    assert "without/with: start-up 1.33, lazy part 1.36" in printed
    assert printed.count("the same in all 4 runs, 5 iterations") == 2
    assert len(list((tmp_path / "out").glob("*.json"))) == 8
    assert sorted(path.name for path in (tmp_path / "out").glob("*.png")) == [
        "moe-1x2.png",
        "moe-2x1.png",
    ]


def test_a_loss_that_prewarm_changes_fails(stub, capsys):
    assert startup.main(stub(prewarm={"loss": "4.882847E+00"})) == 1
    printed = capsys.readouterr().out
    assert "2x1: losses and gradient norms DIFFERENT in all 4 runs" in printed
    assert "iteration 5, lm loss: moe-2x1-without-1 4.882846E+00, moe-2x1-with-1 4.8" in printed
    assert "among themselves" not in printed


def test_a_failed_run_is_reported_and_the_rest_goes_on(stub, tmp_path, capsys):
    assert startup.main(stub(prewarm={"fails": [2, 1]})) == 1
    printed = capsys.readouterr().out
    assert "moe-2x1-with-1: FAILED: rank 1 ended with status 1" in printed
    assert "    the stub fails, as it was told" in printed
    assert "2x1     with        0\n" in printed
    assert "2x1: nothing to compare" in printed
    assert "1x2: losses and gradient norms the same in all 4 runs" in printed
    assert "the stub fails" in (tmp_path / "out" / "moe-2x1-with-2.log").read_text()


def test_when_it_is_told_to_stop_it_ends_its_ranks_and_says_what_it_has(stub, tmp_path):
    pid = tmp_path / "pid"
    words = stub(prewarm={"hangs": 1, "pid": str(pid)})
    process = subprocess.Popen(
        [sys.executable, startup.__file__, *words], stdout=subprocess.PIPE, text=True
    )
    try:
        while not (pid.exists() and pid.read_text()) and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        printed = process.communicate(timeout=60)[0]
    finally:
        process.kill()
    assert process.returncode == 1
    assert "stopped after 1 of 8 runs" in printed
    assert "2x1     without     1  16.00 (16.00..16.00)" in printed
    assert gone(pid.read_text())
