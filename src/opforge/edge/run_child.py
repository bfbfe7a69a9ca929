"""Run programs, each in a fork of this process. A kernel may end its fork.

Run as ``python -m opforge.edge.run_child REQUEST ANSWER``.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import time
from pathlib import Path
from typing import Any

import torch
from executorch.runtime import Runtime

from opforge.cases.values import TensorSpec
from opforge.edge import program_inputs
from opforge.edge.child import answer_request
from opforge.errors import OpforgeError
from opforge.procs import linux


def run(request: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(1)
    return {"jobs": [_run_in_fork(job) for job in request["jobs"]]}


def _run_in_fork(job: dict[str, Any]) -> dict[str, Any]:
    """Run a job in a fork; return its answer, its exit status and its output."""
    place = Path(job["place"])
    answer_file, output_file = place / "answer.json", place / "said.txt"
    pid = os.fork()
    if pid == 0:
        _run_and_exit(job, answer_file, output_file)
    hung = not _ended_in_time(pid, job["limit_s"])
    if hung:
        os.kill(pid, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    reply = json.loads(answer_file.read_text()) if answer_file.is_file() else {}
    stage = place / "stage.txt"
    return {
        **reply,
        "status": status,
        "hung": hung,
        "stage": stage.read_text() if stage.is_file() else "",
        "said": output_file.read_text(errors="replace") if output_file.is_file() else "",
    }


def _ended_in_time(pid: int, limit_s: float) -> bool:
    handle = os.pidfd_open(pid)
    try:
        return bool(select.select([handle], [], [], limit_s)[0])
    finally:
        os.close(handle)


def _run_and_exit(job: dict[str, Any], answer_file: Path, output_file: Path) -> None:
    """Run a job and end the process. This function never returns."""
    code = 1
    linux.die_with_parent()
    try:
        output = os.open(output_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(output, 1)
        os.dup2(output, 2)
        try:
            reply = _run(job)
        except OpforgeError as error:
            reply = {"error": str(error)}
        except Exception as error:  # noqa: BLE001  # boundary: the runtime or a kernel may raise anything
            reply = {"error": f"{type(error).__name__}: {error}", "raised": True}
        fresh = answer_file.with_suffix(".new")
        fresh.write_text(json.dumps(reply))
        fresh.replace(answer_file)
        code = 0
    finally:
        os._exit(code)


def _run(job: dict[str, Any]) -> dict[str, Any]:
    place = Path(job["place"])
    stage = place / "stage.txt"
    for library in job["libraries"]:
        stage.write_text(f"library {library}")
        ctypes.CDLL(library)
    stage.write_text("program")
    runtime = Runtime.get()
    program = runtime.load_program(Path(job["program"]), enable_etdump=True, debug_buffer_size=0)
    method = program.load_method("forward")
    if method is None:
        raise OpforgeError(f"{job['program']} has no method forward; it has {', '.join(sorted(program.method_names))}")
    stage.write_text("inputs")
    values = _inputs(job, method.metadata)
    stage.write_text("run")
    start = time.perf_counter()
    results = list(method.execute(values))
    seconds = time.perf_counter() - start
    stage.write_text("results")
    others = program_inputs.save_tensors(place / "results.safetensors", results)
    program.write_etdump_result_to_file(str(place / "trace.etdp"), str(place / "debug.bin"))
    return {
        "others": others,
        "results": [_described(value) for value in results],
        "seconds": seconds,
        "inputs": program_inputs.inputs_text(tuple(values)),
    }


def _inputs(job: dict[str, Any], metadata: Any) -> list[Any]:
    """Return the inputs that a job gives, else inputs as the program describes them."""
    if job.get("values"):
        values = program_inputs.load_values(Path(job["values"]), job["others"])
    elif job.get("file"):
        values = program_inputs.load_inputs(Path(job["file"]))
    elif job.get("text"):
        values = program_inputs.inputs_from_text(job["text"], job["seed"])
    else:
        return [_input_from_metadata(metadata, number, job["seed"]) for number in range(metadata.num_inputs())]
    if len(values) != metadata.num_inputs():
        raise OpforgeError(f"{len(values)} inputs were given, and {job['program']} takes {metadata.num_inputs()}")
    return values


def _input_from_metadata(metadata: Any, number: int, seed: int) -> Any:
    try:
        description = metadata.input_tensor_meta(number)
    except RuntimeError:
        raise OpforgeError(f"input {number} of the program is not a tensor; give inputs with --inputs") from None
    dtype = _DTYPES_BY_NUMBER.get(description.dtype())
    if dtype is None:
        raise OpforgeError(
            f"input {number} of the program has dtype number {description.dtype()}; give inputs with --inputs"
        )
    return program_inputs.make_tensor(TensorSpec(tuple(description.sizes()), dtype), f"{seed}/{number}")


_DTYPES_BY_NUMBER = dict(enumerate(("u8", "i8", "i16", "i32", "i64", "f16", "f32", "f64"))) | {11: "b8", 15: "bf16"}
"""Dtypes by their numbers in the runtime."""


def _described(value: Any) -> dict[str, Any]:
    if not isinstance(value, torch.Tensor):
        return {"value": value}
    shown = value.reshape(-1)[:6].tolist()
    return {
        "type": program_inputs.inputs_text((value,)),
        "shape": list(value.shape),
        "dtype": program_inputs.tensor_spec(value).dtype,
        "first": shown,
    }


if __name__ == "__main__":
    answer_request(run)
