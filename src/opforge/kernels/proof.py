"""Location and contents of a kernel's proof. `opforge.runs.proofs` computes it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from opforge.kernels.source import UNREADABLE
from opforge.runtime import proof_files
from opforge.runtime.value_ranges import AllowedValues

PROOF_SUFFIX = ".proof.json"


def proof_path(file: Path) -> Path:
    """Return the path of the proof of a kernel's file: beside it."""
    return file.with_name(file.stem + PROOF_SUFFIX)


@dataclass(frozen=True, slots=True)
class ProofRow:
    """The proven calls of one operator with the same tensor dtypes."""

    rank: tuple[int, int]
    numel: tuple[int, int]
    """Range for the largest tensor of a call."""
    extents: tuple[tuple[tuple[int, int], ...], ...]
    """Ranges of each tensor argument, by dimension, last dimension first."""
    layouts: tuple[str, ...]
    timed: tuple[tuple[int, int, bool], ...] = ()
    """Ascending element-count ranges, with whether the kernel is not slower; empty if not timed."""
    arguments: AllowedValues = field(default_factory=dict)
    """Proven values of non-tensor arguments, as in the file; arguments not listed were omitted."""
    native: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """How passed cases ran behind native slots (replayed, C++, Python), each with their number and sizes."""

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> ProofRow:
        (min_rank, max_rank), (min_numel, max_numel) = row["rank"], row["numel"]
        timed = tuple((first, last, not_slower) for first, last, not_slower in row.get("timed", ()))
        extents = tuple(tuple((first, last) for first, last in ranges) for ranges in row["extents"])
        return cls(
            (min_rank, max_rank),
            (min_numel, max_numel),
            extents,
            tuple(row["layouts"]),
            timed,
            row.get("arguments", {}),
            row.get("native", {}),
        )

    def sizes(self, *, not_slower: bool) -> list[tuple[int, int]]:
        """Return the ranges of proven sizes at which the kernel is not slower, or slower."""
        low, high = self.numel
        clipped = [(max(low, first), min(high, last)) for first, last, good in self.timed if good == not_slower]
        return [(first, last) for first, last in clipped if first <= last]


@dataclass(frozen=True, slots=True)
class Proof:
    """What runs have proven about one source, with one torch, on one device."""

    torch: str
    device: str
    suites: tuple[str, ...]
    operators: Mapping[str, Mapping[str, ProofRow]]
    """By operator, then by the dtypes of a call's tensors as text."""
    failed: Mapping[str, Mapping[str, Any]]
    """Known failures by the same keys, as in the file."""

    def failure_summary(self, op: str = "") -> str:
        """Report the number of failed cases, optionally of one operator; empty if none."""
        return proof_files.failure_summary({op: self.failed.get(op, {})} if op else self.failed)

    @property
    def dtypes(self) -> list[str]:
        """Return the proven dtypes; combinations count as one: ``float32 with int64``."""
        return sorted(
            {text for signatures in self.operators.values() for key in signatures if (text := _dtypes_text(key))}
        )


def read_proof(file: Path, digest: str) -> Proof | str:
    """Return the proof beside a kernel's file, or why none holds for a source of this digest."""
    path = proof_path(file)
    if digest == UNREADABLE:
        return f"{file} has no digest: it, or what it names, cannot be read."
    proof = proof_files.read_proof_file(path)
    if proof is None:
        return f"{path} is not there."
    if isinstance(proof, str):
        return proof
    if proof["digest"] != digest:
        return f"{path} is the proof of another version of the source."
    operators = {
        op: {key: ProofRow.from_row(row) for key, row in rows.items()} for op, rows in proof["operators"].items()
    }
    return Proof(proof["torch"], proof["device"], tuple(proof["suites"]), operators, proof["failed"])


def _dtypes_text(signature: str) -> str:
    dtypes = re.findall(r"\w+", re.sub(r"number\(\w+\)|(?<=\])\*\w+", "", signature))
    return " with ".join(dict.fromkeys(dtypes))
