"""Check that gradients flow through an operator and match finite differences."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from opforge.check import fixes
from opforge.check.differences import Expectation, first_difference, format_number
from opforge.check.findings import KIND_CONTENTS, KIND_NO_FORMULA, Finding, Findings, failed, note, skipped
from opforge.check.operator_call import OperatorCall, as_dtype
from opforge.check.subject import Subject, attempt, describe_error
from opforge.runtime.trees import instances

_MAX_COMPARED_ELEMENTS = 24


def check(subject: Subject) -> Findings:
    """Yield a missing formula, or gradients that differ from finite differences."""
    calls = [call for call in subject.calls_with_dtypes(torch.float32, torch.float64) if _differentiable(subject, call)]
    if subject.mutates:
        yield skipped(
            "autograd",
            f"it writes to {', '.join(sorted(subject.written_arguments))}: torch has no gradients for operators that "
            "do",
        )
    elif not calls:
        yield skipped("autograd", "no call has floating-point tensors among both arguments and results")
    elif not has_formula(subject):
        yield failed(
            "autograd",
            "there is no autograd formula: gradients stop at the operator, or backward raises",
            formula_skeleton(subject),
            KIND_NO_FORMULA,
        )
    elif subject.is_random():
        yield skipped("autograd", "the operator is random: its gradient cannot be measured numerically")
    else:
        for call in _chosen(calls):
            findings = list(_check_slopes(subject, call))
            yield from findings
            if findings:
                return


def _chosen(calls: list[OperatorCall]) -> list[OperatorCall]:
    """Return the first call, and the call with most tensors if it has more (optional ones)."""
    fullest = max(calls, key=lambda call: len(call.tensors))
    return [calls[0]] if len(fullest.tensors) == len(calls[0].tensors) else [calls[0], fullest]


def _differentiable(subject: Subject, call: OperatorCall) -> bool:
    return bool(subject.floating_tensors(call)) and any(
        torch.is_tensor(r) and r.is_floating_point() for r in subject.run_copy(call)
    )


def has_formula(subject: Subject) -> bool:
    if subject.definition is not None:
        return subject.definition._backward_fn is not None  # noqa: SLF001  # torch has no public name for it
    keys = ("Autograd", "AutogradCPU", "AutogradCUDA", "CompositeImplicitAutograd")
    return any(subject.has_kernel(key) for key in keys)


def formula_skeleton(subject: Subject) -> str:
    """Return a skeleton of an operator's autograd formula."""
    tensors = [a.name for a in subject.arguments if str(a.type) == "Tensor"]
    returns = ", ".join(f"grad_{a.name}" if a.name in tensors else "None" for a in subject.arguments)
    grads = ", ".join(f"grad_{k}" for k in range(len(subject.returns))) if len(subject.returns) > 1 else "grad"
    return (
        "register one: def setup_context(ctx, inputs, output): ctx.save_for_backward(inputs[0]); def backward(ctx, "
        f"{grads}): …; return {returns}; "
        f'torch.library.register_autograd("{subject.name.removesuffix(".default")}", backward, '
        "setup_context=setup_context). "
        "If the operator has no gradient, let backward raise an error that says so; if it is part of the backward of "
        "another operator, check both together"
    )


@dataclass(frozen=True)
class _Precision:
    dtype: torch.dtype
    step: float
    tolerance: float


_FINE = _Precision(torch.float64, 1e-6, 1e-5)
_COARSE = _Precision(torch.float64, 1e-2, 2e-2)
_FLOAT32 = _Precision(torch.float32, 1e-2, 3e-2)


def _small(subject: Subject, call: OperatorCall) -> OperatorCall:
    """Return the call with few elements, if the operator accepts it."""
    small = subject.resized(call, lambda n: min(n, 3 + n % 2))
    return small if subject.accepts(small) else call


