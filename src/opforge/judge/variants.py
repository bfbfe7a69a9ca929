"""The variants in which a case is run: unchanged, twice, with hostile layouts and values, replayed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from opforge.cases.case import Expect, Phase
from opforge.cases.variant_shapes import DIM_VARIANTS, EQUAL_SIZE_VARIANTS, LARGE_VARIANT_NAMES, ONE_TENSOR_TWICE
from opforge.cases.variants import VARIANTS, CallTensors, is_moderate, variants_to_try
from opforge.judge import aten_bugs
from opforge.judge.batch import ARGUMENT_PREFIX, Batch, BatchEntry, CaseRow, dtypes_of, named_arguments
from opforge.judge.reference.aten import ReferenceCall
from opforge.judge.verdict import Verdict, VerdictKind
from opforge.ops import Operator, SchemaKind
from opforge.ops.arguments import is_omittable, other_required_values, other_values
from opforge.ops.undefined import UNDEFINED_CONTENTS, is_solver
from opforge.sandbox.guest.situations import SINGLE_CALL_SITUATIONS, SITUATIONS

_REPEATED_CASES = 2
"""Cases of an operator that are run twice, to check for the same answer."""
_REPLAYED_CASES = 4
"""First cases of an operator that are replayed; of the others one in eight."""
_ENLARGED_CASES = 3
"""Cases of different dtypes that are run in each large variant; of the others one in 256."""
_CASES_PER_SITUATION = 4
"""One in this many of the remaining cases is called in another situation."""
_NONFINITE_VARIANTS = ("nan", "inf", "nan_in_first")
_VARIANTS_WITH_ARGUMENTS = (*_NONFINITE_VARIANTS, "edges")
"""Variants that are also run with other arguments."""
_TRIES_PER_ARGUMENT_VALUE = 6
"""Times that each other value of an argument is tried in the first cases.

Of the other cases, one in ``_CASES_PER_SITUATION`` tries one."""
_MAX_HOSTILE_BYTES = 4 << 20
ATEN_TIME_BUDGET_S = 3.0
"""Seconds that ATen may take for all variants of a case.

If one call takes as long, the case is judged in two variants."""
_MIN_VARIANTS = 2
MAX_VARIED_INPUT_BYTES = 64 << 20
"""Cases with larger inputs are judged unchanged, and once with other contents if they are timed.

Each variant of them takes seconds."""

_LISTED_VARIANTS = frozenset({*VARIANTS, *SITUATIONS})
"""Variants that a verdict lists by name."""
REPLAY_VARIANTS = ("replayed", "reordered")
_DESCRIPTIONS = {
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


def describe(variant: str) -> str:
    """Describe the variant in which a case was run."""
    if variant.startswith(ARGUMENT_PREFIX):
        return f"with another value for `{variant.removeprefix(ARGUMENT_PREFIX)}`"
    return _DESCRIPTIONS[variant]


def add_with_variants(
    batch: Batch,
    op: Operator,
    case: CaseRow,
    case_index: int,
    case_count: int,
    *,
    hostile: bool,
    allow_large_variants: bool = True,
    budget_s: float = ATEN_TIME_BUDGET_S,
) -> bool:
    """Place a case in all its variants; return False when it must wait for the next batch.

    ``case_index`` counts the operator's cases. ``budget_s`` limits ATen's time for the variants.
    """
    first = batch.add(case)
    if first is None:
        return False
    if case.expect is Expect.RAISES:
        return True
    if first.answer.raised is not None:
        return True
    inputs = batch.variant_inputs(first)
    placed_before = len(batch.entries)

    def affordable() -> bool:
        """Whether ATen's time allows another variant; recorded where it does not."""
        done = len(batch.entries) - placed_before
        if done < _MIN_VARIANTS or done * first.aten_s < budget_s:
            return True
        batch.slow_aten_s[case.id] = first.aten_s
        return False

    with contextlib.suppress(MemoryError):  # no memory for more variants
        large = sum(row[1] for row in first.input_rows) > MAX_VARIED_INPUT_BYTES
        if case_index < _REPEATED_CASES and not op.is_random and not large:
            batch.add_repeat(first)
        if _replayable(op) and _is_replayed(case, case_index, large=large):
            for name in REPLAY_VARIANTS[: 1 if large else None]:
                if affordable():
                    batch.add_replay(first, inputs, name)
        if (
            hostile
            and case.phase is Phase.CORRECTNESS
            and sum(row[1] for row in first.input_rows) <= _MAX_HOSTILE_BYTES
        ):
            values = not op.is_random and op.base not in UNDEFINED_CONTENTS
            for count, names in variants_to_try(case_index, case_count, batch.tried.counts, with_values=values):
                remaining = count
                for name in names:
                    if remaining and name not in aten_bugs.crashing_variants(op) and affordable():
                        remaining -= batch.add_variant(first, inputs, name)
            if allow_large_variants and values and not is_solver(op.packet):
                for name in LARGE_VARIANT_NAMES if "backward" not in op.base else EQUAL_SIZE_VARIANTS:
                    if (
                        _is_enlarged(batch, case, first, inputs, name)
                        and name not in aten_bugs.crashing_variants(op)
                        and affordable()
                    ):
                        batch.add_large_variant(first, inputs, name)
            for name in _situations(op, case_index):
                if name not in aten_bugs.crashing_variants(op) and affordable():
                    batch.add_situation(first, name)
            _add_argument_variants(batch, op, first, inputs, case_index, case_count, affordable)
    return True


