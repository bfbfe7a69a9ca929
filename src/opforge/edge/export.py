"""Export a model to a ``.pte`` in a child process. Needs no torch."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from opforge.edge import toolchain
from opforge.edge.child import CHILD_LIMIT_S, ask
from opforge.edge.selection import custom_operators
from opforge.edge.target import DynamicRanges, Target
from opforge.errors import OpforgeError


@dataclass(frozen=True, slots=True)
class ExportResult:
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
    seconds: float
    """Includes the start of the process."""

    @property
    def custom(self) -> list[str]:
        """Return the operators that need a library of kernels."""
        return custom_operators(self.operators)


def export_model(
    target: Target,
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
    request = {"target": target.wire(), "dynamic": dynamic or {}, "xnnpack": xnnpack, "out": str(out.resolve())}
    reply = ask("export_child", request, label=f"exporting {target.name}", limit_s=limit_s)
    return ExportResult(
        out,
        tuple(reply["operators"]),
        reply["delegated"],
        tuple(reply["taken_apart"]),
        reply["inputs"],
        reply["bytes"],
        time.perf_counter() - start,
    )
