"""The child process: runs one step that imports torch, runs the user's code or may abort.

Run as ``python -m opforge.edge.child STEP QUESTION_FILE ANSWER_FILE``. A step is a function from one
message to another. Its module must not import torch at the top: the parent imports it too.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, is_dataclass
from itertools import repeat
from pathlib import Path
from types import UnionType
from typing import IO, Any, Self, TypeVar, get_args, get_origin, get_type_hints

from opforge.errors import OpforgeError
from opforge.procs import linux
from opforge.procs.child import child_environment

STEPS = {
    "compare_schemas": "opforge.edge.build",
    "export_program": "opforge.edge.export",
    "prepare_programs": "opforge.edge.check",
    "compare_results": "opforge.edge.check",
    "run_jobs": "opforge.edge.run",
    "describe_operators": "opforge.edge.from_package",
}
"""The module of each step's function."""
CHILD_LIMIT_S = 600.0
_MAX_OUTPUT_LINES = 8


class ChildError(OpforgeError):
    """The child process ended before it answered."""

    exit_code = 1


@dataclass(frozen=True, slots=True)
class Message:
    """A question or an answer. It travels as JSON; the types of its fields restore it."""

    def wire(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_wire(cls, row: dict[str, Any]) -> Self:
        message: Self = _from_json(cls, row)
        return message


Question = TypeVar("Question", bound=Message)
Answer = TypeVar("Answer", bound=Message)


def _from_json(kind: Any, value: Any) -> Any:
    """Restore a value of a type: JSON has no tuples, paths, dataclasses or keys other than text."""
    arguments = get_args(kind)
    if value is None or kind is Any:
        return value
    if isinstance(kind, type) and is_dataclass(kind):
        kinds = get_type_hints(kind)
        return kind(**{name: _from_json(kinds[name], item) for name, item in value.items()})
    if get_origin(kind) is UnionType:  # with None
        return _from_json(arguments[0], value)
    if get_origin(kind) is tuple:
        items = repeat(arguments[0]) if arguments[-1] is Ellipsis else arguments
        return tuple(map(_from_json, items, value))
    if get_origin(kind) is dict:
        return {arguments[0](key): _from_json(arguments[1], item) for key, item in value.items()}
    return Path(value) if kind is Path else value


def write_message(path: Path, fields: dict[str, Any]) -> None:
    """Write a message to a file, whole or not at all."""
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(fields, default=os.fspath))
    fresh.replace(path)


def ask(
    step: Callable[[Question], Answer], question: Question, *, label: str, limit_s: float = CHILD_LIMIT_S
) -> Answer:
    """Run a step in a child process, and return its answer or raise its error."""
    with tempfile.TemporaryDirectory(prefix="opforge-edge-") as place:
        question_file, answer_file, output_file = (
            Path(place) / name for name in ("question.json", "answer.json", "output.txt")
        )
        write_message(question_file, question.wire())
        command = [sys.executable, "-P", "-W", "ignore", "-m", "opforge.edge.child"]
        command += [step.__name__, str(question_file), str(answer_file)]
        with output_file.open("wb") as output:
            code = _run_command(command, output, label, limit_s)
        if not answer_file.is_file():
            raise ChildError(f"{label}: its process {linux.describe_returncode(code)}.{_output_tail(output_file)}")
        reply = json.loads(answer_file.read_text())
    if "error" in reply:
        error = OpforgeError(reply["error"])
        error.exit_code = reply["code"]
        raise error
    answer: Answer = get_type_hints(step)["return"].from_wire(reply["answer"])
    return answer


def _run_command(command: list[str], output: IO[bytes], label: str, limit_s: float) -> int:
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        env=child_environment(),
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


@contextmanager
def user_code(explain: Callable[[Exception], OpforgeError]) -> Iterator[None]:
    """Explain whatever the user's code raises."""
    try:
        yield
    except Exception as error:  # noqa: BLE001  # boundary: the user's code may raise anything
        raise explain(error) from None


def main() -> None:
    """Answer the question of this child process."""
    linux.die_with_parent()
    name, question_file, answer_file = sys.argv[1:]
    try:
        step = getattr(importlib.import_module(STEPS[name]), name)
        question = get_type_hints(step)["question"].from_wire(json.loads(Path(question_file).read_text()))
        reply = {"answer": step(question).wire()}
    except OpforgeError as error:
        reply = {"error": str(error), "code": error.exit_code}
    write_message(Path(answer_file), reply)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # the user's libraries must not spoil the answer at exit


if __name__ == "__main__":
    main()
