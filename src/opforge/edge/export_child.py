"""Export one model: ``python -m opforge.edge.export_child REQUEST ANSWER``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from opforge.edge.child import answer_request
from opforge.edge.lowering import ExportError, lower
from opforge.edge.model import load_model
from opforge.edge.program_inputs import inputs_text
from opforge.edge.target import Target


def export(request: dict[str, Any]) -> dict[str, Any]:
    start = time.perf_counter()
    subject = load_model(Target(**request["target"]))
    ranges = {
        name: {int(dim): (low, high) for dim, (low, high) in dims.items()} for name, dims in request["dynamic"].items()
    }
    lowered = lower(subject, subject.inputs, ranges, xnnpack=request["xnnpack"])
    write_program(Path(request["out"]), lowered.data)
    return {
        "operators": list(lowered.operators),
        "delegated": lowered.delegated,
        "taken_apart": list(lowered.decomposed),
        "inputs": inputs_text(subject.inputs),
        "bytes": len(lowered.data),
        "seconds": time.perf_counter() - start,
    }


def write_program(path: Path, data: bytes) -> None:
    """Write a program to a file, whole or not at all."""
    fresh = path.with_name(f".{path.name}.new")
    try:
        fresh.write_bytes(data)
        fresh.replace(path)
    except OSError as error:
        fresh.unlink(missing_ok=True)
        raise ExportError(f"{str(path)!r} cannot be written: {error.strerror}") from None


if __name__ == "__main__":
    answer_request(export)
