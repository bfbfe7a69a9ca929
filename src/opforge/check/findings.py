"""The findings of a check of registered operators, as data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any

CHECKS = {
    "inputs": "the operator can be called, and no call ends the process",
    "devices": "there are kernels for the devices",
    "schema": "writes and returns match the schema",
    "fake": "the fake gives shape, dtype, strides and device of the real result, for any size",
    "layouts": "the same elements in another layout give the same result",
    "mask": "nothing outside the tensors is read or written, and every element of a result is written, at any size",
    "compile": "torch.compile accepts it without a graph break and without a new graph for each size",
    "autograd": "gradients flow and are correct",
    "vmap": "torch.vmap gives what a loop gives",
    "determinism": "the same call gives the same result",
    "blocks": "programs of Triton kernels have a sensible amount of work",
    "opcheck": "torch.library.opcheck finds nothing else",
}
"""The checks in display order, each with the property it confirms."""

_CHECKS_BY_OPCHECK_TEST = {
    "test_schema": ("schema", "determinism", "mask"),
    "test_autograd_registration": ("autograd", "schema"),
    "test_faketensor": ("fake", "schema"),
    "test_aot_dispatch_dynamic": ("fake", "schema", "compile", "autograd", "determinism", "mask", "layouts"),
    "test_aot_dispatch_static": ("fake", "schema", "compile", "autograd", "determinism", "mask", "layouts"),
}
"""Checks of opforge that report a fault found by an opcheck test in more detail, by test."""


KIND_ENDED = "ended"
"""Kind of finding: the check's process died or timed out."""
KIND_MEMORY = "memory"
"""Kind of finding: out-of-bounds access, or reads of uninitialised memory."""
KIND_CONTENTS = "contents"
"""Kind of finding: it depends on tensor values, which are arbitrary after a MEMORY fault."""
KIND_NO_FORMULA = "formula"
"""Kind of finding: no autograd formula; the backward of another operator needs none for the operators it calls."""
KIND_TRACING = "tracing"
"""Kind of finding: the compiler cannot trace the operator, which follows from a wrong fake."""
_BEST_EXPLANATIONS = (
    "inputs",
    "mask",
    "layouts",
    "determinism",
    "schema",
    "autograd",
    "vmap",
    "compile",
    "fake",
    "blocks",
    "devices",
    "opcheck",
)
"""Checks by how well they explain a dead process, best first."""


class Status(StrEnum):
    PASSED = "passed"
    NOTE = "note"
    SKIPPED = "skipped"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Finding:
    """One observation of a check."""

    check: str
    status: Status
    what: str = ""
    """The observation, with values; for a skipped check, the reason."""
    fix: str = ""
    """Suggested change."""
    kind: str = ""
    """ENDED, MEMORY or CONTENTS; for opcheck, the name of its test."""

    @classmethod
    def from_wire(cls, fields: dict[str, str]) -> Finding:
        return cls(fields["check"], Status(fields["status"]), fields["what"], fields["fix"], fields["kind"])


Findings = Iterator[Finding]


def failed(check: str, what: str, fix: str, kind: str = "") -> Finding:
    return Finding(check, Status.FAILED, what, fix, kind)


def note(check: str, what: str, fix: str = "") -> Finding:
    return Finding(check, Status.NOTE, what, fix)


def skipped(check: str, reason: str) -> Finding:
    return Finding(check, Status.SKIPPED, reason)


@dataclass(frozen=True, slots=True)
class OperatorReport:
    """Calls, findings and verdict of one operator."""

    name: str
    """Name such as ``my_ops::swiglu``, with the overload if there is one."""
    schema: str
    calls: tuple[str, ...] = ()
    """Calls used for the checks, as text."""
    origin: str = ""
    """Source of the calls."""
    unsupported: str = ""
    """Why it could not be judged."""
    findings: tuple[Finding, ...] = ()

    @property
    def verdict(self) -> str:
        if any(finding.status is Status.FAILED for finding in self.findings):
            return "failed"
        return "unsupported" if self.unsupported else "passed"

    def findings_with(self, status: Status) -> list[Finding]:
        return [finding for finding in self.findings if finding.status is status]


