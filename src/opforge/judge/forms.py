"""The forms in which a case is run: unchanged, twice, with hostile layouts and values, replayed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from opforge.cases.case import Expect, Phase
from opforge.cases.forms import ALONG_A_DIMENSION, LARGE_FORMS, ONE_TENSOR_TWICE, SIZED_ALIKE
from opforge.cases.twists import TWISTS, Inputs, tame, turns
from opforge.judge import defects
from opforge.judge.batch import ARGUMENT, Batch, CaseRow, Placed, dtypes_of, named_arguments
from opforge.judge.properties import UNDEFINED_CONTENTS
from opforge.judge.reference import Call
from opforge.judge.verdict import Finding, Outcome
from opforge.ops import Form, Operator
from opforge.ops.arguments import may_be_left_out, other_required_values, other_values
from opforge.ops.undefined import solves
from opforge.sandbox.situations import ONE_CALL, SITUATIONS

_TWICE = 2
"""Cases of an operator that are run twice, to check for the same answer."""
_REPLAYED_CASES = 4
"""First cases of an operator that are replayed; of the others one in eight."""
_ENLARGED_CASES = 3
"""Cases of different dtypes that are run in each large form; of the others one in 256."""
_CASES_PER_SITUATION = 4
"""One in this many further cases is called in another situation."""
_NONFINITE_FORMS = ("nan", "inf", "nan_in_first")
_SPECIAL = (*_NONFINITE_FORMS, "edges")
"""Forms that are also run with other arguments."""
_ARGUMENTS = 6
"""Times that each other value of an argument is tried in the first cases.

Of the other cases, one in ``_CASES_PER_SITUATION`` tries one."""
_MAX_TWISTED_BYTES = 4 << 20
ATEN_BUDGET_S = 3.0
"""Seconds that ATen may take for all variants of a case.

If one call takes as long, the case is judged in two variants."""
_MIN_VARIANTS = 2
LARGE_BYTES = 64 << 20
"""Cases with larger inputs are judged unchanged, and once with other contents if they are timed.

