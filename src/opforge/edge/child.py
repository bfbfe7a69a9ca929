"""The child process: runs one step that imports torch, runs the user's code or may abort.

``python -m opforge.edge.child FD`` imports torch and forks a process for each step. A step is a
function from one message to another. Its module must not import torch at the top: the parent
imports it too.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, is_dataclass
from itertools import repeat
from pathlib import Path
from types import UnionType
from typing import Any, BinaryIO, NoReturn, Self, TypeVar, get_args, get_origin, get_type_hints

from opforge.errors import OpforgeError
from opforge.procs import linux
from opforge.procs.channel import Channel
from opforge.procs.child import child_environment, message_pipe, send
from opforge.procs.preloaded import ForkingModule, PreloadError, serve_forks

STEPS = {
    "compare_schemas": "opforge.edge.build",
    "export_program": "opforge.edge.export",
    "prepare_programs": "opforge.edge.check",
    "compare_results": "opforge.edge.check",
    "run_jobs": "opforge.edge.run",
    "describe_operators": "opforge.edge.from_package",
}
"""The module of each step's function."""
_LIBRARIES = {
    "export_program": ("executorch.exir",),
    "prepare_programs": ("executorch.exir",),
    "run_jobs": ("executorch.runtime",),
}
"""What steps need beside torch. It is imported before forking, so that the next step has it too."""
FORKING_PROCESS = ForkingModule("opforge.edge.child")
"""The process that imports torch and forks the steps."""
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


def ask(
    step: Callable[[Question], Answer], question: Question, *, label: str, limit_s: float = CHILD_LIMIT_S
) -> Answer:
    """Run a step in a child process, and return its answer or raise its error."""
    text = json.dumps(question.wire(), default=os.fspath)
    environment = child_environment()
    try:
        forked = FORKING_PROCESS.ask([step.__name__, text], environment, limit_s=limit_s)
    except PreloadError as error:
        raise ChildError(f"{label}: {error}") from None
    with forked as child:
        reply = next((row for row, _ in child.messages()), None)
        code = child.wait()
        if child.timed_out:
            raise ChildError(f"{label}: its process was stopped after {limit_s:g} s without a result")
        if reply is None:
            raise ChildError(f"{label}: its process {linux.describe_returncode(code)}.{_output_tail(child.output())}")
    if "error" in reply:
        problem = OpforgeError(reply["error"])
        problem.exit_code = reply["code"]
        raise problem
    answer: Answer = get_type_hints(step)["return"].from_wire(reply["answer"])
    return answer


def _output_tail(output: str) -> str:
    lines = output.strip().splitlines()[-_MAX_OUTPUT_LINES:]
    return "\n  last output:\n" + "\n".join(f"  {line[:300]}" for line in lines) if lines else ""


@contextmanager
def user_code(explain: Callable[[Exception], OpforgeError]) -> Iterator[None]:
    """Explain whatever the user's code raises."""
    try:
        yield
    except Exception as error:  # noqa: BLE001  # boundary: the user's code may raise anything
        raise explain(error) from None


def main() -> None:
    """Import torch, and fork a process for each step, until the parent hangs up."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a fork has no other thread

    def prepare(question: list[str]) -> None:
        for library in _LIBRARIES.get(question[0], ()):
            with contextlib.suppress(ImportError):  # the step says what is missing
                importlib.import_module(library)

    def answer(question: list[str], pipe: int) -> NoReturn:
        torch.set_num_threads(threads)
        name, text = question
        _answer(name, text, message_pipe(pipe))

    serve_forks(Channel.from_fd(int(sys.argv[1])), prepare, answer)


def _answer(name: str, text: str, pipe: BinaryIO) -> NoReturn:
    """Run a step, send its answer, and end this process."""
    try:
        step = getattr(importlib.import_module(STEPS[name]), name)
        question = get_type_hints(step)["question"].from_wire(json.loads(text))
        reply = {"answer": step(question).wire()}
    except OpforgeError as error:
        reply = {"error": str(error), "code": error.exit_code}
    except BaseException:  # noqa: BLE001  # nothing may get back to the loop that forks
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    send(pipe, reply)
    pipe.flush()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # the user's libraries must not spoil the answer at exit


if __name__ == "__main__":
    main()