def _check_slopes(subject: Subject, call: OperatorCall) -> Findings:
    call = _small(subject, call)
    double = as_dtype(call, torch.float64)
    trials = [(as_dtype(call, torch.float32), _FLOAT32)]
    if subject.accepts(double):
        trials = [(double, _FINE), (double, _COARSE)]
    fault: str | Exception = ""
    for trial, precision in trials:
        fault = attempt(_compare_gradients, subject, trial, precision)
        if isinstance(fault, Exception):
            yield _backward_finding(subject, fault, trial)
            return
        if not fault:
            break
    if fault:
        yield failed("autograd", f"{fault}, for {subject.base_name}{trials[0][0]}", fixes.GRADIENT, KIND_CONTENTS)
        return
    if precision is _COARSE:
        yield note("autograd", "float64 is accepted, but computed with less precision: gradients were compared loosely")
    elif precision is _FINE:
        yield from _gradcheck(subject, trials[0][0])
    yield from _check_expanded_gradient(subject, trials[0][0])


def _backward_finding(subject: Subject, error: Exception, call: OperatorCall) -> Finding:
    if isinstance(error, NotImplementedError) or "not differentiable" in str(error):
        return note("autograd", f"it says that it has no gradient: {describe_error(error, 160)}")
    return failed(
        "autograd",
        f"backward raises: {describe_error(error)}, for {subject.base_name}{call}",
        formula_skeleton(subject),
    )


def _named_floats(subject: Subject, call: OperatorCall) -> list[tuple[str, torch.Tensor]]:
    pairs = []
    for name, value in subject.arguments_by_name(call).items():
        pairs += [(name, t) for t in instances(value, torch.Tensor) if t.is_floating_point()]
    return pairs


def _weights(results: list[Any]) -> list[Any]:
    generator = torch.Generator().manual_seed(5)
    return [
        torch.randn(r.shape, generator=generator, dtype=torch.float64).to(r) if _is_float(r) else None for r in results
    ]


def _is_float(value: Any) -> bool:
    return bool(torch.is_tensor(value) and value.is_floating_point())


def _weighted_sum(results: list[Any], weights: list[Any], chosen: list[bool]) -> torch.Tensor:
    terms = [(r * w).sum() for r, w, c in zip(results, weights, chosen, strict=True) if w is not None and c]
    return torch.stack(terms).sum()


class _RecordingBackward(TorchDispatchMode):  # type: ignore[misc]  # torch's class has no types
    """Notes the operators that a backward calls: they belong to it and need no formula of their own."""

    def __init__(self, subject: Subject) -> None:
        super().__init__()
        self.subject = subject

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.subject.backward_calls.add(func.name())
        return func(*args, **(kwargs or {}))


def _compare_gradients(subject: Subject, call: OperatorCall, precision: _Precision) -> str:
    """Describe the first gradient that differs from finite differences; empty if none does."""
    call_copy = call.map_tensors(lambda t: t.detach().clone().requires_grad_(t.is_floating_point()))
    results = subject.run(call_copy)
    flowing = [_is_float(r) and r.requires_grad for r in results]
    if not any(flowing):
        return "no result requires a gradient, although an argument does"
    weights = _weights(results)
    named = _named_floats(subject, call_copy)
    total = _weighted_sum(results, weights, flowing)
    with _RecordingBackward(subject):
        grads = torch.autograd.grad(total, [t for _n, t in named], allow_unused=True)
    for (name, tensor), grad in zip(named, grads, strict=True):
        if grad is not None and grad.shape != tensor.shape:
            return f"the gradient of {name} has shape {list(grad.shape)}, the argument {list(tensor.shape)}"
    scale = max([float(g.abs().max()) for g in grads if g is not None and g.numel()], default=0.0)
    for index, ((name, tensor), grad) in enumerate(zip(named, grads, strict=True)):
        if fault := _compare_gradient(subject, call, index, (weights, flowing), grad, precision, scale):
            return f"the gradient of {name} {fault} of {list(tensor.shape)}"
    return ""


