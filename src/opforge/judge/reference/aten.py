"""ATen's result for a case, and its float64 result where it has one."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import torch

from opforge.cases.tensors import one_tensor_per_offset, owned_copy, renewed, tensor_from_row, to_float64
from opforge.cases.wire import TORCH_DTYPES, decode
from opforge.runtime.trees import instances, map_instances
from opforge.sandbox.guest.global_state import generator_state, seed_generator
from opforge.sandbox.guest.loader import aten_function, gradients

_WIDE_DTYPES = {
    torch.float32: torch.float64,
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.complex64: torch.complex128,
    torch.complex32: torch.complex128,
    **{d: torch.float64 for d in TORCH_DTYPES.values() if d.is_floating_point and d.itemsize == 1},
}

MAX_CPU_COMPARE_ELEMENTS = 1 << 18
"""Results up to this many elements are compared on the CPU, larger ones on ATen's device.

A GPU that many processes share is slow at small work."""
PERTURBATION_SEEDS = (1, -1, 2, -2, 3, -3, 4, -4)
"""Seeds of random perturbations of the inputs; negative ones are mirror images."""
EXTRA_PERTURBATION_SEEDS = tuple(range(5, 21))
"""Further seeds.

With this many, no element of thousands has a small root mean square by chance.
"""


class ReferenceRaisedError(Exception):
    """A user's reference raised on a case; the message says what."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class ReferenceFaultError(Exception):
    """A user's reference gave no answer to judge a kernel by; the message says what it did."""


class RepeatableCall(Protocol):
    """A call that gives the reference's results, as often as asked."""

    def run(self, change: Callable[[torch.Tensor], torch.Tensor] | None = None) -> CallOutcome:
        """Call the reference, on changed tensors if ``change`` is given."""
        ...

    def rounds_internally(self) -> bool:
        """Whether the float64 form rounds to a narrower dtype on the way."""
        ...

    def with_kept_inputs(self) -> RepeatableCall:
        """Return the call with the same tensors for ``change`` each time it is run."""
        ...


def is_not_implemented(error: Exception | None) -> bool:
    """Whether an exception says that a case is not implemented."""
    return isinstance(error, NotImplementedError) or getattr(error, "kind", "") == "NotImplementedError"


@dataclass(frozen=True, slots=True)
class ReferenceCall:
    """A call over the judge's own copy of the inputs."""

    op: str
    args: Any
    kwargs: dict[str, Any]
    buffer: Any
    device: torch.device
    owns_storage: bool
    """Whether inputs need their own storage: the operator writes to them, or they change device."""
    rng_seed: int | None = None
    contents_seed: int = 0
    """Seed of other contents in the inputs, as in timed calls; 0 for the contents of the case."""
    may_hold_indices: bool = False
    """Whether integers among the inputs may be indices, which must stay in range."""
    default_dtype: torch.dtype | None = None
    """Default dtype that a program has set, if any."""
    kept_inputs: dict[int, torch.Tensor] | None = None
    """Inputs as they are before a change, by byte offset, where many calls differ only in it."""

    def build_arguments(
        self, change: Callable[[torch.Tensor], torch.Tensor] | None = None
    ) -> tuple[Any, dict[str, Any], list[torch.Tensor]]:
        """Return fresh arguments and, in order, the tensors among them."""
        inputs: list[torch.Tensor] = []

        def unchanged_tensor(row: list[Any]) -> torch.Tensor:
            input_tensor = tensor_from_row(self.buffer, row)
            if self.owns_storage or change is not None or self.contents_seed:
                input_tensor = owned_copy(input_tensor, torch.device(row[6]) if row[6] else self.device, ahead=True)
                renewed(input_tensor, self.contents_seed, positions=self.may_hold_indices)
            return input_tensor

        if change is None:
            create_tensor = one_tensor_per_offset(unchanged_tensor)
        else:
            kept_tensor = one_tensor_per_offset(unchanged_tensor, self.kept_inputs)

            @one_tensor_per_offset
            def create_tensor(row: list[Any]) -> torch.Tensor:
                changed = change(kept := kept_tensor(row))
                return owned_copy(changed) if changed is kept and self.kept_inputs is not None else changed

        def tensor(row: list[Any]) -> torch.Tensor:
            inputs.append(create_tensor(row))
            return inputs[-1]

        return decode(self.args, tensor), {n: decode(v, tensor) for n, v in self.kwargs.items()}, inputs

    def run(self, change: Callable[[torch.Tensor], torch.Tensor] | None = None) -> CallOutcome:
        """Call ATen; an exception is part of the answer."""
        outcome = self.run_ahead(change)
        if self.device.type == "cuda" and outcome.raised is None:
            try:
                torch.cuda.synchronize()  # an error belongs to the call that made it
            except Exception as error:  # noqa: BLE001  # torch has many types for errors of a GPU
                abort_if_gpu_lost(error)
                return CallOutcome(inputs=outcome.inputs, raised=error)
        return outcome

    def run_ahead(self, change: Callable[[torch.Tensor], torch.Tensor] | None = None) -> CallOutcome:
        """Call ATen without waiting for a GPU: each wait for a GPU that others use costs a time slice."""
        args, kwargs, inputs = self.build_arguments(change)
        if change is not None:
            args, kwargs = widen_dtypes(args), widen_dtypes(kwargs)
        if self.rng_seed is not None:
            seed_generator(self.rng_seed, self.device)
        before = None if self.rng_seed is None else generator_state(self.device)
        torch._C._set_mkldnn_enabled(True)  # noqa: SLF001  # an earlier call of ATen may have turned it off
        try:
            with torch.no_grad(), _default_dtype(self.default_dtype):
                result = aten_function(self.op)(*args, **kwargs)
        except Exception as error:  # noqa: BLE001  # ATen raises many types; any of them is an answer
            abort_if_gpu_lost(error)
            return CallOutcome(inputs=inputs, raised=error)
        return CallOutcome(
            inputs=inputs,
            result=result,
            used_rng=before is not None and before != generator_state(self.device),
            turned_onednn_off=not torch._C._get_mkldnn_enabled(),  # noqa: SLF001
        )

    def rounds_internally(self) -> bool:
        """Whether the float64 form rounds to a narrower dtype on the way; ATen's never do."""
        return False

    def nearby_error(self) -> Exception | None:
        """Return the exception that moving the inputs by a rounding step causes, or None.

        With one, the call is at the edge of its domain. The inputs move in float64. If ATen rejects
        float64 on the contents of the case itself, an exception says nothing about an edge.
        """
        if replace(self, contents_seed=0).run(widen).raised is not None:
            return None
        perturbations = _Perturbations(self)
        raised = (perturbations.run(seed).raised for seed in PERTURBATION_SEEDS)
        return next((error for error in raised if error is not None), None)

    def with_kept_inputs(self) -> ReferenceCall:
        """Return the call with the same tensors each time it is run."""
        return replace(self, kept_inputs={})

    def gradient_call(self) -> GradientCall:
        """Return the call that gives the gradients of this one."""
        return GradientCall(self.op, self.args, self.kwargs, self.buffer, self.device, owns_storage=True)

    def run_poisoned(self) -> CallOutcome:
        """Call ATen with new memory filled with NaN or the largest integer.

        Elements that keep that value were left uninitialised.
        """
        # `use_deterministic_algorithms` imports inductor first: seconds for each judge
        torch.set_deterministic_debug_mode("warn")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return self.run()
        finally:
            torch.set_deterministic_debug_mode("default")


