"""The job of a model's judge process: the model, the kernels and the limits. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from opforge.kernels import Kernel
from opforge.models.target import ModelTarget


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """How to make and run a model."""

    target: ModelTarget
    dtype: str
    """A short name; empty for the model's own."""
    train: bool
    seed: int

    def wire(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_wire(cls, row: Mapping[str, Any]) -> ModelSpec:
        return cls(ModelTarget.from_wire(row["target"]), row["dtype"], row["train"], row["seed"])


@dataclass(frozen=True, slots=True)
class ModelKernel:
    """A kernel to install for its operators."""

    name: str
    file: str
    library: str
    broken: str
    """Why it cannot run; empty if it can."""
    ops: dict[str, bool]
    """Operators, each with whether the kernel must answer it."""
    loading: dict[str, Any]
    """The data that a worker needs to load it."""

    @classmethod
    def of(cls, kernel: Kernel) -> ModelKernel:
        ops = {served.op: served.required for served in kernel.serves}
        return cls(kernel.name, str(kernel.file), kernel.library, kernel.broken, ops, kernel.wire())

    @property
    def readable_files(self) -> tuple[str, str | None]:
        """The file and the library, if it has one; a worker must be able to read them."""
        return self.file, self.library or None

    def wire(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_wire(cls, row: Mapping[str, Any]) -> ModelKernel:
        return cls(**row)


@dataclass(frozen=True, slots=True)
class ModelJob:
    """A model to judge with kernels."""

    spec: ModelSpec
    kernels: list[ModelKernel]
    device: str
    timeout_s: float
    memory_bytes: int | None
    confined: bool
    protected: bool
    """Whether the system has all protections of confined workers."""
    allow_fallback: bool = False
    """Whether a kernel may call the operator that it replaces."""

    def wire(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_wire(cls, row: Mapping[str, Any]) -> ModelJob:
        spec, kernels = ModelSpec.from_wire(row["spec"]), [ModelKernel.from_wire(kernel) for kernel in row["kernels"]]
        return cls(**{**row, "spec": spec, "kernels": kernels})
