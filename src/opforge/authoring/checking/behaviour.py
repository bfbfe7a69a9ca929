"""Check determinism, devices, and torch.library.opcheck."""

from __future__ import annotations

from typing import Any

import torch

from opforge.authoring.checking import fixes
from opforge.authoring.checking.calls import Call
from opforge.authoring.checking.comparing import differences
from opforge.authoring.checking.report import CONTENTS, Finding, Status
from opforge.authoring.checking.subject import Findings, Subject, failed, note, short

_TIMES = 4


def determinism(subject: Subject) -> Findings:
    """Yield results that change from one call to the next."""
    calls = subject.first(torch.float32)[:3]
    calls = [*calls, *(c for c in (_larger(subject, calls[0]),) if c is not None)]
    for call in calls:
        expected = subject.answer(call)
        for _ in range(_TIMES):
            actual = subject.answer(call)
            if not (message := differences(expected, actual, exact=True)):
                continue
            if not differences(expected, actual):
                yield note(
                    "determinism",
                    f"the last bits change from call to call: {message}, for {subject.base}{call}",
                    fixes.LAST_BITS,
                )
            else:
                yield failed(
                    "determinism",
                    f"the same call with the same seed gives another answer: {message}, for {subject.base}{call}",
                    fixes.CHANGES if subject.tagged_random else fixes.CHANGES_UNSEEDED,
                    CONTENTS,
                )
            return
    if subject.is_random() and not subject.tagged_random:
        yield note(
            "determinism",
            "the operator is random and does not say so: torch.compile may call it once where you call it twice, or again in backward",
            f"say so: {fixes.SEEDED}",
        )


def _larger(subject: Subject, call: Call) -> Call | None:
    """Return the call with more elements, to expose races; None if the size is refused."""
    larger = subject.resized(call, lambda n: 2 * n if subject.interpreted else max(n, min(8 * n, 512)))
    try:
        subject.answer(larger)
    except Exception:  # noqa: BLE001  # an unsupported size
        return None
    return larger


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
    return f"if it is to run there: {' and '.join(decorators)}, or a block TORCH_LIBRARY_IMPL(…, {missing[0]}, m)"


def opcheck(subject: Subject) -> Findings:
    """Yield the failures of torch.library.opcheck, each of its tests once."""
    seen: set[str] = set()
    for call in subject.first(torch.float32, torch.float64)[:3]:
        for test, message in _tests(subject, call):
            if test not in seen:
                seen.add(test)
                yield Finding(
                    "opcheck",
                    Status.FAILED,
                    f"{test}: {message}, for {subject.base}{call}",
                    fixes.OPCHECK.get(test, ""),
                    test,
                )


def _tests(subject: Subject, call: Call) -> list[tuple[str, str]]:
    grads = not subject.mutates

    def own(t: torch.Tensor) -> torch.Tensor:
        return t.detach().clone().requires_grad_(grads and t.is_floating_point())

    call_copy = call.mapped(own)
    outcomes: dict[str, Any] = torch.library.opcheck(
        subject.overload, call_copy.args, dict(call_copy.kwargs), raise_exception=False
    )
    return [(test, short(error, 400)) for test, error in outcomes.items() if isinstance(error, BaseException)]
