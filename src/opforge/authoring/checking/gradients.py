"""Check that gradients flow through an operator and match finite differences."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch

from opforge.authoring.checking import fixes
from opforge.authoring.checking.calls import Call, as_dtype
from opforge.authoring.checking.comparing import difference, number
from opforge.authoring.checking.report import CONTENTS
from opforge.authoring.checking.subject import Findings, Subject, failed, note, short, skipped

_MAX_COMPARED_ELEMENTS = 24
_BACKWARD_NAME_PARTS = ("backward", "_bwd", "_grad")


def check(subject: Subject) -> Findings:
    """Yield a missing formula, or gradients that differ from finite differences."""
    calls = [call for call in subject.first(torch.float32, torch.float64) if _differentiable(subject, call)]
    if subject.mutates:
        yield skipped(
            "autograd",
            f"it writes to {', '.join(sorted(subject.written))}: torch has no gradients for operators that do",
        )
    elif not calls:
        yield skipped("autograd", "no call has floating-point tensors among both arguments and results")
    elif not has_formula(subject):
        if any(part in subject.base for part in _BACKWARD_NAME_PARTS):
            yield note("autograd", "there is no formula, so gradients of gradients do not flow")
        else:
            yield failed(
                "autograd",
                "there is no autograd formula: gradients stop at the operator, or backward raises",
                formula(subject),
            )
    elif subject.is_random():
        yield skipped("autograd", "the operator is random: its slope cannot be measured")
    else:
        for call in _chosen(calls):
            findings = list(_check_slopes(subject, call))
            yield from findings
            if findings:
                return


def _chosen(calls: list[Call]) -> list[Call]:
    """Return the first call, and the call with most tensors if it has more (optional ones)."""
    fullest = max(calls, key=lambda call: len(call.tensors))
    return [calls[0]] if len(fullest.tensors) == len(calls[0].tensors) else [calls[0], fullest]


def _differentiable(subject: Subject, call: Call) -> bool:
    return bool(subject.floating(call)) and any(
        torch.is_tensor(r) and r.is_floating_point() for r in subject.answer(call)
    )


def has_formula(subject: Subject) -> bool:
    if subject.definition is not None:
        return subject.definition._backward_fn is not None  # noqa: SLF001  # torch has no public name for it
    keys = ("Autograd", "AutogradCPU", "AutogradCUDA", "CompositeImplicitAutograd")
    return any(subject.has_kernel(key) for key in keys)


def formula(subject: Subject) -> str:
    """Return a skeleton of an operator's autograd formula."""
    tensors = [a.name for a in subject.arguments if str(a.type) == "Tensor"]
    returns = ", ".join(f"grad_{a.name}" if a.name in tensors else "None" for a in subject.arguments)
    grads = ", ".join(f"grad_{k}" for k in range(len(subject.returns))) if len(subject.returns) > 1 else "grad"
    return (
        f"register one: def setup_context(ctx, inputs, output): ctx.save_for_backward(inputs[0]); def backward(ctx, {grads}): …; return {returns}; "
        f'torch.library.register_autograd("{subject.name.removesuffix(".default")}", backward, setup_context=setup_context). '
        "Where there is no gradient by nature, let backward raise an error that says so"
    )


@dataclass(frozen=True)
class _Precision:
    dtype: torch.dtype
    step: float
    tolerance: float


_FINE = _Precision(torch.float64, 1e-6, 1e-5)
_COARSE = _Precision(torch.float64, 1e-2, 2e-2)
_SINGLE = _Precision(torch.float32, 1e-2, 3e-2)


def _small(subject: Subject, call: Call) -> Call:
    """Return the call with few elements, if the operator accepts it."""
    small = subject.resized(call, lambda n: min(n, 3 + n % 2))
    try:
        subject.answer(small)
    except Exception:  # noqa: BLE001  # keep the original size
        return call
    return small


def _check_slopes(subject: Subject, call: Call) -> Findings:
    call = _small(subject, call)
    try:
        double = as_dtype(call, torch.float64)
        subject.answer(double)
        trials = [(double, _FINE), (double, _COARSE)]
    except Exception:  # noqa: BLE001  # it refuses float64
        trials = [(as_dtype(call, torch.float32), _SINGLE)]
    fault = ""
    for trial, precision in trials:
        try:
            fault = _compared(subject, trial, precision)
        except Exception as error:  # noqa: BLE001  # backward may raise anything
            yield _raised(subject, error, trial)
            return
        if not fault:
            break
    if fault:
        yield failed("autograd", f"{fault}, for {subject.base}{trials[0][0]}", fixes.GRADIENT, CONTENTS)
        return
    if precision is _COARSE:
        yield note("autograd", "float64 is taken, and answered with less precision: gradients were compared coarsely")
    elif precision is _FINE:
        yield from _gradcheck(subject, trials[0][0])
    yield from _spread(subject, trials[0][0])


def _raised(subject: Subject, error: Exception, call: Call) -> Any:
    if isinstance(error, NotImplementedError) or "not differentiable" in str(error):
        return note("autograd", f"it says that it has no gradient: {short(error, 160)}")
    return failed("autograd", f"backward raises: {short(error)}, for {subject.base}{call}", formula(subject))


def _named_floats(subject: Subject, call: Call) -> list[tuple[str, torch.Tensor]]:
    pairs = []
    for name, value in subject.named(call).items():
        values = value if isinstance(value, (list, tuple)) else [value]
        pairs += [(name, t) for t in values if torch.is_tensor(t) and t.is_floating_point()]
    return pairs