def _compare_gradient(
    subject: Subject,
    call: OperatorCall,
    argument_index: int,
    outcome: tuple[Any, Any],
    grad: Any,
    precision: _Precision,
    scale: float,
) -> str:
    base = call.map_tensors(lambda t: t.detach().clone())
    tensor = _named_floats(subject, base)[argument_index][1]
    view = tensor.reshape(-1) if tensor.is_contiguous() else tensor.contiguous().reshape(-1)
    weights, flowing = outcome
    for index in _elements(tensor.numel()):
        position = tuple(int(i) for i in torch.unravel_index(torch.tensor(index), tensor.shape)) if tensor.dim() else ()
        original = view[index].item()
        totals = []
        for step in (precision.step, -precision.step):
            tensor[position] = original + step
            with torch.no_grad():
                totals.append(_weighted_sum(subject.run(base.copy()), weights, flowing).double().item())
        tensor[position] = original
        slope = (totals[0] - totals[1]) / (2 * precision.step)
        gradient = 0.0 if grad is None else grad[position].item()
        if not abs(gradient - slope) <= precision.tolerance * (1.0 + max(abs(slope), scale)):
            statement = "is None" if grad is None else f"is {format_number(gradient)}"
            return f"{statement}, and the numerical gradient is {format_number(slope)}, at {list(position)}"
    return ""


def _elements(count: int) -> list[int]:
    step = max(1, -(-count // _MAX_COMPARED_ELEMENTS))
    return list(itertools.islice(range(0, count, step), _MAX_COMPARED_ELEMENTS))


def _gradcheck(subject: Subject, call: OperatorCall) -> Findings:
    """Run torch's own gradcheck, which also tries undefined and repeated gradients."""
    floats = [t.detach().clone().requires_grad_() for t in call.tensors if t.is_floating_point()]

    def function(*inputs: torch.Tensor) -> Any:
        remaining = iter(inputs)
        full = call.map_tensors(lambda t: next(remaining) if t.is_floating_point() else t)
        results = subject.run(full)
        return tuple(r for r in results if _is_float(r) and r.requires_grad)

    error = attempt(torch.autograd.gradcheck, function, floats, fast_mode=True, nondet_tol=1e-7)
    if isinstance(error, Exception):  # it reports faults as errors of several types
        yield failed(
            "autograd",
            f"torch.autograd.gradcheck: {describe_error(error)}, for {subject.base_name}{call}",
            fixes.GRADIENT,
            KIND_CONTENTS,
        )


def _check_expanded_gradient(subject: Subject, call: OperatorCall) -> Findings:
    """Check that an expanded incoming gradient, as from sum(), acts like a contiguous one."""

    def gradients(call: OperatorCall, *, laid_out: bool = True) -> list[torch.Tensor | None]:
        call_copy = call.map_tensors(lambda t: t.detach().clone().requires_grad_(t.is_floating_point()))
        with torch.enable_grad():
            results = [r for r in subject.run(call_copy) if _is_float(r) and r.requires_grad]
        ones = [
            torch.ones_like(r) if laid_out else torch.ones((), dtype=r.dtype, device=r.device).expand(r.shape)
            for r in results
        ]
        inputs = [t for _n, t in _named_floats(subject, call_copy)]
        return list(torch.autograd.grad(results, inputs, ones, allow_unused=True))

    contiguous, expanded = gradients(call), gradients(call, laid_out=False)
    if message := first_difference(Expectation(contiguous, call, gradients), expanded):
        names = ", ".join(name for name, _t in _named_floats(subject, call))
        fault = f"the gradient of {names} changes when the incoming gradient is expanded, as sum().backward() does"
        yield failed(
            "autograd", f"{fault}: {message}, for {subject.base_name}{call}", fixes.GRADIENT_EXPANDED, KIND_CONTENTS
        )
