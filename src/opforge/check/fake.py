"""Check an operator's fake against its real results, in other layouts and with symbolic sizes."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode, UnsupportedOperatorException
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    GuardOnDataDependentSymNode,
    ShapeEnv,
    StatelessSymbolicContext,
)  # fmt: skip

from opforge.check import fixes
from opforge.check.findings import Findings, failed
from opforge.check.operator_call import OperatorCall, describe_tensor, flat_results, layout_variants
from opforge.check.subject import Fault, Subject, attempt, describe_error

_MISSING_FAKE_ERRORS = (
    "no fake impl registered",
    "There was no fake impl",
    "no meta",
    "Meta tensors",
    "'Meta' backend",
)
_DATA_DEPENDENT_ERRORS = (
    "data-dependent",
    "Cannot access data pointer",
    "aten._local_scalar_dense",
    "aten.equal",
    "aten.nonzero",
    "FakeTensor, which is not supported",
)


def check(subject: Subject) -> Findings:
    """Yield the faults of the fake, each kind once."""
    seen: set[str] = set()
    for layout, call in _calls_in_layouts(subject):
        for fault in _compare_with_real(subject, call):
            if fault.kind not in seen:
                seen.add(fault.kind)
                where = "" if layout == "as it stands" else f" ({layout})"
                yield failed("fake", f"{fault.what}, for {subject.base_name}{call}{where}", fault.fix)
    if not seen:
        yield from _check_symbolic(subject)


def _calls_in_layouts(subject: Subject) -> list[tuple[str, OperatorCall]]:
    calls = [("as it stands", call) for call in subject.calls]
    for call in subject.calls[:3]:
        calls += layout_variants(call, subject.written_indices(call)).items()
    return calls


def _compare_with_real(subject: Subject, call: OperatorCall) -> list[Fault]:
    """Return the faults of the fake; none if the operator itself refuses the call."""
    with torch.no_grad():
        real = attempt(subject.results, call.copy())
    if isinstance(real, Exception):
        return []
    faked = attempt(run_fake, subject, call.copy())
    return [_classify_error(subject, faked)] if isinstance(faked, Exception) else _compare_results(real, faked)


def run_fake(subject: Subject, call: OperatorCall) -> list[Any]:
    """Run an operator's fake with static input sizes; data-dependent sizes become symbols."""
    with FakeTensorMode(shape_env=ShapeEnv()) as mode, torch.no_grad():
        fake = call.map_tensors(lambda t: mode.from_tensor(t, static_shapes=True))
        return flat_results(subject.overload(*fake.args, **fake.kwargs))


def refusal_reason(subject: Subject, call: OperatorCall) -> str:
    """Return why the fake refuses a call; empty if it accepts the call or cannot tell."""
    error = attempt(run_fake, subject, call)
    if isinstance(error, Exception) and _classify_error(subject, error).kind == "raises":
        return describe_error(error, 160)
    return ""


def _classify_error(subject: Subject, error: Exception) -> Fault:
    text = str(error)
    if isinstance(error, UnsupportedOperatorException) or any(words in text for words in _MISSING_FAKE_ERRORS):
        what = "there is no fake: torch.compile and torch.export cannot trace the operator"
        return Fault("missing", what, fake_skeleton(subject))
    if _is_data_dependent(error):
        what = f"the fake reads the contents of a tensor: {describe_error(error, 160)}"
        return Fault("data", what, fixes.FAKE_CONTENTS)
    what = f"the fake raises where the operator does not: {describe_error(error)}"
    return Fault("raises", what, fixes.FAKE_RAISES)


def _is_data_dependent(error: Exception) -> bool:
    kinds = {kind.__name__ for kind in type(error).__mro__}
    return (
        isinstance(error, GuardOnDataDependentSymNode)
        or bool(kinds & {"DataDependentOutputException", "DynamicOutputShapeException"})
        or any(words in str(error) for words in _DATA_DEPENDENT_ERRORS)
    )


def fake_skeleton(subject: Subject) -> str:
    """Return a skeleton of an operator's fake."""
    names = ", ".join(a.name for a in subject.arguments)
    first = next((a.name for a in subject.arguments if str(a.type) == "Tensor"), "x")
    count = len(subject.returns)
    body = ", ".join([f"torch.empty_like({first})"] * count) if count else "None"
    name = subject.name.removesuffix(".default")
    return (
        f'register one, with the shapes and dtypes of the real results: @torch.library.register_fake("{name}") '
        f"def _({names}): return {body}"
    )


def _compare_results(real: list[Any], faked: list[Any]) -> list[Fault]:
    if len(real) != len(faked):
        what = f"the fake returns {len(faked)} results, the operator {len(real)}"
        return [Fault("count", what, "return as many results as the schema has")]
    faults = []
    for index, (r, f) in enumerate(zip(real, faked, strict=True)):
        which = "" if len(real) == 1 else f" for result {index}"
        if isinstance(r, torch.Tensor) and isinstance(f, torch.Tensor):
            faults += _compare_metadata(which, r, f)
        elif isinstance(r, torch.Tensor) != isinstance(f, torch.Tensor):
            what = f"the fake gives {f!r}{which}, the operator {r!r}"
            faults.append(Fault("kind", what, "return tensors where the operator does"))
    return faults


