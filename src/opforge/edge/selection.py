"""Select the operators of a folder for its library. Needs no torch.

The selection is all of them, named ones, or those that a model needs.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from opforge.edge.bindings import RUNTIME_NAMESPACES, BindingEntry, BindingError
from opforge.errors import OpforgeError, UnknownNameError
from opforge.procs import linux

_READ_LIMIT_S = 60.0
_MAGIC = slice(4, 6)
_READER_SOURCE = """
import json, sys
import torch  # its libraries are those of the next module
from executorch.extension.pybindings import _C as runtime
from executorch.codegen.tools.selective_build import _get_program_from_buffer, _get_program_operators
data = open(sys.argv[1], "rb").read()
try:
    runtime._load_program_from_buffer(data, program_verification=runtime.Verification.InternalConsistency)
except RuntimeError:
    sys.exit("the runtime's verifier refuses it: it is cut off or damaged; export it again")
print(json.dumps(sorted(set(_get_program_operators(_get_program_from_buffer(data))))))
"""


@dataclass(frozen=True, slots=True)
class Selection:
    """The operators to register."""

    names: tuple[str, ...]
    origin: str
    """How they were selected."""


def select_all(entries: Sequence[BindingEntry]) -> Selection:
    return Selection(tuple(entry.name for entry in entries), "all")


def select_names(entries: Sequence[BindingEntry], names: Sequence[str]) -> Selection:
    """Return the named operators: ``my_ops::mul3.out``, ``my_ops::mul3`` or ``mul3``."""
    chosen: list[str] = []
    for word in names:
        matches = [entry.name for entry in entries if word in _spellings(entry.name)]
        if not matches:
            raise UnknownNameError("operator", word, [entry.name for entry in entries], "bound in the YAML file")
        chosen += [name for name in matches if name not in chosen]
    return Selection(tuple(chosen), "named")


def _spellings(name: str) -> set[str]:
    without_overload, without_namespace = name.partition(".")[0], name.partition("::")[2]
    return {name, without_overload, without_namespace, without_namespace.partition(".")[0]}


def select_for_model(entries: Sequence[BindingEntry], model: Path) -> Selection:
    """Return the operators that a ``.pte`` needs; raise if one has no entry."""
    needed = custom_operators(program_operators(model))
    known = [entry.name for entry in entries]
    if missing := [name for name in needed if name not in known]:
        raise BindingError(
            f"{model} needs {', '.join(missing)}, and no entry binds it to a kernel; known: {', '.join(known)}. "
            "Add an entry with func and kernels, and the kernel"
        )
    return Selection(tuple(name for name in known if name in needed), f"of {model.name}")


def custom_operators(names: Sequence[str]) -> list[str]:
    """Return the operators whose kernels do not come with ExecuTorch."""
    return [name for name in names if name.partition("::")[0] not in RUNTIME_NAMESPACES]


def program_operators(model: Path) -> list[str]:
    """Return the names of all operators that a ``.pte`` calls.

    The program is verified first: the reader trusts its input, and would read past the end of a
    truncated program. Both happen in a child process.
    """
    check_program(model)
    done = subprocess.run(
        [sys.executable, "-P", "-c", _READER_SOURCE, str(model)],
        capture_output=True,
        text=True,
        timeout=_READ_LIMIT_S,
        check=False,
    )
    if done.returncode:
        outcome = linux.describe_returncode(done.returncode)
        last_line = (done.stderr.strip().splitlines() or [""])[-1]
        raise OpforgeError(
            f"{str(model)!r} cannot be read as a program of ExecuTorch: its reader {outcome}. {last_line}".rstrip()
        )
    names: list[str] = json.loads(done.stdout.splitlines()[-1])
    return names


def check_program(model: Path) -> None:
    """Raise if a file is not a ``.pte``, before anything trusts it."""
    try:
        with model.open("rb") as handle:
            head = handle.read(8)
    except OSError as error:
        raise OpforgeError(
            f"{str(model)!r} cannot be read: {error.strerror}; `opforge edge export` makes a .pte"
        ) from None
    if head[_MAGIC] != b"ET":
        raise OpforgeError(
            f"{str(model)!r} is not a program of ExecuTorch: a .pte has ET at byte 4; `opforge edge export` makes one"
        )
