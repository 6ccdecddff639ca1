"""Reads the cases, starts ``ranks.py`` on them, and reads back what training logged and saved."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

HERE = Path(__file__).parent
Arguments = dict[str, Any]


def arguments(name: str | None = None, **extra: Any) -> Arguments:
    """Flags of case ``name`` over the common ones; ``extra`` as ``train_iters=4``. None unsets a flag."""
    found = yaml.safe_load((HERE / "common.yaml").read_text())
    if name is not None:
        found.update(yaml.safe_load((HERE / name / "model_config.yaml").read_text()))
    found.update({"--" + key.replace("_", "-"): value for key, value in extra.items()})
    return found


def run(
    cases: dict[str, Arguments],
    folder: Path,
    bare: bool = False,
    record: bool = False,
    environment: dict[str, str] | None = None,
) -> str:
    """Runs all cases from one launch; a case's logs lie in ``folder``. Returns what the launch printed.

    For ``bare`` and ``record``, and a case's FAULT, see ranks.py. ``environment`` is added to the launch's.

    Nothing is raised for a case that fails: ``losses`` does, when the case is looked at.
    """
    spec = []
    for name, flags in cases.items():
        flags = dict(flags)
        world_size = flags.pop("WORLD_SIZE", 1)
        fault = flags.pop("FAULT", None)
        flags["--tensorboard-dir"] = folder / name
        argv = [
            str(part)
            for flag, value in flags.items()
            if value is not None and value is not False
            for part in ([flag] if value is True else [flag, *_words(value)])
        ]
        log = str(folder / f"{name}.log")
        spec.append(
            {
                "name": name,
                "world_size": world_size,
                "argv": argv,
                "log": log,
                "port": _free_port(),
                "record": record,
                "fault": fault,
            }
        )
    file = folder / f"cases{'_bare' * bare}.json"
    file.write_text(json.dumps({"bare": bare, "cases": spec}))
    process = subprocess.Popen(
        [sys.executable, str(HERE / "ranks.py"), str(file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            **(environment or {}),
        },
        start_new_session=True,
    )
    try:
        return process.communicate(timeout=60 + 180 * len(cases))[0]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def losses(folder: Path, name: str, tag: str = "lm loss") -> list[float]:
    """The scalar ``tag`` of every iteration, as float32 values. Raises AssertionError with the log's end."""
    events = EventAccumulator(str(folder / name)).Reload()
    assert (
        tag in events.Tags()["scalars"]
    ), f"{name} logged no {tag!r}\n{_end_of_logs(folder, name)}"
    return [event.value for event in events.Scalars(tag)]


def parameters(folder: Path, rank: int, iteration: int) -> dict[str, torch.Tensor]:
    """Every tensor of the model in a checkpoint of format ``torch``, by chunk and name."""
    file = sorted((folder / f"iter_{iteration:07d}").glob("mp_rank_*"))[rank] / "model_optim_rng.pt"
    state = torch.load(file, weights_only=False)
    return {
        f"{chunk}.{name}": value
        for chunk, model in state.items()
        if chunk.startswith("model")
        for name, value in model.items()
        if torch.is_tensor(value)
    }


def log(folder: Path, name: str, rank: int) -> str:
    """What one rank printed."""
    return (folder / f"{name}.log.rank{rank}").read_text()


def packs(folder: Path, name: str, rank: int) -> list:
    """What ``record`` wrote on one rank: for each microbatch, [cu_seqlens, max_seqlen]."""
    file = folder / f"{name}.log.cu_seqlens{rank}"
    assert file.exists(), f"{name} recorded nothing on rank {rank}\n{_end_of_logs(folder, name)}"
    return [json.loads(line) for line in file.read_text().splitlines()]


def _end_of_logs(folder: Path, name: str) -> str:
    return "\n".join(
        f"--- {log.name}\n" + "\n".join(log.read_text().splitlines()[-40:])
        for log in sorted(folder.glob(f"{name}.log.rank*"))
    )


def _words(value: Any) -> list[Any]:
    """A string with blanks stands for several words, as on a command line."""
    return value.split() if isinstance(value, str) else [value]


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
