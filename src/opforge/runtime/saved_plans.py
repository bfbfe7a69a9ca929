"""Take launch plans from this process into files, and from files into this process."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from .devices import architecture, device_name
from .learning import COMPILED, CompiledKernel, KernelPlans, has_tensor_results
from .native.binding import ABI, NativeLibrary
from .native.building import NativeError
from .native.launch_plan import KernelLaunch, LaunchPlan, from_wire, to_wire
from .operator_schema import OperatorSchema
from .plan_files import CompiledFunction, OperatorPlans, PlanFile, PlanOrigin, SavedPlan, read_cubin

_TRITON = ("triton", "pytorch-triton")
"""Distributions that contain Triton."""
_functions: dict[tuple[str, str, int, str], int] = {}
"""Loaded functions by cubin, name, shared memory and device."""


@dataclass
class SavedPlans:
    """The plans in a kernel's file that can be used here, or why they cannot."""

    folder: Path = Path()
    plans: PlanFile | None = None
    problem: str = ""

    def serves(self, op: str) -> bool:
        """Whether there are plans for an operator."""
        return self.plans is not None and op in self.plans.operators

    def load(self, op: OperatorSchema, into: KernelPlans, library: NativeLibrary) -> None:
        """Load the plans for an operator, with the compiled kernels that they launch; count what is not loaded."""
        if self.plans is None or op.name not in self.plans.operators:
            return
        saved = self.plans.operators[op.name]
        for row in saved.plans:
            try:
                plan = _loaded(row, saved.functions, op, self.plans.origin, self.folder, library)
                handle = library.make_plan(plan.encode())
                library.store_plan(into.store, handle, row.key)
            except (NativeError, OSError, ValueError, TypeError, IndexError, RuntimeError) as error:
                into.not_loaded[f"a saved plan cannot be loaded: {error}"] += 1
            else:
                into.handles[handle] = plan


def _loaded(
    row: SavedPlan,
    functions: tuple[CompiledFunction, ...],
    op: OperatorSchema,
    origin: PlanOrigin,
    folder: Path,
    library: NativeLibrary,
) -> LaunchPlan:
    """Return a saved plan with functions of this process."""
    plan = from_wire(row.plan)
    if not isinstance(plan, LaunchPlan) or not has_tensor_results(op, plan):
        raise ValueError("it has other results than the operator")
    if plan.device.type == "cuda" and plan.device.index >= torch.cuda.device_count():
        raise ValueError(f"it is for {plan.device}, which is not there")
    if _architecture(str(plan.device)) != origin.architecture:
        raise ValueError(f"it is for {origin.architecture}, and {plan.device} is {_architecture(str(plan.device))}")
    steps = tuple(
        replace(step, function=_function(functions[step.function], step.shared, plan.device, folder, library))
        if isinstance(step, KernelLaunch)
        else step
        for step in plan.steps
    )
    return replace(plan, steps=steps)


def _function(named: CompiledFunction, shared: int, device: torch.device, folder: Path, library: NativeLibrary) -> int:
    """Return a function of the driver. It is loaded now: that is not possible while a CUDA graph is captured."""
    key = (named.cubin, named.name, shared, str(device))
    if key not in _functions:
        cubin = read_cubin(folder, named.cubin)
        function = library.load_kernel(cubin, named.name, shared, device.index or 0)
        _functions[key] = function
        COMPILED[function] = CompiledKernel(named.name, cubin)
    return _functions[key]


def origin_here(digest: str, device: str) -> PlanOrigin:
    """Return the origin of plans that are made in this process for a kernel."""
    minor = ".".join(torch.__version__.split(".")[:2])
    return PlanOrigin(digest, architecture(device), device_name(device), minor, _triton_version(), ABI)


@dataclass
class PlanCollection:
    """Plans of one kernel that are to be saved, and the compiled kernels that they launch, by SHA-256."""

    operators: dict[str, OperatorPlans] = field(default_factory=dict)
    cubins: dict[str, bytes] = field(default_factory=dict)

    def add(self, op: str, plans: Mapping[int, LaunchPlan], library: NativeLibrary, where: str) -> None:
        """Add an operator's plans for devices of an architecture."""
        functions: dict[CompiledFunction, int] = {}
        rows: list[SavedPlan] = []
        for handle, plan in list(plans.items()):
            key = library.plan_key(handle)
            if not key or library.is_broken(handle) or _architecture(str(plan.device)) != where:
                continue
            if all(COMPILED[launch.function].cubin for launch in _launches(plan)):
                steps = tuple(
                    replace(step, function=functions.setdefault(self._named(step), len(functions)))
                    if isinstance(step, KernelLaunch)
                    else step
                    for step in plan.steps
                )
                rows.append(SavedPlan(key, to_wire(replace(plan, steps=steps))))
        if rows:
            self.operators[op] = OperatorPlans(tuple(functions), tuple(rows))

    def _named(self, launch: KernelLaunch) -> CompiledFunction:
        compiled = COMPILED[launch.function]
        digest = hashlib.sha256(compiled.cubin).hexdigest()
        self.cubins[digest] = compiled.cubin
        return CompiledFunction(digest, compiled.name)


def _launches(plan: LaunchPlan) -> Iterator[KernelLaunch]:
    return (step for step in plan.steps if isinstance(step, KernelLaunch))


@functools.cache
def _architecture(device: str) -> str:
    return architecture(device)


@functools.cache
def _triton_version() -> str:
    """Return the version of the installed Triton, without importing it; empty if there is none."""
    for name in _TRITON:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""
