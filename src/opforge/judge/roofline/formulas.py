"""Bytes that operators must read and write, and operations they must compute, by family."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from opforge.judge.roofline.arithmetic import ArithmeticKind
from opforge.judge.roofline.contents import (
    chosen_elements,
    distinct_along,
    distinct_places,
    distinct_values,
    has_contents,
)
from opforge.judge.roofline.costed_call import CostedCall, bytes_of_elements, has_nan, share_of_bytes
from opforge.judge.roofline.tensor_memory import distinct_bytes, distinct_elements
from opforge.judge.roofline.windows import per_dimension, window_use
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
    unread = {*call.facts.unread, *(["self"] if call.facts.ignores_self or call.number("beta", 1) == 0 else [])}
    if call.op.packet == "bernoulli" and "p" in call.bound_arguments:
        unread.add("self")
    if call.op.packet in ("native_dropout", "dropout") and call.number("p", 0.5) == 1:
        unread.add("input")
    return [name for name in call.inputs if name not in unread]


def writes_all(call: CostedCall) -> bool:
    """Whether every element of the results must be written."""
    zeros = call.facts.mostly_zeros and not call.written
    return not zeros and not call.facts.partly_written and call.op.base not in UNDEFINED_CONTENTS


def zero_work(call: CostedCall) -> CallWork:
    """No memory is read or written: views, shapes, memory with undefined contents."""
    return CallWork(0, 0, call.arithmetic_kind(), written_bytes=0, requires_all_writes=False)


_MOVES_NOTHING_TAG = "inplace_view"
_MOVE_NOTHING = ("set", "set_data", "resize", "resize_as", "as_strided_", "detach")
"""Operators that change only the geometry of a tensor."""


def default_work(call: CostedCall) -> CallWork:
    """Read inputs and write results once; one operation for each element of the largest of them."""
    if _MOVES_NOTHING_TAG in call.op.tags or call.op.packet in _MOVE_NOTHING:
        return zero_work(call)
    names = read_arguments(call)
    sure_write = writes_all(call) and not call.in_place
    return CallWork(
        argument_bytes(call, names),
        _most_elements(call, names),
        call.arithmetic_kind(),
        requires_all_writes=sure_write,
        has_formula=False,
    )


def _most_elements(call: CostedCall, names: Iterable[str]) -> int:
    """Return the elements of the largest result or argument; what is repeated in memory counts once."""
    sizes = [*(t.numel() for t in call.outputs), *(distinct_elements(t) for t in _strided(call.tensors(*names)))]
    return max(sizes, default=0)


def _strided(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [t for t in tensors if t.layout is torch.strided]


def pointwise(call: CostedCall) -> CallWork:
    """Elementwise operators, with broadcasting; expanded inputs are read once."""
    names = _needed_arguments(call, read_arguments(call))
    conditional = call.facts.conditionally_read
    read = argument_bytes(call, names)
    written = None
    if call.op.packet in ("where", "masked_fill"):
        read = _chosen_bytes(call)
        if call.in_place:
            true = chosen_elements(call.tensors("mask")[0])
            result, mask = call.outputs[0], call.tensors("mask")[0]
            written = bytes_of_elements(result, int(result.numel() * (true or 0) / max(1, mask.numel())))
    sure = [] if _independent_of_contents(call) else call.tensors(*(n for n in names if n not in conditional))
    flops = _most_elements(call, [])
    if inputs := call.tensors(*names):  # of equal elements there are equal results
        flops = min(flops, math.prod(distinct_elements(t) for t in inputs)) if len(inputs) == 1 else flops
    overwritten = not conditional or not call.in_place
    return CallWork(
        read,
        flops,
        call.arithmetic_kind(),
        written,
        required_inputs=tuple(sure),
        requires_all_writes=writes_all(call) and overwritten,
    )


def _chosen_bytes(call: CostedCall) -> int:
    """Return the bytes read where a condition chooses, for each element, one of two sources."""
    (condition,) = call.tensors("condition", "mask")
    true = chosen_elements(condition)
    share = None if true is None else true / max(1, condition.numel())
    chosen = [] if call.in_place else call.tensors("self")
    others = call.tensors("other", "value")
    if call.op.packet == "masked_fill":
        chosen, others = others, chosen
    result = max((t.numel() for t in call.outputs), default=0)
    reads = [
        sum(bytes_of_elements(t, 0 if part is None else int(result * part)) for t in tensors)
        for tensors, part in ((chosen, share), (others, None if share is None else 1 - share))
    ]
    return distinct_bytes([condition]) + sum(reads)


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
    if call.facts.stops_early:
        answers = max((t.numel() for t in call.outputs), default=1)
        read = sum(bytes_of_elements(t, answers) for t in tensors)
        return CallWork(read, answers, call.arithmetic_kind(), requires_all_writes=writes_all(call))
    return CallWork(
        distinct_bytes(tensors),
        _most_elements(call, names),
        call.arithmetic_kind(),
        required_inputs=sure,
        requires_all_writes=writes_all(call),
    )


def _stops_early(call: CostedCall) -> bool:
    """Whether the first elements may settle the answer."""
    integral = not any(t.is_floating_point() for t in call.tensors(*call.inputs))
    return call.facts.stops_early or (integral and call.facts.stops_early_on_integers)


def normalisation(flops_per_element: int, *, per_parameter: int = 0) -> Formula:
    """Softmax and norms: some operations per element, and every element is read.

    ``per_parameter`` more are needed for each of weight and bias, where they do not fold into one factor.
    """

    def formula(call: CostedCall) -> CallWork:
        names = read_arguments(call)
        first = call.tensors(names[0])
        flops = (flops_per_element + per_parameter * len(call.tensors("weight", "bias"))) * first[0].numel()
        return CallWork(
            argument_bytes(call, names),
            flops,
            call.arithmetic_kind(),
            required_inputs=tuple(first),
            requires_all_writes=writes_all(call),
        )

    return formula


def batch_norm(call: CostedCall) -> CallWork:
    """Batch norms: one factor and one addend for each channel; statistics only where they are asked for."""
    names = read_arguments(call)
    first = call.tensors(names[0])
    inference = "no_training" in call.op.packet or "no_update" in call.op.packet
    trains = not inference and any(call.number(n, 0) for n in ("training", "train", "use_input_stats"))
    trains = trains or call.op.packet in ("_batch_norm_with_update", "_native_batch_norm_legit_functional")
    return CallWork(
        argument_bytes(call, names),
        (5 if trains else 2) * first[0].numel(),
        call.arithmetic_kind(),
        None if trains or call.written_by_out else distinct_bytes(call.new_results),
        required_inputs=tuple(first),
        requires_all_writes=writes_all(call) and trains,
    )


def norm_backward(call: CostedCall) -> CallWork:
    """Gradients of a norm: that of the input needs it, and the weight; that of the bias needs neither.

    Without statistics of its own, the gradient of the input does not need the input either.
    """
    mask = call.bound_arguments.get("output_mask", [True, True, True])
    wants_input, wants_weight, wants_bias = (*mask, False)[:3]
    trains = bool(call.bound_arguments.get("train", call.bound_arguments.get("update", True)))
    needs_input = wants_weight or (wants_input and trains)
    grad = [n for n in call.inputs if n.startswith("grad_out")]
    statistics = _SAVED_STATISTICS if trains else ("running_mean", "running_var")[not needs_input :]
    names = [
        *grad,
        *(["input"] if needs_input else []),
        *(["weight"] if wants_input else []),
        *(statistics if needs_input or wants_input else ()),
    ]
    flops = (4 if trains else 1) * wants_input + 2 * wants_weight + wants_bias
    return CallWork(
        argument_bytes(call, names),
        flops * max((t.numel() for t in call.tensors(*grad)), default=0),
        call.arithmetic_kind(),
        required_inputs=tuple(call.tensors(*grad, *(["input"] if needs_input else []))),
        requires_all_writes=writes_all(call),
    )


_SAVED_STATISTICS = ("mean", "rstd", "save_mean", "save_invstd", "save_var")


def gather(table: str, count: Callable[[CostedCall], int] | None = None) -> Formula:
    """Lookups of rows or elements in a table by index: only what is fetched is read, and once."""

    def formula(call: CostedCall) -> CallWork:
        names = [name for name in read_arguments(call) if name != table]
        fetched = count(call) if count else call.outputs[0].numel()
        read = argument_bytes(call, names) + bytes_of_elements(call.tensors(table)[0], fetched)
        sure = tuple(call.tensors(*names))
        return CallWork(
            read, fetched, call.arithmetic_kind(), required_inputs=sure, requires_all_writes=writes_all(call)
        )

    return formula


def fetched_rows(table: str, indices: str) -> Callable[[CostedCall], int]:
    """Count the elements of the rows that indices choose, each row once."""

    def count(call: CostedCall) -> int:
        (source,), (index,) = call.tensors(table), call.tensors(indices)
        dim = call.number("dim", 0) if table == "self" else 0
        length = source.shape[dim] if source.dim() else 1
        rows = distinct_values(index, length)
        row_elements = source.numel() // max(1, length)
        if rows is not None and "per_sample_weights" in (a.name for a in call.op.arguments):
            rows = max(0, rows - 1)  # the row that pads a bag is skipped
        return int((min(1, index.numel()) if rows is None else rows) * row_elements)

    return count


def fetched_along(call: CostedCall) -> int:
    """Count the elements that indices choose along a dimension, each once."""
    (source,), (index,) = call.tensors("self"), call.tensors(*_named(call, "index", "indices"))
    dim = call.bound_arguments.get("dim")
    if dim is None:
        found = distinct_values(index, source.numel())
        return min(1, index.numel()) if found is None else found
    length = source.shape[dim] if source.dim() else 1
    found = distinct_along(index, dim, length)
    lines = index.numel() // max(1, index.shape[dim] if index.dim() else 1)
    return int(lines if found is None else found)


def _named(call: CostedCall, *names: str) -> list[str]:
    return [name for name in names if name in call.bound_arguments]


def fetched_places(call: CostedCall) -> int:
    """Count the elements that several indices choose together, each once."""
    (source,) = call.tensors("self")
    places = distinct_places(source.shape, call.bound_arguments["indices"])
    if places is None:
        return int(min(1, call.outputs[0].numel()))
    distinct, _, elements = places
    return int(distinct * elements)


def class_loss(call: CostedCall) -> CallWork:
    """The loss of chosen classes: of each row one element, of the weights those of chosen classes."""
    (source,), (target,), weight = call.tensors("self"), call.tensors("target"), call.tensors("weight")
    rows, classes = _chosen_classes(call, target)
    return CallWork(
        distinct_bytes([target]) + bytes_of_elements(source, rows) + sum(bytes_of_elements(w, classes) for w in weight),
        rows,
        call.arithmetic_kind(),
        required_inputs=(target,),
        requires_all_writes=writes_all(call),
    )


def class_loss_backward(call: CostedCall) -> CallWork:
    """Its gradient: one element of each row of new zeros. The scores are not read."""
    (target,), weight = call.tensors("target"), call.tensors("weight")
    rows, classes = _chosen_classes(call, target)
    grad, total = call.tensors("grad_output"), call.tensors("total_weight")
    read = distinct_bytes([target]) + sum(bytes_of_elements(w, classes) for w in weight)
    read += sum(bytes_of_elements(g, rows) for g in grad) + (distinct_bytes(total) if _is_mean(call) else 0)
    return CallWork(read, rows, call.arithmetic_kind(), required_inputs=(target,), requires_all_writes=writes_all(call))


def _is_mean(call: CostedCall) -> bool:
    return bool(call.number("reduction", 1) == 1)


def _chosen_classes(call: CostedCall, target: torch.Tensor) -> tuple[int, int]:
    """Return how many rows are not ignored, and how many classes they choose."""
    if not has_contents(target):
        return 0, 0
    chosen = target[target != call.number("ignore_index", -100)]
    return chosen.numel(), torch.unique(chosen).numel()


def embedding_backward(call: CostedCall) -> CallWork:
    """The gradient of an embedding: that of padding is not read."""
    (grad,), (indices,) = call.tensors("grad_output"), call.tensors("indices")
    kept = 0
    if has_contents(indices):
        kept = int(torch.count_nonzero(indices != call.number("padding_idx", -1)))
    share = kept / max(1, indices.numel())
    return CallWork(
        distinct_bytes([indices]) + share_of_bytes(grad, share),
        int(grad.numel() * share),
        call.arithmetic_kind(),
        required_inputs=(indices,),
        requires_all_writes=writes_all(call),
    )


def scatter(source: str, *, accumulates: bool = False) -> Formula:
    """Writes to indexed elements; with ``accumulates``, always to add to them.

    In place, only these elements are written, and read only to be added to. Of several writes to one place without
    addition, one is needed.
    """

    def formula(call: CostedCall) -> CallWork:
        (target,) = call.tensors("self")
        sources = call.tensors(source)
        index = [n for n in read_arguments(call) if n not in ("self", source)]
        fewest, most, uses = _written_elements(call, target, sources)
        adds = accumulates or bool(call.bound_arguments.get("accumulate")) or "reduce" in call.bound_arguments
        reads_target = adds and bool(call.bound_arguments.get("include_self", True))
        target_bytes = distinct_bytes([target])
        if call.in_place:
            write: int | None = bytes_of_elements(target, fewest)
            target_read = bytes_of_elements(target, fewest) if reads_target else 0
        else:
            kept = max(0, target_bytes - most * target.element_size())
            target_read, write = target_bytes if reads_target else kept, None
        source_read = sum(bytes_of_elements(s, uses if adds else fewest) for s in sources)
        sure = [*call.tensors(*index), *(s for s in sources if adds and distinct_elements(s) <= uses)]
        return CallWork(
            target_read + source_read + argument_bytes(call, index),
            uses if adds else 0,
            call.arithmetic_kind(),
            write,
            tuple(sure),
            requires_all_writes=writes_all(call) and not call.in_place,
        )

    return formula


def _written_elements(call: CostedCall, target: torch.Tensor, sources: list[torch.Tensor]) -> tuple[int, int, int]:
    """Return how many elements are written, at least and at most, and how many writes there are.

    A place may be written several times. Indices without contents leave the number open.
    """
    packet, dim = call.op.packet, int(call.number("dim", 0))
    index = call.tensors("index")
    length = target.shape[dim] if target.dim() else 1
    if packet.startswith("scatter"):
        uses = index[0].numel()
        found = distinct_along(index[0], dim, length)
        least = uses // max(1, index[0].shape[dim] if index[0].dim() else 1)
    elif packet == "put":
        uses = index[0].numel()
        found, least = distinct_values(index[0], target.numel()), min(1, uses)
    elif index:  # rows
        row = target.numel() // max(1, length)
        uses = index[0].numel() * row
        rows = distinct_values(index[0], length)
        found, least = None if rows is None else rows * row, min(row, uses)
    else:
        places = distinct_places(target.shape, call.bound_arguments["indices"])
        if places is None:
            return 0, target.numel(), max((s.numel() for s in sources), default=0)
        distinct, chosen, elements = places
        uses, found, least = chosen * elements, distinct * elements, 0
    return (least, uses, uses) if found is None else (found, found, uses)


def masked_scatter(call: CostedCall) -> CallWork:
    """Writes where a mask is true, from the first elements of a source."""
    (target,), (mask,), sources = call.tensors("self"), call.tensors("mask"), call.tensors("source")
    true = chosen_elements(mask)
    written = 0 if true is None else int(true / max(1, mask.numel()) * target.numel())
    kept = 0 if call.in_place or true is None else bytes_of_elements(target, target.numel() - written)
    return CallWork(
        distinct_bytes([mask]) + kept + sum(bytes_of_elements(s, written) for s in sources),
        0,
        call.arithmetic_kind(),
        bytes_of_elements(target, written) if call.in_place else None,
        (mask,),
        requires_all_writes=writes_all(call) and not call.in_place,
    )


def fused_step(call: CostedCall) -> CallWork:
    """One step of an optimizer over lists: gradients are written only to unscale them."""
    if call.tensors("found_inf"):  # a step may be skipped
        return CallWork(argument_bytes(call, ["found_inf"]), 0, call.arithmetic_kind(), 0, requires_all_writes=False)
    first = bool(call.bound_arguments.get("is_first_step", False))
    names = [n for n in read_arguments(call) if not (first and n == "momentum_buffer_list")]
    scaled = call.tensors("grad_scale")
    written = [a.name for a in call.op.arguments if a.writes and (scaled or a.name != "grads")]
    return CallWork(
        argument_bytes(call, names),
        _most_elements(call, names),
        call.arithmetic_kind(),
        argument_bytes(call, written),
        requires_all_writes=False,
    )


def pooling(call: CostedCall) -> CallWork:
    """Pooling with windows: what lies between windows is not read."""
    (source,), result = call.tensors("self"), call.outputs[0]
    size = call.bound_arguments["kernel_size"]
    dimensions = int(call.op.packet[call.op.packet.index("pool") + 4])
    taps = per_dimension(size, dimensions, 1)
    stride = call.bound_arguments.get("stride")
    steps = taps if stride is None or (isinstance(stride, list | tuple) and not stride) else stride
    use = window_use(
        source.shape[-dimensions:],
        result.shape[-dimensions:],
        taps,
        per_dimension(steps, dimensions, 1),
        per_dimension(call.bound_arguments.get("padding"), dimensions, 0),
        per_dimension(call.bound_arguments.get("dilation"), dimensions, 1),
    )
    read = share_of_bytes(source, use.element_share)
    return CallWork(read, result.numel(), call.arithmetic_kind(), requires_all_writes=writes_all(call))


def strided_copy(call: CostedCall) -> CallWork:
    """A copy of any geometry over a tensor's memory; what is repeated is read once."""
    (source,) = call.tensors("self")
    size, stride, offset = (call.bound_arguments.get(n) for n in ("size", "stride", "storage_offset"))
    view = source.as_strided(size, stride, offset)
    read = min(distinct_bytes([view]), source.untyped_storage().nbytes())
    return CallWork(read, 0, call.arithmetic_kind(), requires_all_writes=writes_all(call))