def _is_enlarged(batch: Batch, case: CaseRow, original: BatchEntry, inputs: CallTensors, variant: str) -> bool:
    """Whether to run a case in a large variant: the first of some dtypes and dims, some at random."""
    dtypes, dims = batch.tried.dtypes[variant], batch.tried.dims[variant]
    return (
        (len(dtypes) < _ENLARGED_CASES and dtypes_of(original) not in dtypes)
        or (variant in DIM_VARIANTS and len(dims) < _ENLARGED_CASES and inputs.has_floats and inputs.dim not in dims)
        or int(case.id[-2:], 16) == 0
    )


def _situations(op: Operator, case_index: int) -> Sequence[str]:
    """Return the situations in which a case is called.

    The first case is called in all, the next in those of one call. Of the others, some are called
    in one each, in turn.
    """
    if op.is_random:
        return ()
    if case_index < _REPEATED_CASES:
        return SITUATIONS if case_index == 0 else SINGLE_CALL_SITUATIONS
    return (
        ()
        if case_index % _CASES_PER_SITUATION
        else (SINGLE_CALL_SITUATIONS[case_index // _CASES_PER_SITUATION % len(SINGLE_CALL_SITUATIONS)],)
    )


def _add_argument_variants(
    batch: Batch,
    op: Operator,
    original: BatchEntry,
    inputs: CallTensors,
    case_index: int,
    case_count: int,
    affordable: Callable[[], bool],
) -> None:
    """Place a case and its special variants with other values for some arguments."""
    if not all(map(is_moderate, inputs.tensors)):
        return
    integral = not any(t.is_floating_point() or t.is_complex() for t in inputs.tensors)
    special = [p for p in batch.entries if p.case is original.case and p.variant in _VARIANTS_WITH_ARGUMENTS]
    for basis in (original, *special):
        for name, value in _argument_values(op, original.call, case_index, case_count, always=basis.variant == "edges"):
            fraction = isinstance(value, float) and not value.is_integer()
            if basis.variant in _NONFINITE_VARIANTS and value == 0 and name != "beta":
                continue  # only for `beta` do the docs say that zero ignores NaN and infinities
            if (
                f"{ARGUMENT_PREFIX}{name}" not in aten_bugs.crashing_variants(op)
                and not (integral and fraction)
                and affordable()
            ):
                batch.add_argument_variant(basis, name, value)


def _argument_values(
    op: Operator, call: ReferenceCall, case_index: int, case_count: int, *, always: bool
) -> Iterator[tuple[str, Any]]:
    """Yield arguments with other values: a few per case, all of them over an operator's cases."""
    given = named_arguments(op, call)
    choices = [
        (a.name, value)
        for a in op.arguments
        for value in (other_values(a) if is_omittable(a) else other_required_values(a, given.get(a.name)))
    ]
    count = min(len(choices), -(-3 * len(choices) // max(case_count, 1)))
    if (
        case_index * count >= _TRIES_PER_ARGUMENT_VALUE * len(choices)
        and case_index % _CASES_PER_SITUATION
        and not always
    ):
        return
    for i in range(count):
        yield choices[(case_index * count + i) % len(choices)]


def _is_replayed(case: CaseRow, case_index: int, *, large: bool) -> bool:
    return case.phase is Phase.PERFORMANCE or (
        not large and (case_index < _REPLAYED_CASES or int(case.id[-1], 16) % 8 == 0)
    )


def _replayable(op: Operator) -> bool:
    return (
        not op.is_random
        and op.kind in (SchemaKind.FUNCTIONAL, SchemaKind.INPLACE)
        and op.base not in UNDEFINED_CONTENTS
    )


def combine_verdicts(group: Sequence[tuple[BatchEntry, Verdict]]) -> Verdict:
    """Return the verdict on a case from those on its variants: the first failure, if any."""
    (_, verdict), *others = group
    if not verdict.passed:
        return verdict
    tried: list[str] = []
    for entry, other in others:
        label = describe(entry.variant)
        if other.kind is VerdictKind.ERROR and entry.variant in LARGE_VARIANT_NAMES:  # such sizes are unproven
            verdict = replace(verdict, notes=(*verdict.notes, f"no answer {label}: {other.reason}"))
        elif other.kind is VerdictKind.UNSUPPORTED:
            verdict = replace(verdict, notes=(*verdict.notes, f"declines {label}"))
        elif not other.passed:
            return _variant_failure(entry, other, label)
        else:
            if entry.expect is Expect.RETURNS:
                verdict = replace(verdict, figures={**other.figures, **verdict.figures})
            tried += (
                [entry.variant]
                if entry.variant in _LISTED_VARIANTS or entry.variant.startswith(ARGUMENT_PREFIX)
                else []
            )
    return replace(verdict, figures={**verdict.figures, "variants": tried}) if tried else verdict


def _variant_failure(entry: BatchEntry, verdict: Verdict, label: str) -> Verdict:
    if entry.variant == "again":
        return Verdict(VerdictKind.CONTRACT, f"another answer to the same inputs the second time: {verdict.reason}")
    return replace(verdict, reason=f"{label}: {verdict.reason}")
