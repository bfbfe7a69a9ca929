"""Check that the same elements in another layout give the same result."""

from __future__ import annotations

import torch

from opforge.check import fixes
from opforge.check.differences import Expectation, first_difference
from opforge.check.findings import KIND_CONTENTS, Finding, Findings, failed, note, skipped
from opforge.check.operator_call import layout_variants
from opforge.check.subject import Subject, attempt, describe_error

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
            expected = attempt(subject.run_copy, contiguous)
            if isinstance(expected, Exception):
                if layout not in (*_OPTIONAL_LAYOUTS, *refused):
                    refused.add(layout)
                    yield _refusal(layout, expected, f"{subject.base_name}{contiguous}")
                continue
            actual = attempt(subject.run_copy, varied)
            if isinstance(actual, Exception):
                if layout not in refused:
                    refused.add(layout)
                    yield _refusal(layout, actual, f"{subject.base_name}{varied}", fixes.ACCEPT_LAYOUTS)
            elif message := first_difference(Expectation(expected, contiguous, subject.run), actual):
                wrong.setdefault(layout, f"{message}, for {subject.base_name}{varied}")
    if wrong:
        first = next(iter(wrong.values()))
        names = f"{', '.join(wrong)} tensors give a different result than the same elements laid out contiguously"
        yield failed("layouts", f"{names}: {first}", fixes.NON_CONTIGUOUS, KIND_CONTENTS)


def _refusal(layout: str, error: Exception, call: str, fix: str = "") -> Finding:
    return note("layouts", f"{layout} tensors are rejected: {describe_error(error, 160)}, for {call}", fix)


_OPTIONAL_LAYOUTS = ("zero_dim", "expanded")
"""Layouts with another rank or with equal rows; the operator need not accept them."""
