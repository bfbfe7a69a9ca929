"""Prepare a check, or compare its results. No kernel runs in this process.

Run as ``python -m opforge.edge.check_child REQUEST ANSWER``.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from opforge.edge import program_inputs
from opforge.edge.bindings import BindingEntry
from opforge.edge.child import answer_request
from opforge.edge.definitions import check_schemas, import_definitions, refuse_decomposed
from opforge.edge.model import LoadedModel, load_model
from opforge.edge.model_cases import CaseGroup, case_groups, reference_results
from opforge.edge.target import Target
from opforge.errors import OpforgeError


def run_step(request: dict[str, Any]) -> dict[str, Any]:
    return _prepare(request) if request["step"] == "prepare" else _compare(request)


def _prepare(request: dict[str, Any]) -> dict[str, Any]:
    """Import the folder's operators, and export its model for all programs to check.

    The operators are compared with the entries of the YAML file.
    """
    torch.manual_seed(0)
    out = Path(request["out"])
    if request["definitions"]:
        path = Path(request["definitions"])
        import_definitions(path)
        check_schemas([BindingEntry(**row) for row in request["entries"]], path.name)
    subject = load_model(Target(**request["target"]))
    entries = [BindingEntry(**row) for row in request["entries"]]
    return {
        "programs": [
            _program(subject, group, entries, out, number) for number, group in enumerate(case_groups(subject))
        ]
    }


def _program(
    subject: LoadedModel, group: CaseGroup, entries: list[BindingEntry], out: Path, number: int
) -> dict[str, Any]:
    from opforge.edge.lowering import lower  # takes seconds to import

    start = time.perf_counter()
    row: dict[str, Any] = {"kind": group.kind, "example": program_inputs.inputs_text(group.example), "runs": []}
    try:
        lowered = lower(subject, group.example, group.ranges)
        refuse_decomposed(entries, lowered.decomposed)
    except OpforgeError as error:
        return {**row, "error": str(error)}
    place = out / f"{number}.pte"
    place.write_bytes(lowered.data)
    row |= {"program": str(place), "operators": list(lowered.operators), "seconds": time.perf_counter() - start}
    row["runs"] = [_run(subject, case, out / f"{number}-{index}") for index, case in enumerate(group.inputs)]
    return row


def _run(subject: LoadedModel, case: tuple[Any, ...], place: Path) -> dict[str, Any]:
    """Save the inputs of a run and its expected results."""
    place.mkdir()
    expected, exact = reference_results(subject.model, case)
    row = {
        "case": program_inputs.inputs_text(case),
        "place": str(place),
        "others": program_inputs.save_tensors(place / "inputs.safetensors", program_inputs.flatten(case)),
        "expected": program_inputs.save_tensors(place / "expected.safetensors", expected),
    }
    return row | (
        {"exact": program_inputs.save_tensors(place / "exact.safetensors", exact)} if exact is not None else {}
    )


def _compare(request: dict[str, Any]) -> dict[str, Any]:
    return {"compared": [_compared(row) for row in request["runs"]]}


def _compared(row: dict[str, Any]) -> dict[str, Any]:
    """Compare the results of a run with eager PyTorch.

    The tolerance comes from eager PyTorch's own error against float64.
    """
    from opforge.models.compare import compare

    place = Path(row["place"])
    expected = program_inputs.load_values(place / "expected.safetensors", row["expected"])
    exact = (
        program_inputs.load_values(place / "exact.safetensors", row["exact"])
        if "exact" in row
        else [None] * len(expected)
    )
    results = program_inputs.load_values(place / "results.safetensors", [None] * len(expected))
    reasons, difference = [], 0.0
    for number, (ours, eager, wide) in enumerate(zip(results, expected, exact, strict=True)):
        if not isinstance(eager, torch.Tensor):
            continue  # a constant of the program
        if not isinstance(ours, torch.Tensor):
            reasons.append(f"result {number} is not a tensor")
            continue
        compared = compare(f"result {number}", ours, eager, wide if isinstance(wide, torch.Tensor) else None)
        reasons += [] if compared.passed else [compared.reason]
        difference = max(difference, _difference(ours, eager))
    return {"reason": "; ".join(reasons), "difference": difference}


def _difference(ours: torch.Tensor, eager: torch.Tensor) -> float:
    if ours.shape != eager.shape or not eager.numel():
        return 0.0
    differences = (ours.double() - eager.double()).abs()
    equal = (ours == eager) | (ours.isnan() & eager.isnan())
    return float(torch.where(equal, 0.0, differences).max())


if __name__ == "__main__":
    answer_request(run_step)
