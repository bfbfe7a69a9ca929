"""A kernel: which operators it serves, and where its code is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Served:
    """An operator that a kernel serves."""

    op: str
    required: bool = True
    """False for overloads beyond the kernel's own family: it may decline them by raising."""


@dataclass(frozen=True, slots=True)
class Reference:
    """What a custom operator's kernels are held against: a function of the user's, or the identity."""

    name: str
    """As reports name it."""
    file: str | None = None
    """None for the identity."""
    entries: tuple[str, ...] = ()
    digest: str = ""
    library: str = ""
    broken: str = ""
    """Both as a kernel has them."""

    def wire(self) -> dict[str, Any]:
        """Return what a worker needs to load it."""
        wire = {"name": self.name, "primary": "", "file": self.file, "entries": list(self.entries)}
        more = {"identity": self.file is None, "library": self.library, "broken": self.broken, "digest": self.digest}
        return {**wire, **{name: value for name, value in more.items() if value}}


@dataclass(frozen=True, slots=True)
class Kernel:
    """One implementation: operators, name, file, entry point and digest of the source."""

    name: str
    primary: str
    """The operator whose signature the entry point has, such as ``add.Tensor``."""
    serves: tuple[Served, ...]
    file: str | None = None
    """None for ATen's own."""
    entries: tuple[str, ...] = ()
    """Names of the function in the file; the first that exists is taken."""
    digest: str = ""
    mutant: str = ""
    """For a mutant of ATen, the way in which it is wrong; see `opforge.kernels.mutants`."""
    library: str = ""
    """For C++ and CUDA sources, the shared library that was built of the file."""
    broken: str = ""
    """Why there is no kernel to be run, such as a source that does not compile: the reason of all its verdicts."""

    of_file: bool = True
    """Whether the digest is that of the file, and not of a package that the file leads to."""
    reference: Reference | None = None
    """Of a custom operator's kernel, what it is held against; None where that is ATen."""

    def wire(self) -> dict[str, Any]:
        """Return what a worker needs to load it."""
        wire: dict[str, Any] = {
            "name": self.name,
            "primary": self.primary,
            "file": self.file,
            "entries": list(self.entries),
        }
        if self.reference is not None:
            wire["reference"] = self.reference.wire()
        more = {"mutant": self.mutant, "library": self.library, "broken": self.broken}
        if self.of_file:
            more["digest"] = self.digest
        return {**wire, **{name: value for name, value in more.items() if value}}
