"""Where the proof of a kernel is kept, and what stands in it. What a run proves is in `opforge.runs.proofs`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from opforge.kernels.source import UNREADABLE
from opforge.runtime import proofs
from opforge.runtime.words import Allowed

SUFFIX = ".proof.json"


def proof_of(file: Path) -> Path:
    """Return where the proof of a kernel's file is kept: beside it."""
    return file.with_name(file.stem + SUFFIX)


@dataclass(frozen=True, slots=True)
class Proven:
    """What is proven for the calls of one operator whose tensors have the same dtypes."""

    rank: tuple[int, int]
    numel: tuple[int, int]
    """Of the largest tensor of a call."""
    extents: tuple[tuple[tuple[int, int], ...], ...]
    """Of each tensor argument, by dimension, the last one first."""
    layouts: tuple[str, ...]
    timed: tuple[tuple[int, int, bool], ...] = ()
    """Ranges of numbers of elements with whether the kernel is not slower there, ascending; none where nothing was timed."""
    arguments: Allowed = field(default_factory=dict)
    """What arguments that are no tensors were, as the file has it; those that are not here were left out."""

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Proven:
        (least, most), (low, high) = row["rank"], row["numel"]
        timed = tuple((first, last, good) for first, last, good in row.get("timed", ()))
        extents = tuple(tuple((first, last) for first, last in ranges) for ranges in row["extents"])
        return cls((least, most), (low, high), extents, tuple(row["layouts"]), timed, row.get("arguments", {}))

    def sizes(self, *, not_slower: bool) -> list[tuple[int, int]]:
        """Return at which of the proven sizes the kernel is not slower, or slower, as ranges."""
        low, high = self.numel
        found = [(max(low, first), min(high, last)) for first, last, good in self.timed if good == not_slower]
        return [(first, last) for first, last in found if first <= last]


@dataclass(frozen=True, slots=True)
class Proof:
    """What runs have proven of one source, with one torch, on one device."""

    torch: str
    device: str
    suites: tuple[str, ...]
    operators: Mapping[str, Mapping[str, Proven]]
    """By operator, and by the dtypes of a call's tensors as text."""
    failed: Mapping[str, Mapping[str, Any]]
    """What is known to have failed, in the same way, as the file has it."""

    def failures(self, op: str = "") -> str:
        """Say how many cases failed, of one operator if it is named; nothing where none did."""
        return proofs.failures({op: self.failed.get(op, {})} if op else self.failed)

    @property
    def dtypes(self) -> list[str]:
        """Return the dtypes for which anything is proven, those that go together as one: ``float32 with int64``."""
        return sorted({words for found in self.operators.values() for key in found if (words := _dtypes(key))})


def read_proof(file: Path, digest: str) -> Proof | str:
    """Return the proof beside a kernel's file, or why there is none that holds for the source of this digest."""
    path = proof_of(file)
    if digest == UNREADABLE:
        return f"{file} has no digest: it, or what it names, cannot be read."
    proof = proofs.read(path)
    if proof is None:
        return f"{path} is not there."
    if isinstance(proof, str):
        return proof
    if proof["digest"] != digest:
        return f"{path} is the proof of another version of the source."
    operators = {op: {key: Proven.of(row) for key, row in found.items()} for op, found in proof["operators"].items()}
    return Proof(proof["torch"], proof["device"], tuple(proof["suites"]), operators, proof["failed"])


def _dtypes(signature: str) -> str:
    words = re.findall(r"\w+", re.sub(r"number\(\w+\)|(?<=\])\*\w+", "", signature))
    return " with ".join(dict.fromkeys(words))