def _weights(results: list[Any]) -> list[Any]:
    generator = torch.Generator().manual_seed(5)
    return [
        torch.randn(r.shape, generator=generator, dtype=torch.float64).to(r) if _is_float(r) else None for r in results
    ]


def _is_float(value: Any) -> bool:
    return bool(torch.is_tensor(value) and value.is_floating_point())


def _total(results: list[Any], weights: list[Any], chosen: list[bool]) -> torch.Tensor:
    terms = [(r * w).sum() for r, w, c in zip(results, weights, chosen, strict=True) if w is not None and c]
    return torch.stack(terms).sum()


def _compared(subject: Subject, call: Call, precision: _Precision) -> str:
    """Describe the first gradient that differs from finite differences; empty if none does."""
    call_copy = call.mapped(lambda t: t.detach().clone().requires_grad_(t.is_floating_point()))
    results = subject.run(call_copy)
    flowing = [_is_float(r) and r.requires_grad for r in results]
    if not any(flowing):
        return "no result carries a gradient, although an argument asks for one"
    weights = _weights(results)
    named = _named_floats(subject, call_copy)
    grads = torch.autograd.grad(_total(results, weights, flowing), [t for _n, t in named], allow_unused=True)
    for (name, tensor), grad in zip(named, grads, strict=True):
        if grad is not None and grad.shape != tensor.shape:
            return f"the gradient of {name} has shape {list(grad.shape)}, the argument {list(tensor.shape)}"
    scale = max([float(g.abs().max()) for g in grads if g is not None and g.numel()], default=0.0)
    for index, ((name, tensor), grad) in enumerate(zip(named, grads, strict=True)):
        if fault := _one(subject, call, index, (weights, flowing), grad, precision, scale):
            return f"the gradient of {name} {fault} of {list(tensor.shape)}"
    return ""


def _one(
    subject: Subject, call: Call, place: int, outcome: tuple[Any, Any], grad: Any, precision: _Precision, scale: float
) -> str:
    base = call.mapped(lambda t: t.detach().clone())
    tensor = _named_floats(subject, base)[place][1]
    view = tensor.reshape(-1) if tensor.is_contiguous() else tensor.contiguous().reshape(-1)
    weights, flowing = outcome
    for index in _elements(tensor.numel()):
        position = tuple(int(i) for i in torch.unravel_index(torch.tensor(index), tensor.shape)) if tensor.dim() else ()
        original = view[index].item()
        totals = []
        for step in (precision.step, -precision.step):
            tensor[position] = original + step
            with torch.no_grad():
                totals.append(_total(subject.run(base.copied()), weights, flowing).double().item())
        tensor[position] = original
        slope = (totals[0] - totals[1]) / (2 * precision.step)
        gradient = 0.0 if grad is None else grad[position].item()
        if not abs(gradient - slope) <= precision.tolerance * (1.0 + max(abs(slope), scale)):
            statement = "is None" if grad is None else f"is {number(gradient)}"
            return f"{statement}, and the slope of the answers is {number(slope)}, at {list(position)}"
    return ""


def _elements(count: int) -> list[int]:
    step = max(1, -(-count // _MAX_COMPARED_ELEMENTS))
    return list(itertools.islice(range(0, count, step), _MAX_COMPARED_ELEMENTS))


def _gradcheck(subject: Subject, call: Call) -> Findings:
    """Run torch's own gradcheck, which also tries undefined and repeated gradients."""
    floats = [t.detach().clone().requires_grad_() for t in call.tensors if t.is_floating_point()]

    def function(*inputs: torch.Tensor) -> Any:
        remaining = iter(inputs)
        full = call.mapped(lambda t: next(remaining) if t.is_floating_point() else t)
        results = subject.run(full)
        return tuple(r for r in results if _is_float(r) and r.requires_grad)

    try:
        torch.autograd.gradcheck(function, floats, fast_mode=True, nondet_tol=1e-7)
    except Exception as error:  # noqa: BLE001  # it reports faults as errors of several types
        yield failed(
            "autograd", f"torch.autograd.gradcheck: {short(error)}, for {subject.base}{call}", fixes.GRADIENT, CONTENTS
        )


def _spread(subject: Subject, call: Call) -> Findings:
    """Check that an expanded incoming gradient, as from sum(), acts like a contiguous one."""
    gradients = []
    for laid_out in (True, False):
        call_copy = call.mapped(lambda t: t.detach().clone().requires_grad_(t.is_floating_point()))
        results = [r for r in subject.run(call_copy) if _is_float(r) and r.requires_grad]
        ones = [
            torch.ones_like(r) if laid_out else torch.ones((), dtype=r.dtype, device=r.device).expand(r.shape)
            for r in results
        ]
        gradients.append(
            torch.autograd.grad(results, [t for _n, t in _named_floats(subject, call_copy)], ones, allow_unused=True)
        )
    for (name, _t), contiguous, expanded in zip(_named_floats(subject, call), *gradients, strict=True):
        if contiguous is not None and (message := difference(contiguous, expanded)):
            fault = f"the gradient of {name} is another when the incoming gradient is expanded, as sum().backward() sends it"
            yield failed("autograd", f"{fault}: {message}, for {subject.base}{call}", fixes.GRADIENT_EXPANDED, CONTENTS)
            return
