"""Check that torch.vmap over an operator gives the same as a loop."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from opforge.authoring.checking.calls import Call, contents_like, flat
from opforge.authoring.checking.comparing import differences
from opforge.authoring.checking.report import CONTENTS
from opforge.authoring.checking.subject import Findings, Subject, failed, note, short, skipped

_BATCH = 3


def check(subject: Subject) -> Findings:
    """Yield a missing vmap rule, or a rule with other results than a loop."""
    calls = [call for call in subject.first(torch.float32) if call.tensors]
    if subject.mutates:
        yield skipped(
            "vmap",
            f"it writes to {', '.join(sorted(subject.written))}; torch.library has no vmap rules for operators that do",
        )
    elif not calls:
        yield skipped("vmap", "no call has a tensor")
    elif subject.is_random():
        yield skipped("vmap", "the operator is random: a loop draws other numbers")
    elif not has_rule(subject):
        yield note("vmap", "there is no vmap rule: torch.vmap and torch.func over it raise, or loop", rule(subject))
    else:
        for call in (calls[0], max(calls, key=lambda c: len(c.tensors))):
            findings = list(_compared(subject, call))
            yield from findings
            if findings:
                return


def has_rule(subject: Subject) -> bool:
    if subject.definition is not None:
        return subject.definition._vmap_fn is not None  # noqa: SLF001  # torch has no public name for it
    return subject.has_kernel("FuncTorchBatched") or subject.composite


def rule(subject: Subject) -> str:
    names = ", ".join(a.name for a in subject.arguments)
    return (
        f'torch.library.register_vmap("{subject.name.removesuffix(".default")}", rule) with def rule(info, in_dims, {names}): '
        "move the batched dimension to the front, call the operator once on the larger tensors, and return (result, 0)"
    )


def _compared(subject: Subject, call: Call) -> Findings:
    count = len(call.tensors)
    variants: dict[str, tuple[int | None, ...]] = {"all batched": (0,) * count}
    if count > 1:
        variants["the first batched"] = (0, *(None,) * (count - 1))
    variants["batched in the last dimension"] = (-1,) * count
    for label, dims in variants.items():
        if (fault := _one(subject, call, dims)) is not None:
            yield failed(
                "vmap", f"{label}: {fault}, for {subject.base}{call} in a batch of {_BATCH}", rule(subject), CONTENTS
            )
            return


def _one(subject: Subject, call: Call, dims: tuple[int | None, ...]) -> str | None:
    generator = torch.Generator().manual_seed(3)
    singles = [
        [contents_like(t, t.shape, generator) if d is not None else t for t, d in zip(call.tensors, dims, strict=True)]
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
        return tuple(flat(value))

    batched_call = call.with_tensors(batched)
    with torch.no_grad():
        try:
            expected = [subject.results(single) for single in map(call.with_tensors, singles)]
        except Exception:  # noqa: BLE001  # it refuses these contents
            return None
        try:
            actual = torch.vmap(function, in_dims=in_dims)(*batched_call.args)
        except Exception as error:  # noqa: BLE001  # the rule may raise anything
            return f"the rule raises {short(error)}"
    stacked = [torch.stack(column) for column in zip(*expected, strict=True)]
    return differences(stacked, list(actual)) or None
