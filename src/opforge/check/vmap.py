"""Check that torch.vmap over an operator gives the same as a loop."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from opforge.check.differences import Expectation, first_difference
from opforge.check.findings import KIND_CONTENTS, Findings, failed, note, skipped
from opforge.check.operator_call import OperatorCall, flat_results, similar_tensor
from opforge.check.subject import Subject, attempt, describe_error

_BATCH = 3


def check(subject: Subject) -> Findings:
    """Yield a missing vmap rule, or a rule with other results than a loop."""
    calls = [call for call in subject.calls_with_dtypes(torch.float32) if call.tensors]
    if subject.mutates:
        yield skipped(
            "vmap",
            f"it writes to {', '.join(sorted(subject.written_arguments))}; torch.library has no vmap rules for "
            "operators that do",
        )
    elif not calls:
        yield skipped("vmap", "no call has a tensor")
    elif subject.is_random():
        yield skipped("vmap", "the operator is random: a loop gets other random numbers")
    elif not has_rule(subject):
        yield note(
            "vmap", "there is no vmap rule: torch.vmap and torch.func over it raise, or loop", rule_skeleton(subject)
        )
    else:
        for call in (calls[0], max(calls, key=lambda c: len(c.tensors))):
            findings = list(_compare_with_loop(subject, call))
            yield from findings
            if findings:
                return


def has_rule(subject: Subject) -> bool:
    if subject.definition is not None:
        return subject.definition._vmap_fn is not None  # noqa: SLF001  # torch has no public name for it
    return subject.has_kernel("FuncTorchBatched") or subject.is_composite


def rule_skeleton(subject: Subject) -> str:
    names = ", ".join(a.name for a in subject.arguments)
    return (
        f'torch.library.register_vmap("{subject.name.removesuffix(".default")}", rule) with def rule(info, in_dims, '
        f"{names}): "
        "move the batched dimension to the front, call the operator once on the larger tensors, and return (result, 0)"
    )


def _compare_with_loop(subject: Subject, call: OperatorCall) -> Findings:
    count = len(call.tensors)
    variants: dict[str, tuple[int | None, ...]] = {"all batched": (0,) * count}
    if count > 1:
        variants["the first batched"] = (0, *(None,) * (count - 1))
    variants["batched in the last dimension"] = (-1,) * count
    for label, dims in variants.items():
        if (fault := _describe_fault(subject, call, dims)) is not None:
            yield failed(
                "vmap",
                f"{label}: {fault}, for {subject.base_name}{call} in a batch of {_BATCH}",
                rule_skeleton(subject),
                KIND_CONTENTS,
            )
            return


def _describe_fault(subject: Subject, call: OperatorCall, dims: tuple[int | None, ...]) -> str | None:
    generator = torch.Generator().manual_seed(3)
    singles = [
        [similar_tensor(t, t.shape, generator) if d is not None else t for t, d in zip(call.tensors, dims, strict=True)]
        for _ in range(_BATCH)
    ]
    batched = [
        t if d is None else torch.stack([single[i] for single in singles], d)
        for i, (t, d) in enumerate(zip(call.tensors, dims, strict=True))
    ]
    remaining_dims = iter(dims)
    in_dims = pytree.tree_map(lambda v: next(remaining_dims) if isinstance(v, torch.Tensor) else None, call.args)

    def function(*args: Any) -> Any:
        value = subject.overload(*args, **call.kwargs)
        return tuple(flat_results(value))

    def run_singly(batch: OperatorCall) -> list[Any]:
        """Return the stacked results of the calls in a batch."""
        rows = [
            [t if d is None else t.select(d, i).contiguous() for t, d in zip(batch.tensors, dims, strict=True)]
            for i in range(_BATCH)
        ]
        columns = zip(*(subject.results(call.with_tensors(row)) for row in rows), strict=True)
        return [torch.stack(column) for column in columns]

    batched_call = call.with_tensors(batched)
    with torch.no_grad():
        expected = attempt(run_singly, batched_call)
        if isinstance(expected, Exception):  # it refuses these contents
            return None
        actual = attempt(torch.vmap(function, in_dims=in_dims), *batched_call.args)
        if isinstance(actual, Exception):
            return f"the rule raises {describe_error(actual)}"
    return first_difference(Expectation(expected, batched_call, run_singly), list(actual)) or None
