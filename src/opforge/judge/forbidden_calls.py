"""ATen operators that a kernel may not call: the one it replaces, and its equivalents."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterable

import torch

from opforge.judge.facts import OPERATOR_FACTS, OperatorFacts
from opforge.judge.reference.aten import ReferenceCall
from opforge.ops import Operator, table
from opforge.ops.stems import stem
from opforge.ops.undefined import UNDEFINED_CONTENTS
from opforge.sandbox.guard.traps import CallCounter
from opforge.sandbox.guest.loader import aten_function


def _packets_by_operation(operations: Callable[[OperatorFacts], tuple[str, ...]]) -> dict[str, frozenset[str]]:
    packets: dict[str, set[str]] = {}
    for packet, facts in OPERATOR_FACTS.items():
        for operation in operations(facts):
            packets.setdefault(operation, set()).add(packet)
    return {operation: frozenset(names) for operation, names in packets.items()}


_EQUIVALENCE_GROUPS = _packets_by_operation(lambda facts: facts.operations)
"""Packets that are one operation under several names.

A kernel for one of them may call none of them, nor packets with the same stem."""
_GENERAL_PACKETS = _packets_by_operation(lambda facts: facts.generalises)
_GENERAL_OPERATIONS = {
    "matrix product": ("convolution", "attention", "distance", "inverse", "triangular solution"),
    "softmax": ("attention",),
}
"""Packets and operations of which an operation is a special case.

They may be built from the operation. A kernel for it may not call them."""

_MATRIX_PRODUCT_NAME = re.compile(r"(?:^|_)(?:mm|bmm|addmm|matmul)(?:_|$)")

_HELPERS = frozenset({
    "_to_copy", "clone", "copy_", "copy", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided",
    "fill_", "zero_", "zeros", "full", "ones", "zeros_like", "ones_like", "full_like", "scalar_tensor", "lift_fresh",
    "_local_scalar_dense", "resize_", "constant_pad_nd", "arange",
})  # fmt: skip


def forbidden_operators(served: Iterable[Operator]) -> list[str]:
    """Return the names of all operators that a kernel serving these may not call.

    Composite equivalents are left out: they call other operators, which are caught.
    """
    names: dict[str, None] = {}
    for op in served:
        if op.base not in UNDEFINED_CONTENTS:
            names.update(dict.fromkeys(table().packet(op.packet)))
            equivalents = (name for packet in equivalent_packets(op.packet) for name in table().packet(packet))
            names.update(dict.fromkeys(name for name in equivalents if not _is_composite(name)))
    return list(names)


@functools.cache
def equivalent_packets(packet: str) -> tuple[str, ...]:
    """Return the packets that are the same operation under another name, or generalise it."""
    stems = packets_by_stem()
    related = {packet, *stems.get(stem(packet), ())}
    groups = [
        operation for operation, group in _EQUIVALENCE_GROUPS.items() if any(_group_contains(group, p) for p in related)
    ]
    for operation in groups:
        related |= {*_EQUIVALENCE_GROUPS[operation], *_GENERAL_PACKETS.get(operation, ())}
        related.update(*(_EQUIVALENCE_GROUPS[general] for general in _GENERAL_OPERATIONS.get(operation, ())))
        if operation == "matrix product":
            related |= {p for packets in stems.values() for p in packets if _MATRIX_PRODUCT_NAME.search(p)}
    return tuple(sorted({p for name in related for p in (name, *stems.get(stem(name), ()))} - {packet}))


@functools.cache
def packets_by_stem() -> dict[str, tuple[str, ...]]:
    """Return the packets of the table, grouped by stem."""
    by_stem: dict[str, dict[str, None]] = {}
    for op in table():
        by_stem.setdefault(stem(op.packet), {})[op.packet] = None
    return {name: tuple(packets) for name, packets in by_stem.items()}


def _group_contains(group: frozenset[str], packet: str) -> bool:
    return packet in group or stem(packet) in {stem(member) for member in group}


def _is_composite(name: str) -> bool:
    op = table().get(name)
    return op is None or op.composite


def wrapped_operators(op: Operator, call: ReferenceCall) -> list[str]:
    """Return the operators of the only packet, besides helpers, that a composite one calls.

    They are forbidden too.
    """
    if not op.composite:
        return []
    args, kwargs, _inputs = call.build_arguments()
    # If it raises, its calls before the error suffice.
    with contextlib.suppress(Exception), torch.no_grad(), CallCounter() as listing:
        aten_function(op.name)(*args, **kwargs)
    parts = {name.partition(".")[0] for name in listing.calls}
    packets = [packet for packet in sorted(parts - _HELPERS) if not _is_view(packet)]
    return list(table().packet(packets[0])) if len(packets) == 1 else []


def describe(op: Operator, called: list[str]) -> str:
    """Say which forbidden call a kernel made, and which option permits it."""
    return f"{_describe(op, called)} (--allow-fallback permits it)"


def _describe(op: Operator, called: list[str]) -> str:
    first = called[0]
    packet = first.partition(".")[0]
    if packet in (op.packet, op.base) or packet.rstrip("_") == op.packet:
        return f"calls aten::{first}, the operator that it replaces"
    for operation, group in _EQUIVALENCE_GROUPS.items():
        if _group_contains(group, packet.rstrip("_")) and _group_contains(group, op.packet):
            return f"calls aten::{first}, ATen's own {operation}, to replace {op.name}"
    if packet.rstrip("_") in equivalent_packets(op.packet):
        return f"calls aten::{first}, which computes the same in ATen, to replace {op.name}"
    if "::" in first:
        return f"calls {first}, torch's own implementation outside aten"
    return f"calls aten::{first}, which is what {op.name} is in ATen"


def _is_view(packet: str) -> bool:
    """Whether an operator only returns a view of its input."""
    operators = [table().get(name) for name in table().packet(packet)]
    return any(
        op is not None and any(r.alias and not r.writes for r in op.returns) and not op.mutates for op in operators
    )