def _scales(call: CostedCall) -> list[float | None]:
    """Return the scales of the dimensions, where a caller gave some; they may leave the last elements out."""
    given = call.bound_arguments.get("scale_factors")
    if given:
        return list(given)
    return [call.bound_arguments[n] for n in _named(call, "scales", "scales_d", "scales_h", "scales_w")]


def resampling(taps: int) -> Formula:
    """Resampling: each result needs a few elements along each dimension; smaller results leave elements out."""

    def formula(call: CostedCall) -> CallWork:
        (source,), result = call.tensors(*_named(call, "self", "input")), call.outputs[0]
        scales = _scales(call) or [None] * (source.dim() - 2)
        share = math.prod(
            min(1.0, (taps * (after - 1) + 1) / before, (1.0 if scale is None else ((after - 1) // scale + 1) / before))
            if before
            else 0.0
            for before, after, scale in zip(source.shape[2:], result.shape[2:], scales, strict=True)
        )
        return CallWork(
            share_of_bytes(source, share),
            result.numel(),
            call.arithmetic_kind(),
            requires_all_writes=writes_all(call),
        )

    return formula


def diagonal_elements(call: CostedCall) -> CallWork:
    """Sum of a diagonal, or writes to it."""
    (source,) = call.tensors("self")
    length = min(source.shape, default=0)
    if call.in_place:
        return CallWork(0, 0, call.arithmetic_kind(), bytes_of_elements(source, length), requires_all_writes=False)
    return CallWork(
        bytes_of_elements(source, length), length, call.arithmetic_kind(), requires_all_writes=writes_all(call)
    )


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
