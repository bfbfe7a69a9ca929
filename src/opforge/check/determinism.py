"""Check determinism, devices, and torch.library.opcheck."""

from __future__ import annotations

from typing import Any

import torch

from opforge.check import fixes
from opforge.check.differences import Expectation, first_difference
from opforge.check.findings import KIND_CONTENTS, Finding, Findings, Status, failed, note
from opforge.check.operator_call import OperatorCall
from opforge.check.subject import Subject, describe_error

_REPEATS = 4


def determinism(subject: Subject) -> Findings:
    """Yield results that change from one call to the next."""
    calls = subject.calls_with_dtypes(torch.float32)[:3]
    calls = [*calls, *(c for c in (_larger(subject, calls[0]),) if c is not None)]
    for call in calls:
        expected = subject.run_copy(call)
        for _ in range(_REPEATS):
            actual = subject.run_copy(call)
            if not (message := first_difference(expected, actual)):
                continue
            if not first_difference(Expectation(expected, call, subject.run), actual):
                yield note(
                    "determinism",
                    f"the last bits change from call to call: {message}, for {subject.base_name}{call}",
                    fixes.LAST_BITS,
                )
            else:
                yield failed(
                    "determinism",
                    f"the same call with the same seed gives a different result: {message}, for "
                    f"{subject.base_name}{call}",
                    fixes.NONDETERMINISTIC if subject.is_tagged_random else fixes.NONDETERMINISTIC_UNSEEDED,
                    KIND_CONTENTS,
                )
            return
    if subject.is_random() and not subject.is_tagged_random:
        yield note(
            "determinism",
            "the operator is random and does not say so: torch.compile may call it once where you call it twice, or "
            "again in backward",
            f"say so: {fixes.SEEDED}",
        )


def _larger(subject: Subject, call: OperatorCall) -> OperatorCall | None:
    """Return the call with more elements, to expose races; None if the size is refused."""
    larger = subject.resized(call, lambda n: 2 * n if subject.interpreted else max(n, min(8 * n, 512)))
    return larger if subject.accepts(larger) else None


def devices(subject: Subject) -> Findings:
    """Yield the devices without a kernel."""
    backends = subject.backends()
    if "all" in backends:
        return
    missing = [name for name in ("CPU", "CUDA") if name not in backends]
    if missing:
        have = f"kernels for {', '.join(backends)}" if backends else "no kernel at all"
        yield note("devices", f"there are {have}, none for {' and '.join(missing)}", _kernels(subject, missing))


def _kernels(subject: Subject, missing: list[str]) -> str:
    name = subject.name.removesuffix(".default")
    decorators = [f'@torch.library.register_kernel("{name}", "{key.lower()}")' for key in missing]
    return f"to run it there: {' and '.join(decorators)}, or a block TORCH_LIBRARY_IMPL(…, {missing[0]}, m)"


def opcheck(subject: Subject) -> Findings:
    """Yield the failures of torch.library.opcheck, each of its tests once."""
    seen: set[str] = set()
    for call in subject.calls_with_dtypes(torch.float32, torch.float64)[:3]:
        for test, message in _failed_tests(subject, call):
            if test not in seen:
                seen.add(test)
                yield Finding(
                    "opcheck",
                    Status.FAILED,
                    f"{test}: {message}, for {subject.base_name}{call}",
                    fixes.OPCHECK.get(test, ""),
                    test,
                )


def _failed_tests(subject: Subject, call: OperatorCall) -> list[tuple[str, str]]:
    grads = not subject.mutates

    def own(t: torch.Tensor) -> torch.Tensor:
        return t.detach().clone().requires_grad_(grads and t.is_floating_point())

    call_copy = call.map_tensors(own)
    outcomes: dict[str, Any] = torch.library.opcheck(
        subject.overload, call_copy.args, dict(call_copy.kwargs), raise_exception=False
    )
    return [(test, describe_error(error, 400)) for test, error in outcomes.items() if isinstance(error, BaseException)]