@dataclass(frozen=True, slots=True)
class GradientCall(ReferenceCall):
    """A call that gives the gradients of its floating-point inputs as its answer."""

    def run(self, change: Callable[[torch.Tensor], torch.Tensor] | None = None) -> CallOutcome:
        """Call ATen forward and backward; an exception is part of the answer."""
        args, kwargs, inputs = self.build_arguments(change)
        if change is not None:
            args, kwargs = widen_dtypes(args), widen_dtypes(kwargs)
        try:
            return CallOutcome(inputs=[], result=gradients(aten_function(self.op), args, kwargs, inputs))
        except Exception as error:  # noqa: BLE001  # ATen raises many types; any of them is an answer
            abort_if_gpu_lost(error)
            return CallOutcome(inputs=[], raised=error)


@dataclass(frozen=True, slots=True)
class CallOutcome:
    """Result of a call, or its exception, and its inputs afterwards."""

    inputs: list[torch.Tensor]
    result: Any = None
    raised: Exception | None = None
    used_rng: bool = False
    """Whether a random operator used the generator; with dropout at zero, say, it does not."""
    turned_onednn_off: bool = False
    """Whether ATen turned oneDNN off: bfloat16 products do on CPUs without instructions for them."""
    shared_inputs: dict[int, list[int]] | None = None
    """For an answer from another process: inputs that share memory with a result, by its id."""

    @property
    def tensors(self) -> list[torch.Tensor] | None:
        """Return all result tensors, then all input tensors; None when the call raised."""
        return None if self.raised is not None else [*instances(self.result, torch.Tensor), *self.inputs]


@contextmanager
def _default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def roughly_equal(left: CallOutcome, right: CallOutcome) -> bool:
    """Whether two answers agree within a generous rounding tolerance."""
    if left.tensors is None or right.tensors is None or len(left.tensors) != len(right.tensors):
        return False
    return all(_roughly_equal_tensors(a.detach(), b.detach()) for a, b in zip(left.tensors, right.tensors, strict=True))


def same_dtypes(left: CallOutcome, right: CallOutcome) -> bool:
    """Whether the results of two answers have the same dtypes."""
    return [t.dtype for t in instances(left.result, torch.Tensor)] == [
        t.dtype for t in instances(right.result, torch.Tensor)
    ]


