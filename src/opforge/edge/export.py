"""Export a model to a ``.pte`` in a child process.

Parses the command line's argument for a model. Only the step of the child needs torch.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, replace
from pathlib import Path

from opforge.edge import toolchain
from opforge.edge.bindings import custom_operators
from opforge.edge.child import CHILD_LIMIT_S, Message, ask
from opforge.errors import OpforgeError
from opforge.models.target import ModelTarget, find_model

_EXPECTED = (
    "give FILE.py with model() and inputs(), FILE.py:NAME for another function or module class of it, "
    "or module:function for a function that returns the model and its inputs"
)
_DYNAMIC = re.compile(r"(?P<input>\w+)\.(?P<dim>\d+)=(?P<low>\d+)\.\.(?P<high>\d+)")

DynamicRanges = dict[str, dict[int, tuple[int, int]]]
"""Minimum and maximum size by input (name or number) and dimension."""


class ExportError(OpforgeError):
    """A model cannot be exported to a program."""

    exit_code = 1


@dataclass(frozen=True, slots=True)
class ExportRequest(Message):
    """A model to export."""

    target: ModelTarget
    dynamic: DynamicRanges
    xnnpack: bool
    out: Path


@dataclass(frozen=True, slots=True)
class ExportResult(Message):
    """A program that was exported."""

    path: Path
    operators: tuple[str, ...]
    delegated: int
    """Number of parts that a backend runs."""
    taken_apart: tuple[str, ...]
    """Operators that export decomposed, because they are registered as composite."""
    inputs: str
    """In the text form of a case's arguments."""
    bytes: int
    seconds: float = 0.0
    """Includes the start of the process."""

    @property
    def custom(self) -> list[str]:
        """Return the operators that need a library of kernels."""
        return custom_operators(self.operators)


def parse_target(argument: str) -> ModelTarget:
    """Return the target for ``FILE.py``, ``FILE.py:NAME`` or ``module:function``."""
    file, colon, name = argument.rpartition(":")
    if argument.endswith(".py"):
        file, name = argument, "model"
    elif not (colon and file.endswith(".py")):
        target = find_model(argument)
        if target.library:
            raise OpforgeError(f"{argument!r} is an architecture's name, which cannot be exported; {_EXPECTED}")
        return target
    if not Path(file).is_file():
        raise OpforgeError(f"there is no file {file!r}; {_EXPECTED}")
    if not name.isidentifier():
        raise OpforgeError(f"{argument!r} is not FILE.py:NAME; {_EXPECTED}")
    path = Path(file).resolve()
    return ModelTarget(argument, file=str(path), function=name, folder=str(path.parent))


def parse_dynamic(words: list[str]) -> DynamicRanges:
    """Parse the values of ``--dynamic INPUT.DIM=LOW..HIGH``."""
    ranges: DynamicRanges = {}
    for word in words:
        match = _DYNAMIC.fullmatch(word)
        if match is None:
            raise OpforgeError(
                f"--dynamic {word!r} is not INPUT.DIM=LOW..HIGH, for example x.0=1..64; "
                "INPUT is a name of forward's, or a number"
            )
        low, high = int(match["low"]), int(match["high"])
        if not 1 <= low < high:
            raise OpforgeError(f"--dynamic {word!r}: sizes go from {low} to {high}; 1 or more, and the second larger")
        ranges.setdefault(match["input"], {})[int(match["dim"])] = (low, high)
    return ranges


def export_model(
    target: ModelTarget,
    out: Path,
    *,
    dynamic: DynamicRanges | None = None,
    xnnpack: bool = False,
    limit_s: float = CHILD_LIMIT_S,
) -> ExportResult:
    """Export a model to a file, which is written whole or not at all."""
    toolchain.find_executorch()
    if out.is_dir() or not out.resolve().parent.is_dir():
        raise OpforgeError(f"{str(out)!r} cannot be written: it is a folder, or its folder does not exist; name a file")
    start = time.perf_counter()
    request = ExportRequest(target, dynamic or {}, xnnpack, out.resolve())
    result = ask(export_program, request, label=f"exporting {target.name}", limit_s=limit_s)
    return replace(result, path=out, seconds=time.perf_counter() - start)


def export_program(question: ExportRequest) -> ExportResult:
    """Export one model: a step of the child."""
    from opforge.edge.lowering import lower
    from opforge.edge.model_loading import load_model
    from opforge.edge.program_inputs import inputs_text

    loaded = load_model(question.target)
    lowered = lower(loaded, loaded.inputs, question.dynamic, xnnpack=question.xnnpack)
    write_program(question.out, lowered.data)
    return ExportResult(
        question.out,
        lowered.operators,
        lowered.delegated,
        lowered.decomposed,
        inputs_text(loaded.inputs),
        len(lowered.data),
    )


def write_program(path: Path, data: bytes) -> None:
    """Write a program to a file, whole or not at all."""
    fresh = path.with_name(f".{path.name}.new")
    try:
        fresh.write_bytes(data)
        fresh.replace(path)
    except OSError as error:
        fresh.unlink(missing_ok=True)
        raise ExportError(f"{str(path)!r} cannot be written: {error.strerror}") from None