Each form of them takes seconds."""

_LISTED_FORMS = frozenset({*TWISTS, *SITUATIONS})
"""Forms that a verdict lists by name."""
REPLAYS = ("replayed", "reordered")
_WORDS = {
    "transposed": "with transposed inputs",
    "pitched": "with inputs whose rows have gaps between them",
    "strided": "with strided inputs",
    "permuted": "with transposed inputs that have gaps",
    "offset": "with inputs at a storage offset",
    "expanded": "with expanded inputs",
    "expanded_last": "with inputs whose rows are expanded",
    "channels_last": "with channels-last inputs",
    "empty": "with empty inputs",
    "zero_dim": "with 0-dim inputs",
    "nan": "with NaN among the inputs",
    "inf": "with infinities among the inputs",
    "negative_zero": "with negative zeros among the inputs",
    "denormals": "with denormal numbers among the inputs",
    "extremes": "with extreme values among the inputs",
    "magnitudes": "with numbers of all magnitudes among the inputs",
    "one_transposed": "with one input transposed and the others not",
    "broadcast": "with an input that is broadcast",
    ONE_TENSOR_TWICE: "with one tensor for two arguments",
    "torch_threads": "with several threads of torch",
    "duplicates": "with equal values among the inputs",
    "integers": "with other integers and booleans among the inputs",
    "replayed": "with new contents in the same memory",
    "reordered": "with its contents reordered in the same memory",
    "long_rows": "with rows of thousands of elements",
    "long_pitched": "with rows of thousands of elements that have gaps between them",
    "many_rows": "with thousands of rows",
    "sixteenfold": "with dimensions that are multiples of 16",
    "long_masked": "with infinities and NaN in rows of thousands of elements",
    "branch_cuts": "with complex numbers on the axes",
    "meeting": "with NaN, infinities and zeros of several inputs in the same place",
    "edges": "with numbers at which comparisons and roundings turn over",
    "exponents": "with numbers whose exponentials are at the end of the range",
    "shifted": "with a mean that is large beside the variance",
    "masked": "with rows of minus infinity",
    "nan_in_first": "with NaN and infinities in the first input",
    "wide_integers": "with integers that floating-point numbers cannot tell apart",
    "zeros": "with zeros among integers",
    "negative_position": "with a position of -1",
    "position_out_of_range": "with a position out of range",
    "grad_mode": "with grad mode on",
    "requires_grad": "with inputs that require gradients",
    "inference_mode": "in inference mode",
    "thread": "called from another thread",
    "threads": "called from two threads at once",
    "default_dtype": "with float64 as the default dtype",
    "lazy_clone": "with inputs that are lazy clones",
    "kept_results": "called many times, with all results kept",
    "again": "the second time",
}


def words(form: str) -> str:
    """Describe the form in which a case was run."""
    if form.startswith(ARGUMENT):
        return f"with another value for `{form.removeprefix(ARGUMENT)}`"
    return _WORDS[form]


def place(
    batch: Batch,
    op: Operator,
    case: CaseRow,
    number: int,
    cases: int,
    *,
    hostile: bool,
    large_too: bool = True,
    budget_s: float = ATEN_BUDGET_S,
) -> bool:
    """Place a case in all its forms; return False when it must wait for the next batch.

    ``number`` counts the operator's cases. ``budget_s`` limits ATen's time for the forms.
    """
    first = batch.add(case)
    if first is None:
        return False
    if case.expect is Expect.RAISES:
        return True
    if first.answer.raised is not None:
        return True
    inputs = batch.inputs(first)
    placed_before = len(batch.placed)

    def affordable() -> bool:
        """Whether ATen's time allows another variant; recorded where it does not."""
        done = len(batch.placed) - placed_before
        if done < _MIN_VARIANTS or done * first.aten_s < budget_s:
            return True
        batch.slow[case.id] = first.aten_s
        return False

    with contextlib.suppress(MemoryError):  # no memory for more forms
        large = sum(row[1] for row in first.inputs) > LARGE_BYTES
        if number < _TWICE and not op.random and not large:
            batch.again(first)
        if _replayable(op) and _is_replayed(case, number, large=large):
            for name in REPLAYS[: 1 if large else None]:
                if affordable():
                    batch.replay(first, inputs, name)
        if hostile and case.phase is Phase.CORRECTNESS and sum(row[1] for row in first.inputs) <= _MAX_TWISTED_BYTES:
            values = not op.random and op.base not in UNDEFINED_CONTENTS
            for count, names in turns(number, cases, batch.tried.twists, values=values):
                remaining = count
                for name in names:
                    if remaining and name not in defects.of(op) and affordable():
                        remaining -= batch.twist(first, inputs, name)
            if large_too and values and not solves(op.packet):
                for name in LARGE_FORMS if "backward" not in op.base else SIZED_ALIKE:
                    if _is_enlarged(batch, case, first, inputs, name) and name not in defects.of(op) and affordable():
                        batch.enlarge(first, inputs, name)
            for name in _situations(op, number):
                if name not in defects.of(op) and affordable():
                    batch.situate(first, name)
            _place_arguments(batch, op, first, inputs, number, cases, affordable)
    return True


def _is_enlarged(batch: Batch, case: CaseRow, first: Placed, inputs: Inputs, name: str) -> bool:
    """Whether to run a case in a large form: the first of some dtypes and dims, some at random."""
    dtypes, dims = batch.tried.dtypes[name], batch.tried.dims[name]
    return (
        (len(dtypes) < _ENLARGED_CASES and dtypes_of(first) not in dtypes)
        or (name in ALONG_A_DIMENSION and len(dims) < _ENLARGED_CASES and inputs.has_floats and inputs.dim not in dims)
        or int(case.id[-2:], 16) == 0
    )


