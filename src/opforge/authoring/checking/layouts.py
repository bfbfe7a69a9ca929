"""Check that the same elements in another layout give the same result."""

from __future__ import annotations

from typing import Any

import torch

from opforge.authoring.checking import fixes
from opforge.authoring.checking.calls import Call, in_layouts
from opforge.authoring.checking.comparing import differences
from opforge.authoring.checking.report import CONTENTS
from opforge.authoring.checking.subject import Findings, Subject, failed, note, short, skipped

_MOST = 4


def check(subject: Subject) -> Findings:
    """Yield layouts with a different result, and layouts that are refused."""
    if subject.is_random():
        yield skipped("layouts", "the operator is random, and which draw goes where may depend on the layout")
        return
    wrong: dict[str, str] = {}
    refused: set[str] = set()
    for call in subject.first(torch.float32)[:_MOST]:
        for layout, twisted in in_layouts(call, subject.written_places(call)).items():
            contiguous = twisted.mapped(lambda t: t.detach().clone(memory_format=torch.contiguous_format))
            expected, refusal = _tried(subject, contiguous)
            if expected is None:
                if layout not in (*_OPTIONAL_LAYOUTS, *refused):
                    refused.add(layout)
                    yield note("layouts", f"{layout} tensors are refused: {refusal}, for {subject.base}{contiguous}")
                continue
            actual, refusal = _tried(subject, twisted)
            if actual is None and layout not in refused:
                refused.add(layout)
                yield note(
                    "layouts",
                    f"{layout} tensors are refused: {refusal}, for {subject.base}{twisted}",
                    fixes.TAKE_LAYOUTS,
                )
            elif actual is not None and (message := differences(expected, actual)):
                wrong.setdefault(layout, f"{message}, for {subject.base}{twisted}")
    if wrong:
        first = next(iter(wrong.values()))
        names = f"{', '.join(wrong)} tensors give another answer than the same elements laid out contiguously"
        yield failed("layouts", f"{names}: {first}", fixes.LAYOUTS, CONTENTS)


def _tried(subject: Subject, call: Call) -> tuple[list[Any] | None, str]:
    """Return the results of a call, or None with the reason for the refusal."""
    try:
        return subject.answer(call), ""
    except Exception as error:  # noqa: BLE001  # any error is a refusal
        return None, short(error, 160)


_OPTIONAL_LAYOUTS = ("zero_dim", "expanded")
"""Layouts with another rank or with equal rows; the operator need not accept them."""