@dataclass(frozen=True, slots=True)
class CheckReport:
    """The result of checking a target."""

    target: str
    device: str
    operators: tuple[OperatorReport, ...]
    notes: tuple[str, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    """Checks skipped by the user."""

    def counts(self) -> dict[str, int]:
        verdicts = [operator.verdict for operator in self.operators]
        return {name: verdicts.count(name) for name in ("passed", "failed", "unsupported")}

    @property
    def exit_code(self) -> int:
        counts = self.counts()
        if counts["failed"]:
            return 1
        return 0 if counts["passed"] else 5

    def as_json(self) -> dict[str, Any]:
        rows = [{**asdict(operator), "verdict": operator.verdict} for operator in self.operators]
        return {**asdict(self), "operators": rows, "counts": self.counts()}


def demote_consequences(findings: Iterable[Finding], backward_of: Iterable[str] = ()) -> tuple[Finding, ...]:
    """Return findings in the order of the checks; consequences of another failure become notes.

    ``backward_of`` names the operators whose backward calls this one.
    """
    order = list(CHECKS)
    ordered = sorted(findings, key=lambda finding: order.index(finding.check))
    ordered = [_demote_after_memory_fault(finding, ordered) for finding in ordered]
    ordered = [_demote_after_death(finding, ordered) for finding in ordered]
    failed = {finding.check for finding in ordered if finding.status is Status.FAILED}
    ordered = [_demote_after_failed_checks(finding, failed) for finding in ordered]
    if "fake" in failed:
        follows = "torch.compile cannot trace it either, as expected after fake"
        ordered = [_as_note(f, follows) if f.kind == KIND_TRACING else f for f in ordered]
    if callers := ", ".join(sorted(backward_of)):
        excused = f"there is no autograd formula: the backward of {callers} calls it, and has no second derivatives"
        ordered = [_as_note(f, excused) if f.kind == KIND_NO_FORMULA else f for f in ordered]
    return tuple(ordered)


def _demote_after_memory_fault(finding: Finding, known: list[Finding]) -> Finding:
    """Turn a finding on contents into a note if the operator has a memory fault."""
    cause = next((f for f in known if f.kind == KIND_MEMORY and f.status is Status.FAILED), None)
    if cause is None or finding.kind != KIND_CONTENTS or finding.status is not Status.FAILED:
        return finding
    return _as_note(finding, f"{finding.what}; this may be caused by the failure of {cause.check}")


def _demote_after_death(finding: Finding, known: list[Finding]) -> Finding:
    """Turn the finding of a dead check into a note if another check explains it better."""
    if finding.kind != KIND_ENDED:
        return finding
    mask_explains = any(f.check == "mask" and f.status is Status.FAILED and f.kind != KIND_ENDED for f in known)
    ended = {f.check for f in known if f.kind == KIND_ENDED}
    explaining = "mask" if mask_explains else next(check for check in _BEST_EXPLANATIONS if check in ended)
    return (
        _as_note(finding, f"{finding.what}; see {explaining}")
        if mask_explains or finding.check != explaining
        else finding
    )


def _demote_after_failed_checks(finding: Finding, failed: set[str]) -> Finding:
    """Turn a finding of opcheck into a note if a failed opforge check explains it better."""
    explaining = [check for check in _CHECKS_BY_OPCHECK_TEST.get(finding.kind, ()) if check in failed]
    if finding.check != "opcheck" or finding.status is not Status.FAILED or not explaining:
        return finding
    return _as_note(finding, f"{finding.kind} fails too, as expected after {' and '.join(explaining)}")


def _as_note(finding: Finding, message: str) -> Finding:
    return replace(finding, status=Status.NOTE, what=message, fix="")