def _compare_metadata(which: str, real: torch.Tensor, fake: torch.Tensor) -> list[Fault]:
    shape, dtype = list(real.shape), real.dtype
    has_symbols = any(isinstance(size, torch.SymInt) for size in fake.shape)  # data-dependent
    fake_shape = [n if isinstance(f, torch.SymInt) else int(f) for f, n in zip(fake.shape, shape, strict=False)]
    if fake.dim() != real.dim() or fake_shape != shape:
        what = f"the fake says shape {list(fake.shape)}{which}, the operator returns {shape}"
        fix = f"compute the shape of the result in the fake as the operator does; here it is {shape}"
        return [Fault("shape", what, fix)]
    faults = []
    if fake.dtype != dtype:
        what = f"the fake says {fake.dtype}{which}, the operator returns {dtype}"
        where = f"pass dtype={dtype} to the empty… of the fake (or x.dtype, where it follows the input)"
        faults.append(Fault("dtype", what, f"{where}, or convert the result"))
    if fake.device != real.device:
        what = f"the fake says device {fake.device}{which}, the operator returns {real.device}"
        faults.append(Fault("device", what, fixes.FAKE_DEVICE))
    if real.layout == torch.strided and not has_symbols and _significant_strides(real) != _significant_strides(fake):
        what = f"the fake says strides {list(fake.stride())}{which}, the operator returns {list(real.stride())}"
        faults.append(Fault("stride", what, _stride_fix(real, fake)))
    return faults


def _significant_strides(t: torch.Tensor) -> list[int]:
    """Return the strides that affect element addresses: those of dimensions with size above 1."""
    return [] if 0 in t.shape else [int(stride) for size, stride in zip(t.shape, t.stride(), strict=True) if size != 1]


def _stride_fix(real: torch.Tensor, fake: torch.Tensor) -> str:
    if real.is_contiguous():
        return fixes.FAKE_CONTIGUOUS
    if fake.is_contiguous():
        return fixes.REAL_CONTIGUOUS
    return f"allocate in the fake as the operator does: the real one is {describe_tensor(real)}"


def _check_symbolic(subject: Subject) -> Findings:
    """Run the fake with symbolic sizes, and compare it with the operator at another size."""
    for call in subject.calls_with_dtypes(torch.float32)[:4]:
        other = subject.resized(call, lambda size: 2 * size + 3)
        with torch.no_grad():
            real = attempt(subject.results, other.copy())
        if not isinstance(real, Exception):
            yield from _check_symbolic_call(subject, call, other, real)
            return


def _run_symbolic(
    subject: Subject, call: OperatorCall, other: OperatorCall, env: ShapeEnv
) -> tuple[list[Any], dict[Any, int]]:
    """Run the fake with symbolic sizes; return its results, and the symbols' values in another call."""
    values: dict[Any, int] = {}
    with FakeTensorMode(shape_env=env) as mode, torch.no_grad():
        fake = call.map_tensors(lambda t: mode.from_tensor(t, symbolic_context=_symbolic_context(t)))
        for fake_tensor, other_tensor in zip(fake.tensors, other.tensors, strict=True):
            sizes = zip(fake_tensor.shape, other_tensor.shape, strict=True)
            values |= {symbol.node.expr: n for symbol, n in sizes if isinstance(symbol, torch.SymInt)}
        return flat_results(subject.overload(*fake.args, **fake.kwargs)), values


def _check_symbolic_call(subject: Subject, call: OperatorCall, other: OperatorCall, real: list[Any]) -> Findings:
    env = ShapeEnv()
    outcome = attempt(_run_symbolic, subject, call, other, env)
    if isinstance(outcome, Exception):
        error = _classify_error(subject, outcome)
        if error.kind == "raises" and _is_traceable(subject, call):
            return  # a kernel without its own fake, which torch.compile traces differently
        yield failed("fake", f"with symbolic sizes: {error.what}, for {subject.base_name}{call}", error.fix)
        return
    results, values = outcome
    fixed = {s: int(env.replacements[s]) for s in values if s in env.replacements and env.replacements[s].is_number}
    if fixed:
        sizes = ", ".join(str(n) for n in fixed.values())
        fault = (
            f"the fake fixes sizes ({sizes}), and the operator takes others: torch.compile makes a new graph for "
            "every size"
        )
        yield failed("fake", f"{fault}; seen with {subject.base_name}{call}", fixes.FAKE_SIZES)
        return
    for index, (f, r) in enumerate(zip(results, real, strict=False)):
        if isinstance(f, torch.Tensor) and isinstance(r, torch.Tensor):
            fake_shape = [_evaluate_size(size, values) for size in f.shape]
            if None not in fake_shape and fake_shape != list(r.shape):
                fault = (
                    f"the fake computes shape {fake_shape} for result {index} of {subject.base_name}{other}, and "
                    f"the operator returns {list(r.shape)}"
                )
                yield failed("fake", f"{fault}; for {subject.base_name}{call} both agree", fixes.FAKE_SHAPE)
                return


def _is_traceable(subject: Subject, call: OperatorCall) -> bool:
    """Whether torch.compile can trace the operator with symbolic sizes."""

    def called(*args: Any, **kwargs: Any) -> Any:
        return subject.overload(*args, **kwargs)

    call_copy = call.copy()
    compiled = torch.compile(called, fullgraph=True, backend="eager", dynamic=True)
    with torch.no_grad():
        return not isinstance(attempt(compiled, *call_copy.args, **call_copy.kwargs), Exception)


def _symbolic_context(t: torch.Tensor) -> Any:
    return StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC if s > 1 else DimDynamic.STATIC for s in t.shape])


def _evaluate_size(size: Any, values: dict[Any, int]) -> int | None:
    """Evaluate a size for given symbol values; None if it contains another symbol."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    expression = size.node.expr.subs(values)
    return int(expression) if expression.is_number else None