def _situations(op: Operator, number: int) -> Sequence[str]:
    """Return the situations in which a case is called.

    The first case is called in all, the next in those of one call. Of the others, some are called
    in one each, in turn.
    """
    if op.random:
        return ()
    if number < _TWICE:
        return SITUATIONS if number == 0 else ONE_CALL
    return () if number % _CASES_PER_SITUATION else (ONE_CALL[number // _CASES_PER_SITUATION % len(ONE_CALL)],)


def _place_arguments(
    batch: Batch,
    op: Operator,
    first: Placed,
    inputs: Inputs,
    number: int,
    cases: int,
    affordable: Callable[[], bool],
) -> None:
    """Place a case and its special forms with other values for some arguments."""
    if not all(map(tame, inputs.tensors)):
        return
    integral = not any(t.is_floating_point() or t.is_complex() for t in inputs.tensors)
    special = [p for p in batch.placed if p.case is first.case and p.form in _SPECIAL]
    for basis in (first, *special):
        for name, value in _arguments(op, first.call, number, cases, always=basis.form == "edges"):
            fraction = isinstance(value, float) and not value.is_integer()
            if basis.form in _NONFINITE_FORMS and value == 0 and name != "beta":
                continue  # only for `beta` do the docs say that zero ignores NaN and infinities
            if f"{ARGUMENT}{name}" not in defects.of(op) and not (integral and fraction) and affordable():
                batch.argument(basis, name, value)


def _arguments(op: Operator, call: Call, number: int, cases: int, *, always: bool) -> Iterator[tuple[str, Any]]:
    """Yield arguments with other values: a few per case, all of them over an operator's cases."""
    given = named_arguments(op, call)
    choices = [
        (a.name, value)
        for a in op.arguments
        for value in (other_values(a) if may_be_left_out(a) else other_required_values(a, given.get(a.name)))
    ]
    count = min(len(choices), -(-3 * len(choices) // max(cases, 1)))
    if number * count >= _ARGUMENTS * len(choices) and number % _CASES_PER_SITUATION and not always:
        return
    for i in range(count):
        yield choices[(number * count + i) % len(choices)]


def _is_replayed(case: CaseRow, number: int, *, large: bool) -> bool:
    return case.phase is Phase.PERFORMANCE or (
        not large and (number < _REPLAYED_CASES or int(case.id[-1], 16) % 8 == 0)
    )


def _replayable(op: Operator) -> bool:
    return not op.random and op.form in (Form.FUNCTIONAL, Form.INPLACE) and op.base not in UNDEFINED_CONTENTS


def settle(group: Sequence[tuple[Placed, Finding]]) -> Finding:
    """Return the verdict on a case from the findings on its forms: the first failure, if any."""
    (_, finding), *others = group
    if not finding.passed:
        return finding
    tried: list[str] = []
    for placed, other in others:
        label = words(placed.form)
        if other.outcome is Outcome.ERROR and placed.form in LARGE_FORMS:  # such sizes are unproven
            finding = replace(finding, notes=(*finding.notes, f"no answer {label}: {other.reason}"))
        elif other.outcome is Outcome.UNSUPPORTED:
            finding = replace(finding, notes=(*finding.notes, f"declines {label}"))
        elif not other.passed:
            return _form_failure(placed, other, label)
        else:
            if placed.expect is Expect.RETURNS:
                finding = replace(finding, figures={**other.figures, **finding.figures})
            tried += [placed.form] if placed.form in _LISTED_FORMS or placed.form.startswith(ARGUMENT) else []
    return replace(finding, figures={**finding.figures, "forms": tried}) if tried else finding


def _form_failure(placed: Placed, other: Finding, label: str) -> Finding:
    if placed.form == "again":
        return Finding(Outcome.CONTRACT, f"another answer to the same inputs the second time: {other.reason}")
    return replace(other, reason=f"{label}: {other.reason}")