def _roughly_equal_tensors(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.is_cuda and a.numel() <= MAX_CPU_COMPARE_ELEMENTS:
        a, b = a.cpu(), b.cpu()
    if a.dtype == torch.complex32:  # torch cannot compare it
        a, b = a.to(torch.complex64), b.to(torch.complex64)
    if (same := bool(torch.equal(a, b))) or not (a.is_floating_point() or a.is_complex()):
        return same
    a, b = to_float64(a), to_float64(b)
    size = a.abs().nan_to_num(0.0, 0.0, 0.0)
    return bool(
        torch.isclose(a, b, rtol=0.05, atol=0.01 * float(size.max() if size.numel() else 0), equal_nan=True).all()
    )


@dataclass
class Float64Answers:
    """Float64 answers to a call, computed on demand."""

    call: RepeatableCall

    @cached_property
    def tensors(self) -> list[torch.Tensor] | None:
        """Return all result and input tensors of the float64 run; None if the operator has none."""
        return None if self.call.rounds_internally() else self.call.run(widen).tensors

    def perturbed(self, seeds: Sequence[int], *steps: float) -> Iterator[list[list[torch.Tensor] | None]]:
        """Yield for each seed the float64 answers after each input element moved by about each step of itself.

        Seeds ±n are mirror images.
        """
        perturbations = _Perturbations(self.call)
        for seed in seeds:
            yield [perturbations.run(seed, step).tensors for step in steps]

    def reruns(self) -> Iterator[list[torch.Tensor]]:
        """Yield the reference's answers to further runs of the same call, while it answers."""
        while (tensors := self.call.run().tensors) is not None:
            yield tensors

    def with_gaps(self) -> list[torch.Tensor] | None:
        """Return ATen's answers to inputs with gaps between elements; it takes them one by one."""
        return self.call.run(_add_gaps).tensors


def _add_gaps(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.unsqueeze(-1).repeat(*[1] * tensor.dim(), 2)[..., 0]


class _Perturbations:
    """Calls with inputs of which each element is moved by about a step of itself.

    Mirror images and other steps share their draws. All is done on the tensor's device, for there may be millions of
    elements.
    """

    def __init__(self, call: RepeatableCall) -> None:
        self._call = call.with_kept_inputs()
        self._wide: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """Inputs and their wide forms, by the input's id, which it keeps as long as it is here."""
        self._seed = 0
        self._generators: dict[torch.device, torch.Generator] = {}
        self._drawn: dict[int, torch.Tensor] = {}

    def run(self, seed: int, step: float | None = None) -> CallOutcome:
        """Make the call with moved inputs; without a step each moves by a rounding step of its dtype."""
        if abs(seed) != self._seed:
            self._seed = abs(seed)
            self._generators.clear()
            self._drawn.clear()

        def change(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in self._wide:
                self._wide[id(tensor)] = tensor, widen(tensor)
            wide = self._wide[id(tensor)][1]
            if wide.dtype not in (torch.float64, torch.complex128):
                return wide
            size = torch.finfo(tensor.dtype).eps if step is None else step
            moves = math.copysign(size, seed) * self._draws(id(tensor), wide)
            return wide * moves.add_(1)  # equal and expanded elements move apart

        return self._call.run(change)

    def _draws(self, key: int, wide: torch.Tensor) -> torch.Tensor:
        if key not in self._drawn:
            if (generator := self._generators.get(wide.device)) is None:
                generator = self._generators[wide.device] = torch.Generator(wide.device).manual_seed(self._seed)
            drawn = torch.rand(wide.shape, generator=generator, dtype=torch.float64, device=wide.device)
            self._drawn[key] = drawn.sub_(0.5).mul_(math.sqrt(12))
        return self._drawn[key]


def abort_if_gpu_lost(error: Exception) -> None:
    """Abort this process if an error has destroyed its GPU context.

    Another process is started in its place, as after any crash of ATen's.
    """
    if "CUDA error" in str(error) and "out of memory" not in str(error):
        os.abort()


def resolved(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without an autograd graph or a pending conjugation or negation."""
    return tensor.detach().resolve_conj().resolve_neg()


def wide_dtype(dtype: torch.dtype) -> torch.dtype | None:
    """Return the wider dtype for exact results; None if there is none."""
    return _WIDE_DTYPES.get(dtype)


def widen(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in float64 or complex128 with the same geometry; other dtypes unchanged."""
    dtype = _WIDE_DTYPES.get(tensor.dtype)
    if dtype is None:
        return tensor
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    flat = tensor.as_strided((count,), (1,), 0).to(dtype)
    return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def without_nan(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in float64 with NaN replaced by zero; infinities stay."""
    wide = widen(tensor)
    if not wide.is_floating_point():
        return wide
    return wide.nan_to_num(0.0, math.inf, -math.inf)


def widen_dtypes(tree: Any) -> Any:
    """Replace dtypes among arguments by their wider ones."""
    return map_instances(tree, torch.dtype, lambda dtype: _WIDE_DTYPES.get(dtype, dtype))
