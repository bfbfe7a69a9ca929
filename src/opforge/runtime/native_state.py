"""The state of the native runtime in this installation, for `opforge doctor`. Nothing is built.

As a program, it prints the state as JSON: loading a library may end a process.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass

import torch

from .enabling import NATIVE_VARIABLE
from .loading import aten_operators
from .native.binding import NativeLibrary
from .native.building import NativeError, NotBuiltError, build
from .torch_native import ADVICE, overridden_by_torch


@dataclass(frozen=True, slots=True)
class NativeState:
    """Whether calls can go through the native runtime here, and through launch plans."""

    wanted: bool
    """False if the environment switches it off."""
    library: str | None = None
    """Path of the library for this torch; None if there is none, or none yet."""
    layout: tuple[int, ...] = ()
    """The layout of torch that the library has found and that is known; empty without a library."""
    will_be_built: str = ""
    """How the library will be built on first use; empty if that is not so."""
    problem: str = ""
    """Why there is no library, and what to do; empty if there is one or will be."""
    no_plans_reason: str = ""
    """Why launch plans are impossible; empty if they are possible."""
    overridden_by_torch: tuple[str, ...] = ()
    """Operators that torch itself overrides from Python, with the dispatch key: ``bmm.default (CUDA)``."""


def state() -> NativeState:
    """Return the state of the native runtime for the running torch."""
    library: NativeLibrary | None = None
    path, will_be_built, problem = None, "", ""
    try:
        path = build(only_find=True)
        library = NativeLibrary(path)
    except NotBuiltError as error:
        will_be_built = str(error)
    except NativeError as error:
        problem = str(error)
    keys = ("CPU", "CUDA") if torch.backends.cuda.is_built() else ("CPU",)
    names = aten_operators()
    return NativeState(
        wanted=os.environ.get(NATIVE_VARIABLE) != "0",
        library=str(path) if library else None,
        layout=library.layout if library else (),
        will_be_built=will_be_built,
        problem=problem,
        no_plans_reason=_no_plans_reason(library, problem),
        overridden_by_torch=tuple(f"{op} ({k})" for k in keys for op in overridden_by_torch(k, names)),
    )


def _no_plans_reason(library: NativeLibrary | None, problem: str) -> str:
    if not torch.cuda.is_available():
        return "torch sees no GPU" if torch.version.cuda else "torch was built without CUDA"
    if library is None:
        return "they need the library" if problem else ""
    try:
        library.load_driver()
    except NativeError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    sys.stdout.write(json.dumps({**asdict(state()), "advice": ADVICE}) + "\n")
