"""Text on what is proven of a run's kernels.

It comes from the proof beside each kernel, if that is of the source that was judged.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from opforge.judge.verdict import VerdictKind
from opforge.kernels.proof import Proof, ProofRow, proof_path, read_proof
from opforge.runs.manifest import Manifest, PlannedKernel
from opforge.runs.proofs import VOIDING_VERDICTS
from opforge.runs.score import Summary
from opforge.runtime.value_ranges import DEFAULT, ValueRanges


class ProofText:
    """The proofs of a run's kernels, read on demand."""

    def __init__(self, manifest: Manifest, summary: Summary) -> None:
        self._manifest = manifest
        self._summary = summary
        tallies = summary.operators.values()
        self._disqualified = {t.kernel for t in tallies if any(t.verdicts[verdict] for verdict in VOIDING_VERDICTS)}

    def describe(self, kernel: PlannedKernel, file: Path) -> dict[str, Any]:
        """Return what the page shows of a kernel's proof.

        ``remark`` says why there is no proof, or what to know about it.
        """
        if kernel.reference:
            return {"remark": "Only operators of ATen have proofs; this one is judged against a reference."}
        if kernel.name in self._disqualified:
            return {"remark": "Nothing: it cheated, crashed or hung in this run."}
        proof = read_proof(file, kernel.digest)
        if isinstance(proof, str):
            return {"remark": self._why_no_proof(kernel, file, proof)}
        if mismatch := self._environment_mismatch(proof):
            return {"remark": mismatch}
        if not proof.operators and (failures := proof.failure_summary()):
            return {"remark": f"Nothing: {failures}."}
        return {
            "remark": ""
            if self._is_of_this_run(file)
            else f"By another run of the same source. {self._end(kernel)}".strip(),
            "about": [("suites", ", ".join(proof.suites)), ("device", proof.device), ("torch", proof.torch)],
            "rows": [_row(op, key, row) for op, rows in proof.operators.items() for key, row in rows.items()],
            "without": {op: self._why_operator_unproven(op, proof) for op in kernel.ops if not proof.operators.get(op)},
        }

    def _is_of_this_run(self, file: Path) -> bool:
        return self._manifest.proofs is not None and str(proof_path(file)) in self._manifest.proofs.written

    def _why_no_proof(self, kernel: PlannedKernel, file: Path, reason: str) -> str:
        if self._is_of_this_run(file):
            return f"This run's proof is no longer there: {reason}"
        return self._end(kernel) or "Nothing: all dtypes have failed cases, or none that passed."

    def _end(self, kernel: PlannedKernel) -> str:
        """Return why this run has written no proof of a kernel; empty if it has."""
        proofs = self._manifest.proofs
        if proofs is None:
            return "This run has written no proofs yet; they are written at its end."
        reason = proofs.remarks.get(kernel.name) or proofs.failed  # older runs have one for all
        return f"This run could not write its proofs: {reason}" if reason else ""

    def _environment_mismatch(self, proof: Proof) -> str:
        """Return a remark if a proof is not for this run's torch and device; empty otherwise."""
        expected = self._manifest.versions.get("torch"), self._manifest.machine.name
        if (proof.torch, proof.device) == expected:
            return ""
        return f"The proof beside it is for another environment: {proof.device}, torch {proof.torch}."

    def _why_operator_unproven(self, op: str, proof: Proof) -> str:
        tally = self._summary.operators.get(op)
        if tally is None:
            return "not judged"
        if not tally.passed:
            return "no case passed"
        if tally.passed + tally.verdicts[VerdictKind.UNSUPPORTED] < tally.total:
            return "all dtypes have failed cases, or none that passed"
        return proof.failure_summary(op) or "ATen raises on its cases, or they have no tensor"


def _row(op: str, dtypes: str, proven: ProofRow) -> dict[str, str]:
    return {
        "op": op,
        "dtypes": dtypes.replace(",", ", "),
        "dimensions": _ranges([proven.rank]),
        "elements": _ranges([proven.numel]),
        "extents": _extents(proven.extents),
        "layouts": ", ".join(proven.layouts).replace("_", " "),
        "arguments": "; ".join(f"{name}: {_values(value_ranges)}" for name, value_ranges in proven.arguments.items()),
        "speed": _speed(proven),
    }


def _extents(extents: Iterable[Iterable[tuple[int, int]]]) -> str:
    """Return the proven sizes of each tensor argument's dimensions, in the order of its shape."""
    return ", ".join(f"[{' × '.join(_ranges([bounds]) for bounds in reversed([*ranges]))}]" for ranges in extents)


def _speed(proven: ProofRow) -> str:
    """Return the sizes at which a kernel is not slower."""
    if not proven.timed:
        return "not timed"
    return _ranges(proven.sizes(not_slower=True)) or f"none: slower at {_ranges(proven.sizes(not_slower=False))}"


def _values(value_ranges: ValueRanges) -> str:
    """Return the values that a non-tensor argument may have."""
    return ", ".join(
        "left out" if word == DEFAULT else f"{word} {_ranges([(bounds[0], bounds[1])])}" if bounds else word
        for word, bounds in value_ranges.items()
    )


def _ranges(ranges: Iterable[tuple[float, float]]) -> str:
    return "; ".join(str(low) if low == high else f"{low} to {high}" for low, high in ranges)
