"""Exports several models in one process, as importing ExecuTorch takes seconds: jobs as JSON on stdin; see ``export``.

For each job `NAME.pte` is written, and for each number of rows the inputs and what eager PyTorch makes of them, as .npy files.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Job:
    name: str
    folder: str
    """With model.py, which has ``model`` and ``inputs(rows)``."""
    rows: tuple[int, ...] = (3,)
    dynamic: bool = False
    """Whether the first dimension of all inputs may vary from 1 to 16."""
    model: str = "model"
    inputs: str = "inputs"


def export(out: Path, *jobs: Job, **environment: str) -> None:
    """Run this file as a process that does the jobs."""
    request = json.dumps([str(out), [asdict(job) for job in jobs]])
    command = [sys.executable, "-W", "ignore", __file__]
    done = subprocess.run(
        command, input=request, capture_output=True, text=True, env={**os.environ, **environment}, check=False
    )
    assert done.returncode == 0, done.stderr


def words(out: Path, job: Job, rows: int) -> list[str]:
    """Return the arguments for a runner: the program and its inputs."""
    count = len(list(out.glob(f"{job.name}-{rows}-in*.npy")))
    return [str(out / f"{job.name}.pte"), *(str(out / f"{job.name}-{rows}-in{number}.npy") for number in range(count))]


def wanted(out: Path, job: Job, rows: int) -> list[Any]:
    """Return what eager PyTorch made of the inputs."""
    count = len(list(out.glob(f"{job.name}-{rows}-out*.npy")))
    return [np.load(out / f"{job.name}-{rows}-out{number}.npy") for number in range(count)]


@functools.cache
def _module(folder: str) -> Any:
    """Return the model.py of a folder; each has an ops.py of its own, which is run once."""
    for name in ("ops", "model"):
        sys.modules.pop(name, None)
    sys.path.insert(0, folder)
    module = importlib.import_module("model")
    sys.path.remove(folder)
    return module


def _do(out: Path, job: dict[str, Any]) -> None:
    import torch
    from executorch.exir import to_edge

    module = _module(job["folder"])
    model, inputs = getattr(module, job["model"])(), getattr(module, job["inputs"])
    size = torch.export.Dim("rows", min=1, max=16)
    example = inputs(job["rows"][0])
    shapes = tuple({0: size} for _ in example) if job["dynamic"] else None
    with torch.no_grad():
        program = to_edge(torch.export.export(model, example, dynamic_shapes=shapes)).to_executorch()
        (out / f"{job['name']}.pte").write_bytes(program.buffer)
        for rows in job["rows"]:
            given = inputs(rows)
            results = model(*given)
            for kind, tensors in (("in", given), ("out", results if isinstance(results, tuple) else (results,))):
                for number, tensor in enumerate(tensors):
                    np.save(out / f"{job['name']}-{rows}-{kind}{number}.npy", tensor.numpy())


if __name__ == "__main__":
    place, jobs = json.load(sys.stdin)
    for one in jobs:
        _do(Path(place), one)
