"""Throwaway trees of layers over the installed wheel, and scripts that run under them in processes of their own."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any, Iterable

ROOT = Path(__file__).resolve().parents[2]
HEADER = """
from megatron.overlay import upstream_of

upstream = upstream_of(__name__)

"""


def stock_root() -> Path:
    """The folder ``megatron`` of the installed wheel."""
    import megatron

    return next(Path(p) for p in megatron.__path__ if Path(p, "core", "__init__.py").is_file())


def python(
    *arguments: str | Path,
    trees: Iterable["LayerTree"] = (),
    path: Iterable[Path] = (),
    cwd: Path = Path("/"),
    timeout: float = 120,
    root: Path = ROOT,
    interpreter: str = sys.executable,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Runs Python on this repository with no layers but ours and those of ``trees``.

    Args:
        path: put before the repository on PYTHONPATH.
        cwd: no folder that holds a project, for Python looks there first.
        root: the repository.
        environment: on top of this process's, less what the loader reads from it.
        timeout: in seconds; then it and its children are ended, and subprocess.TimeoutExpired is raised.
    """
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("MEGATRON_", "PYTHON"))}
    settings = {
        "PYTHONPATH": os.pathsep.join(map(str, [*path, root])),
        "MEGATRON_OVERLAY_PATH": os.pathsep.join(str(tree.root) for tree in trees),
        "OMP_NUM_THREADS": "1",
    }
    process = subprocess.Popen(
        [interpreter, *map(str, arguments)],
        cwd=cwd,
        env={**inherited, **settings, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except BaseException:
        process.terminate()  # torchrun then ends its ranks, which are in sessions of their own
        try:
            process.wait(15)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def json_of(*arguments: str | Path, **options: Any) -> Any:
    """What such a run printed last, as JSON; it must succeed."""
    done = python(*arguments, **options)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return json.loads(done.stdout.splitlines()[-1])


def error_of(script: str, **options: Any) -> str:
    """The exception with which ``python -c script`` ends, as the traceback says it."""
    done = python("-c", textwrap.dedent(script), **options)
    assert done.returncode == 1, f"no error:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    lines = done.stderr.rpartition("Traceback (most recent call last):")[2].splitlines()
    start = next(i for i, line in enumerate(lines) if line and not line.startswith(" "))
    return "\n".join(lines[start:])


class LayerTree:
    """A folder of layers with its own pin."""

    def __init__(self, root: Path):
        self.root = root.resolve()
        self.root.mkdir(parents=True, exist_ok=True)

    @property
    def pin_file(self) -> Path:
        return self.root / "upstream.toml"

    def add(self, module: str, source: str, header: str = HEADER) -> Path:
        """Writes a layer of ``module``, or a new module."""
        path = self.root.joinpath(*module.split(".")[1:]).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(header + textwrap.dedent(source))
        return path

    def pin(self) -> None:
        """Writes the pin from the installed wheel."""
        done = python("-m", "megatron.overlay", "refresh", self.root, trees=[self])
        assert done.returncode == 0, done.stderr
