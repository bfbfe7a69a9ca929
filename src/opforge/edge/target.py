"""Parse the command line's argument for a model. Needs no torch."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from opforge.errors import OpforgeError
from opforge.models import target as models

_EXPECTED = (
    "give FILE.py with model() and inputs(), FILE.py:NAME for another function or module class of it, "
    "or module:function for a function that returns the model and its inputs"
)
_DYNAMIC = re.compile(r"(?P<input>\w+)\.(?P<dim>\d+)=(?P<low>\d+)\.\.(?P<high>\d+)")

DynamicRanges = dict[str, dict[int, tuple[int, int]]]
"""Minimum and maximum size by input (name or number) and dimension."""


@dataclass(frozen=True, slots=True)
class Target:
    """Location of a model's code."""

    name: str
    """As the user wrote it."""
    file: str = ""
    function: str = "model"
    """A function that returns a model, or a model class."""
    module: str = ""
    folder: str = ""
    """Folder to import modules from."""

    def wire(self) -> dict[str, Any]:
        return asdict(self)


def parse_target(argument: str) -> Target:
    """Return the target for ``FILE.py``, ``FILE.py:NAME`` or ``module:function``."""
    file, colon, name = argument.rpartition(":")
    if argument.endswith(".py"):
        file, name = argument, "model"
    elif not (colon and file.endswith(".py")):
        target = models.find_model(argument)
        return Target(argument, function=target.function, module=target.module, folder=target.folder)
    if not Path(file).is_file():
        raise OpforgeError(f"there is no file {file!r}; {_EXPECTED}")
    if not name.isidentifier():
        raise OpforgeError(f"{argument!r} is not FILE.py:NAME; {_EXPECTED}")
    path = Path(file).resolve()
    return Target(argument, file=str(path), function=name, folder=str(path.parent))


def parse_dynamic(words: list[str]) -> DynamicRanges:
    """Parse the values of ``--dynamic INPUT.DIM=LOW..HIGH``."""
    ranges: DynamicRanges = {}
    for word in words:
        match = _DYNAMIC.fullmatch(word)
        if match is None:
            raise OpforgeError(
                f"--dynamic {word!r} is not INPUT.DIM=LOW..HIGH, for example x.0=1..64; INPUT is a name of forward's, or a number"
            )
        low, high = int(match["low"]), int(match["high"])
        if not 1 <= low < high:
            raise OpforgeError(f"--dynamic {word!r}: sizes go from {low} to {high}; 1 or more, and the second larger")
        ranges.setdefault(match["input"], {})[int(match["dim"])] = (low, high)
    return ranges
