"""Run work in a child process if it imports torch, runs the user's code or may abort.

Needs no torch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from opforge.errors import OpforgeError
from opforge.procs import linux

CHILD_LIMIT_S = 600.0
_MAX_OUTPUT_LINES = 8


class ChildError(OpforgeError):
    """The child process ended before it answered."""

    exit_code = 1


def ask(module: str, request: dict[str, Any], *, label: str, limit_s: float = CHILD_LIMIT_S) -> dict[str, Any]:
    """Run a module of opforge.edge in a child process, and return its answer or raise its error."""
    with tempfile.TemporaryDirectory(prefix="opforge-edge-") as place:
        request_file, answer_file, output_file = (
            Path(place) / name for name in ("request.json", "answer.json", "said.txt")
        )
        request_file.write_text(json.dumps(request))
        command = [
            sys.executable,
            "-P",
            "-W",
            "ignore",
            "-m",
            f"opforge.edge.{module}",
            str(request_file),
            str(answer_file),
        ]
        with output_file.open("wb") as output:
            code = _run_command(command, output, label, limit_s)
        if not answer_file.is_file():
            raise ChildError(f"{label}: its process {linux.describe_returncode(code)}.{_output_tail(output_file)}")
        reply: dict[str, Any] = json.loads(answer_file.read_text())
    if "error" in reply:
        error = OpforgeError(reply["error"])
        error.exit_code = reply["code"]
        raise error
    return reply


def _run_command(command: list[str], output: Any, label: str, limit_s: float) -> int:
    package = str(Path(__file__).resolve().parents[2])
    paths = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH", "")]))
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        raise ChildError(f"{label}: its process was stopped after {limit_s:g} s without a result") from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, 9)
            process.wait()


def _output_tail(output_file: Path) -> str:
    lines = output_file.read_text(errors="replace").strip().splitlines()[-_MAX_OUTPUT_LINES:]
    return "\n  last output:\n" + "\n".join(f"  {line[:300]}" for line in lines) if lines else ""


def answer_request(function: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Answer the request of this child process. The answer is written whole or not at all."""
    linux.die_with_parent()
    request_file, answer_file = Path(sys.argv[1]), Path(sys.argv[2])
    try:
        reply = function(json.loads(request_file.read_text()))
    except OpforgeError as error:
        reply = {"error": str(error), "code": error.exit_code}
    fresh = answer_file.with_suffix(".new")
    fresh.write_text(json.dumps(reply))
    fresh.replace(answer_file)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # the user's libraries must not spoil the answer at exit
