"""Whether the same elements in another layout give the same answer."""

from __future__ import annotations

import torch

from opforge.authoring.checking.calls import Call, in_layouts
from opforge.authoring.checking.comparing import differences
from opforge.authoring.checking.subject import Findings, Subject, failed, note, short, skipped

_MOST = 4
_NAMES = {"zero_dim": "tensors without dimensions", "empty": "empty tensors"}


def check(subject: Subject) -> Findings:
    """Yield layouts in which the answer is another, and those that are refused."""
    if subject.is_random():
        yield skipped("layouts", "the operator is random, and which draw goes where may depend on the layout")
        return
    seen: set[str] = set()
    for call in subject.first(torch.float32)[:_MOST]:
        for layout, twisted in in_layouts(call, subject.written_places(call)).items():
            if layout not in seen:
                for finding in _one(subject, call, layout, twisted):
                    seen.add(layout)
                    yield finding


def _one(subject: Subject, call: Call, layout: str, twisted: Call) -> Findings:
    plain = twisted.mapped(lambda t: t.detach().clone(memory_format=torch.contiguous_format))
    try:
        expected = subject.answer(plain)
    except Exception as error:  # noqa: BLE001  # whatever it raises is a refusal
        if layout not in ("zero_dim", "expanded"):  # of another rank or with equal rows: another call, which it need not take
            yield note("layouts", f"{_NAMES.get(layout, layout)} are refused: {short(error, 160)}, for {subject.base}{plain}")
        return
    try:
        found = subject.answer(twisted)
    except Exception as error:  # noqa: BLE001
        yield note("layouts", f"{layout} tensors are refused: {short(error, 160)}, for {subject.base}{twisted}", "take x.contiguous() where the kernel wants it, so that callers need not")
        return
    if words := differences(expected, found):
        yield failed("layouts", f"{layout} tensors give another answer than the same elements laid out contiguously: {words}, for {subject.base}{twisted}", _FIX)


_FIX = (
    "the kernel takes memory to be contiguous: begin with x = x.contiguous() (and y, …), or pass x.stride(…) to the kernel and compute addresses from it; "
    "x.data_ptr() already stands at x.storage_offset()"
)
