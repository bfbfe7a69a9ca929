"""Export one model: ``python -m opforge.edge.export_child REQUEST ANSWER``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from opforge.edge.asking import answer
from opforge.edge.inputs import text_of
from opforge.edge.lowering import ExportError, lower
from opforge.edge.subject import load
from opforge.edge.target import Target


def export(request: dict[str, Any]) -> dict[str, Any]:
    start = time.perf_counter()
    subject = load(Target(**request["target"]))
    ranges = {
        name: {int(dim): (low, high) for dim, (low, high) in dims.items()} for name, dims in request["dynamic"].items()
    }
    lowered = lower(subject, subject.inputs, ranges, xnnpack=request["xnnpack"])
    write(Path(request["out"]), lowered.data)
    return {
        "operators": list(lowered.operators),
        "delegated": lowered.delegated,
        "taken_apart": list(lowered.taken_apart),
        "inputs": text_of(subject.inputs),
        "bytes": len(lowered.data),
        "seconds": time.perf_counter() - start,
    }


def write(path: Path, data: bytes) -> None:
    """Write a program to a file, whole or not at all."""
    fresh = path.with_name(f".{path.name}.new")
    try:
        fresh.write_bytes(data)
        fresh.replace(path)
    except OSError as error:
        fresh.unlink(missing_ok=True)
        raise ExportError(f"{str(path)!r} cannot be written: {error.strerror}") from None


if __name__ == "__main__":
    answer(export)
