"""A kernel: the operators it serves, and the location of its code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ServedOperator:
    """An operator that a kernel serves."""

    op: str
    required: bool = True
    """False for overloads beyond the kernel's own family: it may decline them by raising."""


@dataclass(frozen=True, slots=True)
class Reference:
    """The baseline of a custom operator's kernels: a user's function, or the identity."""

    name: str
    """The name in reports."""
    file: str | None = None
    """None for the identity."""
    entries: tuple[str, ...] = ()
    digest: str = ""
    library: str = ""
    broken: str = ""
    """``library`` and ``broken`` mean the same as for a kernel."""

    def wire(self) -> dict[str, Any]:
        """Return the data that a worker needs to load it."""
        wire = {"name": self.name, "primary": "", "file": self.file, "entries": list(self.entries)}
        optional = {
            "identity": self.file is None,
            "library": self.library,
            "broken": self.broken,
            "digest": self.digest,
        }
        return {**wire, **{name: value for name, value in optional.items() if value}}


@dataclass(frozen=True, slots=True)
class Kernel:
    """One implementation: operators, name, file, entry point and digest of the source."""

    name: str
    primary: str
    """The operator with the entry point's signature, such as ``add.Tensor``."""
    serves: tuple[ServedOperator, ...]
    file: str | None = None
    """None for ATen's own."""
    entries: tuple[str, ...] = ()
    """Candidate names of the function in the file; the first that exists is used."""
    digest: str = ""
    mutant: str = ""
    """For a mutant of ATen, its kind of error; see `opforge.kernels.mutants`."""
    library: str = ""
    """For C++ and CUDA sources, the shared library built from the file."""
    broken: str = ""
    """Why the kernel cannot run, such as a compile error: the reason of all its verdicts."""

    is_file_digest: bool = True
    """Whether the digest is that of the file, and not of a package that the file leads to."""
    reference: Reference | None = None
    """For a custom operator's kernel, its baseline; None if the baseline is ATen."""

    def wire(self) -> dict[str, Any]:
        """Return the data that a worker needs to load it."""
        wire: dict[str, Any] = {
            "name": self.name,
            "primary": self.primary,
            "file": self.file,
            "entries": list(self.entries),
        }
        if self.reference is not None:
            wire["reference"] = self.reference.wire()
        optional = {"mutant": self.mutant, "library": self.library, "broken": self.broken}
        if self.is_file_digest:
            optional["digest"] = self.digest
        return {**wire, **{name: value for name, value in optional.items() if value}}
