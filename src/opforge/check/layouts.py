"""Check that the same elements in another layout give the same result."""

from __future__ import annotations

from typing import Any

import torch

from opforge.check import fixes
from opforge.check.call import OperatorCall, layout_variants
from opforge.check.compare import first_difference
from opforge.check.report import KIND_CONTENTS
from opforge.check.subject import Findings, Subject, describe_error, failed, note, skipped

_MAX_CALLS = 4


def check(subject: Subject) -> Findings:
    """Yield layouts with a different result, and layouts that are refused."""
    if subject.is_random():
        yield skipped("layouts", "the operator is random, and the layout may change the order of its random numbers")
        return
    wrong: dict[str, str] = {}
    refused: set[str] = set()
    for call in subject.calls_with_dtypes(torch.float32)[:_MAX_CALLS]:
        for layout, varied in layout_variants(call, subject.written_indices(call)).items():
            contiguous = varied.map_tensors(lambda t: t.detach().clone(memory_format=torch.contiguous_format))
            expected, refusal = _results_or_refusal(subject, contiguous)
            if expected is None:
                if layout not in (*_OPTIONAL_LAYOUTS, *refused):
                    refused.add(layout)
                    yield note(
                        "layouts", f"{layout} tensors are rejected: {refusal}, for {subject.base_name}{contiguous}"
                    )
                continue
            actual, refusal = _results_or_refusal(subject, varied)
            if actual is None and layout not in refused:
                refused.add(layout)
                yield note(
                    "layouts",
                    f"{layout} tensors are rejected: {refusal}, for {subject.base_name}{varied}",
                    fixes.ACCEPT_LAYOUTS,
                )
            elif actual is not None and (message := first_difference(expected, actual)):
                wrong.setdefault(layout, f"{message}, for {subject.base_name}{varied}")
    if wrong:
        first = next(iter(wrong.values()))
        names = f"{', '.join(wrong)} tensors give a different result than the same elements laid out contiguously"
        yield failed("layouts", f"{names}: {first}", fixes.NON_CONTIGUOUS, KIND_CONTENTS)


def _results_or_refusal(subject: Subject, call: OperatorCall) -> tuple[list[Any] | None, str]:
    """Return the results of a call, or None with the reason for the refusal."""
    try:
        return subject.run_copy(call), ""
    except Exception as error:  # noqa: BLE001  # any error is a refusal
        return None, describe_error(error, 160)


_OPTIONAL_LAYOUTS = ("zero_dim", "expanded")
"""Layouts with another rank or with equal rows; the operator need not accept them."""
