"""Bytes that operators must read and write, and operations they must compute, by family."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from opforge.judge.roofline.arithmetic import ArithmeticKind
from opforge.judge.roofline.costed_call import CostedCall, bytes_of_elements, has_nan
from opforge.judge.roofline.tensor_memory import distinct_bytes, distinct_elements
from opforge.ops.undefined import UNDEFINED_CONTENTS


@dataclass(frozen=True, slots=True)
class CallWork:
    """Bytes that a call must move, and operations it must compute."""

    read_bytes: int
    """Bytes of inputs that are needed."""
    flops: int
    kind: ArithmeticKind
    written_bytes: int | None = None
    """Bytes written; None for all of the results."""
    required_inputs: tuple[torch.Tensor, ...] = ()
    """Inputs of which every element must be read, whatever the contents."""
    requires_all_writes: bool = True
    """Whether every element of the results must be written, or at least read."""
    required_flops: int = 0
    """Operations that every known algorithm needs."""
    has_formula: bool = True


Formula = Callable[[CostedCall], CallWork]


def argument_bytes(call: CostedCall, names: Iterable[str]) -> int:
    """Return the distinct bytes of some arguments."""
    return distinct_bytes(call.tensors(*names))


def read_arguments(call: CostedCall) -> list[str]:
    """Return the arguments whose contents can matter."""
    unread = call.facts.ignores_self or (call.op.packet == "bernoulli" and "p" in call.bound_arguments)
    return [name for name in call.inputs if not (unread and name == "self")]


def writes_all(call: CostedCall) -> bool:
    """Whether every element of the results must be written."""
    zeros = call.facts.mostly_zeros and not call.written
    return not zeros and not call.facts.partly_written and call.op.base not in UNDEFINED_CONTENTS


def zero_work(call: CostedCall) -> CallWork:
    """No memory is read or written: views, shapes, memory with undefined contents."""
    return CallWork(0, 0, call.arithmetic_kind(), written_bytes=0, requires_all_writes=False)


def default_work(call: CostedCall) -> CallWork:
    """Read inputs and write results once; one operation for each element of the largest tensor."""
    names = read_arguments(call)
    sure_write = writes_all(call) and not call.in_place
    return CallWork(
        argument_bytes(call, names),
        call.max_elements,
        call.arithmetic_kind(),
        requires_all_writes=sure_write,
        has_formula=False,
    )


def pointwise(call: CostedCall) -> CallWork:
    """Elementwise operators, with broadcasting; expanded inputs are read once."""
    names = _needed_arguments(call, read_arguments(call))
    conditional = call.facts.conditionally_read
    read = argument_bytes(call, names)
    if call.op.packet == "where":  # for each element, one of the two is read
        read = argument_bytes(call, ["condition"]) + max((argument_bytes(call, [n]) for n in conditional), default=0)
    sure = [] if _independent_of_contents(call) else call.tensors(*(n for n in names if n not in conditional))
    flops = max((t.numel() for t in call.outputs), default=call.max_elements)
    overwritten = not conditional or not call.in_place
    return CallWork(
        read,
        flops,
        call.arithmetic_kind(),
        required_inputs=tuple(sure),
        requires_all_writes=writes_all(call) and overwritten,
    )


def _needed_arguments(call: CostedCall, names: list[str]) -> list[str]:
    """Return the arguments that are read: ``x ** 0`` and ``1 ** x`` need no tensor."""
    if call.op.packet not in ("pow", "float_power"):
        return names
    base, power = call.bound_arguments.get("self"), call.bound_arguments.get("exponent")
    known = (not torch.is_tensor(power) and power == 0) or (not torch.is_tensor(base) and base == 1)
    return [] if known else names


def _independent_of_contents(call: CostedCall) -> bool:
    """Whether dtypes or numbers among the arguments may determine the answer."""
    integral = not any(t.is_floating_point() or t.is_complex() for t in call.tensors(*call.inputs))
    zero = call.bound_arguments.get("alpha", 1) == 0 or (
        call.op.packet.startswith("addc") and call.bound_arguments.get("value") == 0
    )
    return zero or has_nan(call.bound_arguments.values()) or (integral and call.facts.dtype_decides)


def partial_copy(call: CostedCall) -> CallWork:
    """Moves of elements, perhaps to another dtype; some may be dropped, some repeated."""
    names = read_arguments(call)
    sources = call.tensors(*names)
    output_elements = max((t.numel() for t in call.outputs), default=0)
    read = bytes_of_elements(sources[0], output_elements) if len(sources) == 1 else distinct_bytes(sources)
    return CallWork(read, 0, call.arithmetic_kind(), requires_all_writes=writes_all(call))


def full_copy(call: CostedCall) -> CallWork:
    """Moves of all elements: copies, casts, concatenation, permutations."""
    names = read_arguments(call)
    sure = tuple(call.tensors(*names))
    return CallWork(
        distinct_bytes(sure), 0, call.arithmetic_kind(), required_inputs=sure, requires_all_writes=writes_all(call)
    )


def reduction(call: CostedCall) -> CallWork:
    """Reductions, scans and sorting: every element is read once."""
    names = read_arguments(call)
    tensors = call.tensors(*names)
    sure = () if _stops_early(call) else tuple(tensors)
    return CallWork(
        distinct_bytes(tensors),
        call.max_elements,
        call.arithmetic_kind(),
        required_inputs=sure,
        requires_all_writes=writes_all(call),
    )


def _stops_early(call: CostedCall) -> bool:
    """Whether the first elements may settle the answer."""
    integral = not any(t.is_floating_point() for t in call.tensors(*call.inputs))
    return call.facts.stops_early or (integral and call.facts.stops_early_on_integers)


def normalisation(flops_per_element: int) -> Formula:
    """Softmax and norms: some operations per element, and every element is read."""

    def formula(call: CostedCall) -> CallWork:
        names = read_arguments(call)
        first = call.tensors(names[0])
        flops = flops_per_element * first[0].numel()
        return CallWork(
            argument_bytes(call, names),
            flops,
            call.arithmetic_kind(),
            required_inputs=tuple(first),
            requires_all_writes=writes_all(call),
        )

    return formula


def norm_backward(call: CostedCall) -> CallWork:
    """Gradients of a norm: those of input and weight need the input, that of the bias does not."""
    mask = list(call.number("output_mask", 0) or [True])
    names = read_arguments(call) if any(mask[:2]) else ["grad_out"]
    sure = tuple(call.tensors("grad_out", *(["input"] if any(mask[:2]) else [])))
    return CallWork(
        argument_bytes(call, names),
        8 * call.max_elements,
        call.arithmetic_kind(),
        required_inputs=sure,
        requires_all_writes=writes_all(call),
    )


def gather(table: str, count: Callable[[CostedCall], int] | None = None) -> Formula:
    """Lookups of rows or elements in a table by index: only what is fetched is read."""

    def formula(call: CostedCall) -> CallWork:
        names = [name for name in read_arguments(call) if name != table]
        fetched = count(call) if count else call.outputs[0].numel()
        read = argument_bytes(call, names) + bytes_of_elements(call.tensors(table)[0], fetched)
        sure = tuple(call.tensors(*names))
        return CallWork(
            read, fetched, call.arithmetic_kind(), required_inputs=sure, requires_all_writes=writes_all(call)
        )

    return formula


def scatter(source: str, *, accumulates: bool = False) -> Formula:
    """Writes to indexed elements; with ``accumulates``, always to add to them.

    In place, only these elements are written, and read only to be added to.
    """

    def formula(call: CostedCall) -> CallWork:
        (target,) = call.tensors("self")
        sources = call.tensors(source)
        index = [n for n in read_arguments(call) if n not in ("self", source)]
        touched = _written_elements(call, target, sources)
        adds = accumulates or bool(call.bound_arguments.get("accumulate")) or "reduce" in call.bound_arguments
        target_bytes = distinct_bytes([target])
        touched_bytes = min(touched * target.element_size(), target_bytes)
        if call.in_place:
            target_read, write = (touched_bytes if adds else 0), touched_bytes
        else:
            target_read, write = target_bytes if adds else target_bytes - touched_bytes, None
        source_read = sum(bytes_of_elements(s, touched) for s in sources)
        sure = [*call.tensors(*index), *(s for s in sources if adds and distinct_elements(s) <= touched)]
        return CallWork(
            target_read + source_read + argument_bytes(call, index),
            touched if adds else 0,
            call.arithmetic_kind(),
            write,
            tuple(sure),
            requires_all_writes=writes_all(call) and not call.in_place,
        )

    return formula


def _written_elements(call: CostedCall, target: torch.Tensor, sources: list[torch.Tensor]) -> int:
    """Return how many elements are written; unknown for a boolean mask, so sources are counted."""
    packet = call.op.packet
    if packet.startswith("scatter") or packet == "put":
        return sum(t.numel() for t in call.tensors("index"))
    if packet == "index_fill":
        rows = call.tensors("index")[0].numel()
        length = target.shape[call.bound_arguments["dim"]] if target.dim() else 1
        return int(rows * (target.numel() // max(1, length)))
    count = max((s.numel() for s in sources), default=0)
    indices = call.tensors("indices")
    if indices and not any(i.dtype in (torch.bool, torch.uint8) for i in indices):
        shape = torch.broadcast_shapes(*(i.shape for i in indices))
        index_of_dim = call.bound_arguments["indices"]
        indexed_sizes = [n for n, i in zip(target.shape, index_of_dim, strict=False) if i is not None]
        count = max(count, math.prod(shape) * (target.numel() // max(1, math.prod(indexed_sizes))))
    return int(count)


def part_replacement(call: CostedCall) -> CallWork:
    """Replacement of part of a tensor by another tensor, in a copy."""
    (target,), sources = call.tensors("self"), call.tensors("src")
    kept = max(0, distinct_bytes([target]) - sum(s.numel() * target.element_size() for s in sources))
    return CallWork(
        kept + distinct_bytes(sources),
        0,
        call.arithmetic_kind(),
        required_inputs=tuple(sources),
        requires_all_writes=writes_all(call),
    )


def triangular(call: CostedCall) -> CallWork:
    """``tril`` and ``triu``: one triangle is read; in place, the other one is written."""
    (source,) = call.tensors("self")
    rows, columns = source.shape[-2:]
    shift = int(call.number("diagonal", 0))
    lower = sum(min(columns, max(0, row + shift + (call.op.packet == "tril"))) for row in range(rows))
    kept = lower if call.op.packet == "tril" else rows * columns - lower
    batch = source.numel() // max(1, rows * columns) * source.element_size()
    if call.in_place:
        return CallWork(
            0, 0, call.arithmetic_kind(), written_bytes=batch * (rows * columns - kept), requires_all_writes=False
        )
    return CallWork(min(batch * kept, distinct_bytes([source])), 0, call.arithmetic_kind(), requires_all_writes=False)
