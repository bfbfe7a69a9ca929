"""Hostile variants of a call's tensors: layouts or values that careless kernels get wrong.

A variant takes the tensors of a call and returns others. The judge finds out whether ATen accepts the
varied call. Memory between and around the elements of a varied tensor is poisoned, so that a
kernel that reads it is wrong. The poison is NaN, infinity, or the tensor's own elements in another
order, which pass every range check of an index.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from opforge.cases.tensors import owned_copy, to_float64
from opforge.cases.variant_shapes import (
    LARGE_VARIANT_NAMES,
    LONG_MASKED,
    ONE_TENSOR_TWICE,
    SIXTEENFOLD,
    enlarged_shapes,
)
from opforge.runtime.layouts import OFFSET, layout_names


@dataclass(frozen=True, slots=True)
class CallTensors:
    """The tensors of a call, and how the operator uses them."""

    tensors: tuple[torch.Tensor, ...]
    written: frozenset[int] = frozenset()
    """Indices of the tensors that the operator writes to."""
    write_only: frozenset[int] = frozenset()
    """Indices of the tensors whose contents do not matter, such as ``out``."""
    pointwise: bool = False
    may_hold_indices: bool = False
    """Whether integers may be positions, which must stay in range."""
    may_hold_counts: bool = False
    """Whether integers may be counts or sizes, so that results grow with them."""
    numbers: tuple[float, ...] = ()
    """The numbers among the call's other arguments."""
    index_tensors: frozenset[int] = frozenset()
    """Indices of the tensors with positions that the operator checks."""
    dim: int = -1
    """The dimension argument of the call."""
    seed: int = 0

    @property
    def has_floats(self) -> bool:
        """Whether any tensor is floating-point."""
        return any(t.is_floating_point() for t in self.tensors)


MakeVariant = Callable[[CallTensors], "list[torch.Tensor] | None"]
"""Returns the varied tensors, or None if nothing would change."""


Relayout = Callable[[torch.Tensor, "float | None"], "torch.Tensor | None"]
"""Lays out a tensor's elements anew, surrounded by a poison or its own elements.

Returns None if nothing would change.
"""
_POISONS = (math.nan, None, math.inf)
EMPTY_SHAPE = (0,)
"""Shape of a tensor that the operator resizes."""
_IMAGE_RANK = 4
_DRAWN_ELEMENTS = (8191, 4093)
"""Lengths of the two random sequences that large variants combine.

Both are prime, so a combination repeats only after 33 million elements.
"""
_DRAWN_CHOICES = 2039
"""Length of the random sequence that chooses between the two for integers. It is prime too."""
_MASKED_ELEMENTS = 300
"""Longer than the first block of a row, and a small part of the row."""


def _layout_variant(name: str, change: Relayout) -> MakeVariant:
    """Make a variant from a change of one tensor's geometry that keeps its elements.

    Tensors too small for the layout stay as they are.
    """

    def variant(inputs: CallTensors) -> list[torch.Tensor] | None:
        varied = [change(t, _POISONS[inputs.seed % len(_POISONS)]) for t in inputs.tensors]
        varied = [m if m is not None and name in (OFFSET, *layout_names(m.shape, m.stride())) else None for m in varied]
        if all(m is None for m in varied):
            return None
        return [t if m is None else m for t, m in zip(inputs.tensors, varied, strict=True)]

    return variant


def _filled(base: torch.Tensor, view: torch.Tensor, source: torch.Tensor, poison: float | None) -> torch.Tensor:
    """Poison a block of memory, write a tensor's elements into a view of it; return the view."""
    if poison is not None and (base.is_floating_point() or base.is_complex()):
        base.fill_(poison)
    else:
        flat, elements = base.view(-1), source.reshape(-1)
        flat.copy_(elements[torch.arange(len(flat), 0, -1) % len(elements)])
        if base.dtype == torch.bool:
            flat.logical_not_()
    view.copy_(source)
    return view


def _transposed(t: torch.Tensor, poison: float | None) -> torch.Tensor | None:
    if t.dim() < 2 or t.numel() < 2:
        return None
    base = torch.empty(t.shape[::-1], dtype=t.dtype)
    return _filled(base, base.permute(*reversed(range(t.dim()))), t, poison)


def _strided(t: torch.Tensor, poison: float | None) -> torch.Tensor | None:
    if t.dim() < 1 or t.numel() < 2:
        return None
    base = torch.empty((*t.shape[:-1], 2 * t.shape[-1] + (t.dim() > 1)), dtype=t.dtype)  # no constant step across rows
    return _filled(base, base[..., : 2 * t.shape[-1] : 2], t, poison)


def _pitched(t: torch.Tensor, poison: float | None) -> torch.Tensor | None:
    if t.dim() < 2 or t.numel() < 2:
        return None
    base = torch.empty((t.shape[0], *(size + 3 for size in t.shape[1:])), dtype=t.dtype)
    return _filled(base, base[(slice(None), *(slice(size) for size in t.shape[1:]))], t, poison)


def _permuted(t: torch.Tensor, poison: float | None) -> torch.Tensor | None:
    if t.dim() < 2 or t.numel() < 2:
        return None
    order = [*reversed(range(t.dim()))]
    pitched = _pitched(t.permute(order), poison)
    return None if pitched is None else pitched.permute(order)


def _offset(t: torch.Tensor, poison: float | None) -> torch.Tensor | None:
    if t.numel() == 0:
        return None
    base = torch.empty(t.numel() + 8, dtype=t.dtype)
    return _filled(base, base[5 : 5 + t.numel()].view(t.shape), t, poison)


def _channels_last(t: torch.Tensor, poison: float | None) -> torch.Tensor | None:
    del poison  # there is no memory around the elements
    if t.dim() not in (4, 5) or t.numel() < 2:
        return None
    relaid = t.contiguous(memory_format=torch.channels_last if t.dim() == 4 else torch.channels_last_3d)
    return None if relaid.stride() == t.stride() else relaid.clone()


def _expansion_variant(name: str, dimension: int) -> MakeVariant:
    """Make a variant that expands one dimension: the first or last one with more than one element."""

    def variant(inputs: CallTensors) -> list[torch.Tensor] | None:
        varied, changed = list(inputs.tensors), False
        for i, t in enumerate(inputs.tensors):
            wide = [d for d, size in enumerate(t.shape) if size > 1]
            if not wide or t.numel() < 2 or i in inputs.written or not (t.is_floating_point() or t.is_complex()):
                continue
            expanded = t.narrow(wide[dimension], 0, 1).contiguous().expand(t.shape)
            if name in layout_names(expanded.shape, expanded.stride()):
                varied[i], changed = expanded, True
        return varied if changed else None

    return variant


def _empty(inputs: CallTensors) -> list[torch.Tensor] | None:
    first = next((t for t in inputs.tensors if t.dim() and t.numel()), None)
    if first is None:
        return None
    size = first.shape[0]
    return [t.narrow(0, 0, 0).clone() if t.dim() and t.shape[0] == size else t for t in inputs.tensors]


def _zero_dim(inputs: CallTensors) -> list[torch.Tensor] | None:
    if not any(t.dim() for t in inputs.tensors) or not all(t.numel() for t in inputs.tensors):
        return None
    return [t.reshape(-1)[0].clone() if t.dim() else t for t in inputs.tensors]


def _one_transposed(inputs: CallTensors) -> list[torch.Tensor] | None:
    """Transpose only the last tensor, so that the strides of the tensors differ."""
    varied = list(inputs.tensors)
    for i in reversed(range(1, len(varied))):
        other = None if i in inputs.write_only else _transposed(varied[i], _POISONS[inputs.seed % len(_POISONS)])
        if other is not None:
            varied[i] = other
            return varied
    return None


def _broadcast(inputs: CallTensors) -> list[torch.Tensor] | None:
    """Shrink the last read-only tensor to size 1 in its last dimension, so that it is broadcast."""
    given = inputs.tensors
    if not inputs.pointwise or len(given) < 2:
        return None
    for i in reversed(range(len(given))):
        t = given[i]
        dimension = next((d for d in reversed(range(t.dim())) if t.shape[d] > 1), None)
        wide = any(o is not t and o.shape == t.shape for o in given)
        if dimension is not None and wide and i not in inputs.written and i not in inputs.write_only:
            return [*given[:i], t.narrow(dimension, 0, 1).clone(), *given[i + 1 :]]
    return None


def _one_tensor_twice(inputs: CallTensors) -> list[torch.Tensor] | None:
    """Use one tensor for two similar arguments, as in ``x.mul_(x)`` and ``exp(x, out=x)``."""
    if not inputs.pointwise:
        return None  # many other operators have no defined result for that
    read = [i for i, t in enumerate(inputs.tensors) if i not in inputs.written and t.numel()]
    for i in read:
        for j in (*sorted(inputs.written), *(other for other in read if other > i)):
            one, other = inputs.tensors[i], inputs.tensors[j]
            if (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride()):
                return [*inputs.tensors[:j], one, *inputs.tensors[j + 1 :]]
    return None


def _magnitudes(inputs: CallTensors) -> list[torch.Tensor] | None:
    """Insert numbers of all magnitudes between the usual ones and the ends of the range."""
    if not inputs.pointwise:
        return None

    def choose(dtype: torch.dtype) -> Sequence[float]:
        top = math.log(torch.finfo(dtype).max)
        return [sign * math.exp(share * top) for share in (0.1, 0.3, 0.5, 0.7, 0.9) for sign in (1, -1)]

    return _value_variant(choose, every=2)(inputs)


def _large_variant(variant: str) -> MakeVariant:
    """Make a variant with many more elements, interpolated between the existing ones."""

    def make(inputs: CallTensors) -> list[torch.Tensor] | None:
        given = inputs.tensors
        if variant == LONG_MASKED and (inputs.pointwise or not _float_tensors(inputs)):
            return None
        full = [i for i in range(len(given)) if inputs.pointwise or i not in inputs.write_only]
        shapes = [tuple(given[i].shape) for i in full]
        indexed = inputs.may_hold_indices and any(_is_integer(given[i]) for i in full)
        alike = inputs.pointwise or (len({*shapes}) == 1 and not indexed)
        wanted = enlarged_shapes(variant, shapes) if alike and all(map(is_moderate, given)) else None
        if wanted is None or max(given[i].numel() for i in full) >= max(map(math.prod, wanted)):
            return None
        if not inputs.pointwise and any(t.dtype in (torch.float64, torch.complex128) for t in given):
            return None  # no wider dtype to bound the error of so long a sum
        if variant == LONG_MASKED:
            wanted = [_swapped(shape, inputs.dim) for shape in wanted]
        sizes = {**dict.fromkeys(range(len(given)), EMPTY_SHAPE), **dict(zip(full, wanted, strict=True))}
        if any(math.prod(sizes[i]) != max(map(math.prod, wanted)) for i in inputs.written if i in full):
            return None
        generator = torch.Generator().manual_seed(inputs.seed % (1 << 62))
        varied = [_interpolated(t, sizes[i], generator) for i, t in enumerate(given)]
        if variant == LONG_MASKED:
            _insert_nonfinite(varied[_float_tensors(inputs)[0]], inputs.dim)
            return varied
        if variant != "long_pitched":
            return varied
        return [t if (laid := _pitched(t, math.nan)) is None else laid for t in varied]

    return make


def _swapped(shape: Sequence[int], dim: int) -> tuple[int, ...]:
    """Return a shape with its last size and that of another dimension swapped."""
    sizes = list(shape)
    if -len(sizes) <= dim < len(sizes):
        sizes[dim], sizes[-1] = sizes[-1], sizes[dim]
    return tuple(sizes)


def _insert_nonfinite(t: torch.Tensor, dim: int) -> None:
    """Put -inf into the first hundreds of elements of a long row, NaN and inf far into others."""
    rows = t.movedim(dim, -1) if -t.dim() <= dim < t.dim() else t
    outer = [size - 1 for size in rows.shape[:-1]]
    rows[tuple(0 for _ in outer)][:_MASKED_ELEMENTS] = -math.inf
    rows[tuple(outer)][_MASKED_ELEMENTS * 6] = math.nan
    rows[tuple(min(1, last) for last in outer)][_MASKED_ELEMENTS * 10] = math.inf


def _sixteenfold(inputs: CallTensors) -> list[torch.Tensor] | None:
    """Make every dimension larger than 1 sixteen times as long: blocks have no remainder."""
    given = inputs.tensors
    if inputs.pointwise or not all(map(is_moderate, given)) or any(not t.numel() for t in given):
        return None
    if sum(t.dim() >= _IMAGE_RANK for i, t in enumerate(given) if i not in inputs.write_only) > 1:
        return None  # a window as large as an image sums more than real convolutions do
    if any(t.dtype in (torch.float64, torch.complex128) for t in given):
        return None  # no wider dtype to bound the error of so long a sum
    shapes = enlarged_shapes(
        SIXTEENFOLD, [EMPTY_SHAPE if i in inputs.write_only else t.shape for i, t in enumerate(given)]
    )
    if shapes is None or all(
        i in inputs.write_only or shape == tuple(t.shape)
        for i, (shape, t) in enumerate(zip(shapes, given, strict=True))
    ):
        return None
    generator = torch.Generator().manual_seed(inputs.seed % (1 << 62))
    return [_interpolated(t, shape, generator) for t, shape in zip(given, shapes, strict=True)]


def _is_integer(t: torch.Tensor) -> bool:
    return not (t.is_floating_point() or t.is_complex() or t.dtype == torch.bool)


def _interpolated(t: torch.Tensor, shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    """Return a tensor of another shape, with elements interpolated between two of this one's.

    Integers and booleans are picked, not interpolated.
    """
    flat, count = t.reshape(-1), math.prod(shape)
    if not count:
        return t.new_empty(shape)
    first, second = (_drawn(flat, length, generator).repeat(-(-count // length))[:count] for length in _DRAWN_ELEMENTS)
    if t.is_floating_point() or t.is_complex():
        return ((first + second) / 2).to(t.dtype).reshape(shape)
    from_first = (torch.rand(_DRAWN_CHOICES, generator=generator) < 0.5).repeat(-(-count // _DRAWN_CHOICES))[:count]
    return torch.where(from_first, first, second).reshape(shape)


def _drawn(flat: torch.Tensor, count: int, generator: torch.Generator) -> torch.Tensor:
    """Draw numbers between two elements, in double precision; of integers and booleans, draw elements."""
    if not (flat.is_floating_point() or flat.is_complex()):
        return flat[torch.randint(len(flat), (count,), generator=generator)]
    wide = to_float64(flat)
    left, right = (wide[torch.randint(len(flat), (count,), generator=generator)] for _ in range(2))
    return torch.lerp(left, right, torch.rand(count, generator=generator, dtype=torch.float64).to(wide.dtype))


def _value_variant(choose: Callable[[torch.dtype], Sequence[complex]], every: int = 4) -> MakeVariant:
    """Make a variant that inserts values into the memory of floating-point inputs."""

    def variant(inputs: CallTensors) -> list[torch.Tensor] | None:
        varied, changed = list(inputs.tensors), False
        if not all(map(is_moderate, inputs.tensors)):
            return None  # with two kinds of hard values the result depends on the algorithm
        for i, t in enumerate(inputs.tensors):
            if i in inputs.write_only or not t.numel() or not (t.is_floating_point() or t.is_complex()):
                continue
            varied[i] = _with_values(t, choose(t.dtype), every, inputs.seed + i)
            changed = True
        return varied if changed else None

    return variant


_MAX_TAME_INTEGER = 1 << 31


def is_moderate(t: torch.Tensor) -> bool:
    """Whether a tensor's numbers are finite and far from the ends of their range."""
    if not t.numel() or not (t.is_floating_point() or t.is_complex()):
        return not t.numel() or t.dtype != torch.int64 or bool((t.abs() <= _MAX_TAME_INTEGER).all())
    wide = t if t.dtype.itemsize > 1 else t.float()
    return bool(wide.abs().amax() <= math.sqrt(torch.finfo(t.dtype).max))


def _with_values(t: torch.Tensor, values: Sequence[complex], every: int, start: int) -> torch.Tensor:
    """Return a copy with the values in turn at every ``every``-th element of memory.

    The first element of the tensor gets one too, so that at least one value is read.
    """
    copy = owned_copy(t)
    flat = copy.as_strided((copy.untyped_storage().nbytes() // copy.element_size(),), (1,), 0)
    for number, value in enumerate(values):
        flat[start % every + number * every :: every * len(values)] = value
    flat[t.storage_offset()] = values[start % len(values)]
    return copy


def _branch_cuts(inputs: CallTensors) -> list[torch.Tensor] | None:
    """Insert complex numbers on both sides of the axes, by the signs of their zeros."""
    if not any(t.is_complex() for t in inputs.tensors):
        return None
    on_axes = [
        complex(a, b) for a, b in ((-1.0, -0.0), (-1.0, 0.0), (2.0, -0.0), (-0.0, -0.0), (0.0, -2.0), (-0.0, 2.0))
    ]
    return _value_variant(lambda dtype: on_axes if dtype.is_complex else (-0.0, 0.0), every=1)(inputs)


_SPECIAL_VALUES = (math.nan, 0.0, math.inf, -0.0, -math.inf, 1.0, -1.0)


def _float_tensors(inputs: CallTensors) -> list[int]:
    """Return the indices of the floating-point tensors whose contents matter."""
    return [
        i for i, t in enumerate(inputs.tensors) if i not in inputs.write_only and t.numel() and t.is_floating_point()
    ]


def _meeting(inputs: CallTensors) -> list[torch.Tensor] | None:
    """Pair NaN, infinities, zeros and ones of one tensor with those of the others.

    All pairs occur, or as many as there are elements.
    """
    floats = _float_tensors(inputs)
    if not inputs.pointwise or len(floats) < 2 or not all(map(is_moderate, inputs.tensors)):
        return None
    varied = list(inputs.tensors)
    for digit, i in enumerate(floats):
        places = torch.arange(varied[i].numel()) + inputs.seed % len(_SPECIAL_VALUES) ** len(floats)
        chosen = torch.tensor(_SPECIAL_VALUES, dtype=varied[i].dtype)[
            places // len(_SPECIAL_VALUES) ** digit % len(_SPECIAL_VALUES)
        ]
        varied[i] = owned_copy(varied[i])
        varied[i].copy_(chosen.reshape(varied[i].shape))
    return varied


def _edges(inputs: CallTensors) -> list[torch.Tensor] | None:
    """Insert halves, the call's other numbers and neighbours: rounding and comparison edges."""
    if not inputs.pointwise:
        return None

    def choose(dtype: torch.dtype) -> Sequence[float]:
        step = torch.finfo(dtype).eps
        near = [number * factor for number in inputs.numbers[:2] for factor in (1, 1 + step, 1 - step)]
        return [*near, 0.1, 0.5, -0.5, 1.5, 2.5, -2.5, 0.0, 1.0]

    return _value_variant(choose, every=1)(inputs)


def _exponents(inputs: CallTensors) -> list[torch.Tensor] | None:
    """Insert numbers near which exponentials overflow or underflow the dtype."""
    if not inputs.pointwise:
        return None

    def choose(dtype: torch.dtype) -> Sequence[float]:
        info = torch.finfo(dtype)
        top, bottom = math.log(info.max), math.log(info.smallest_normal)
        return [top - 0.5, -top + 0.5, top + 0.3, -top - 0.3, bottom + 0.5, top / 2 + 0.5, -top / 2 - 0.5]

    return _value_variant(choose, every=2)(inputs)


def _shifted(inputs: CallTensors) -> list[torch.Tensor] | None:
    """Add a large constant to the first tensor, so that its mean is large beside its variance."""
    floats = _float_tensors(inputs)
    if inputs.pointwise or not floats or not all(map(is_moderate, inputs.tensors)):
        return None
    varied, first = list(inputs.tensors), floats[0]
    copy = owned_copy(varied[first])
    copy += torch.finfo(copy.dtype).eps ** -0.5 * copy.abs().amax()
    varied[first] = copy
    return varied if is_moderate(copy) else None


def _masked(inputs: CallTensors) -> list[torch.Tensor] | None:
    """Fill the first row and column of the first tensor, and half of the next row, with -inf."""
    floats = _float_tensors(inputs)
    if inputs.pointwise or not floats or not all(map(is_moderate, inputs.tensors)):
        return None
    varied, first = list(inputs.tensors), floats[0]
    copy = owned_copy(varied[first])
    if copy.dim() == 0 or copy.shape[-1] < 2:
        return None
    if copy.dim() > 1:
        copy.select(0, 0).fill_(-math.inf)
        copy.select(-1, 0).fill_(-math.inf)
    row = copy if copy.dim() == 1 else copy.select(0, min(1, copy.shape[0] - 1))
    row[..., : copy.shape[-1] // 2] = -math.inf
    varied[first] = copy
    return varied


def _nan_in_first(inputs: CallTensors) -> list[torch.Tensor] | None:
    """Put NaN and infinity into the first tensor only: some operators skip it for a zero factor."""
    floats = _float_tensors(inputs)
    if inputs.pointwise or len(floats) < 2 or not all(map(is_moderate, inputs.tensors)):
        return None
    varied = list(inputs.tensors)
    varied[floats[0]] = _with_values(varied[floats[0]], (math.nan, math.inf), every=2, start=inputs.seed % 2)
    return varied


_FIRST_INEXACT_INTEGERS = {torch.int32: 1 << 24, torch.int64: 1 << 53}
"""First integers whose neighbours are lost when converted to floating point."""


def _wide_integers(inputs: CallTensors) -> list[torch.Tensor] | None:
    """Put neighbours too large for floats of their size into integers that are not positions."""
    if inputs.may_hold_indices or inputs.may_hold_counts:
        return None
    varied, changed = list(inputs.tensors), False
    for i, t in enumerate(inputs.tensors):
        if i in inputs.write_only or not t.numel() or t.dtype not in _FIRST_INEXACT_INTEGERS:
            continue
        copy = owned_copy(t)
        flat = copy.as_strided((copy.untyped_storage().nbytes() // copy.element_size(),), (1,), 0)
        flat.copy_(_FIRST_INEXACT_INTEGERS[t.dtype] + (torch.arange(len(flat)) * 7 + inputs.seed % 5) % 11)
        flat[::5] *= -1
        varied[i], changed = copy, True
    return varied if changed else None


def _position_variant(value: Callable[[int], int]) -> MakeVariant:
    """Make a variant that sets the last position of each position tensor.

    ``value`` gets the number of elements of all tensors.
    """

    def variant(inputs: CallTensors) -> list[torch.Tensor] | None:
        varied = list(inputs.tensors)
        indices = [i for i in inputs.index_tensors if varied[i].numel() and _is_integer(varied[i])]
        for i in indices:
            varied[i] = owned_copy(varied[i])
            varied[i].view(-1)[-1:].fill_(value(sum(t.numel() for t in inputs.tensors)))
        return varied if indices else None

    return variant


def _zeros(inputs: CallTensors) -> list[torch.Tensor] | None:
    """Put zeros into integers that are not positions."""
    if inputs.may_hold_indices or inputs.may_hold_counts or not all(map(_is_integer, inputs.tensors)):
        return None
    varied = list(inputs.tensors)
    for i, t in enumerate(varied):
        if t.numel() and i not in inputs.write_only:
            varied[i] = owned_copy(t)
            varied[i].as_strided((1,), (1,), varied[i].storage_offset()).zero_()
    return varied


def _denormals(dtype: torch.dtype) -> Sequence[float]:
    info = torch.finfo(dtype)
    small = info.smallest_normal
    return small / 2, -small / 4, small


def _extremes(inputs: CallTensors) -> list[torch.Tensor] | None:
    """Insert values near the ends of the range; in sums, any order of adding stays in range."""

    def choose(dtype: torch.dtype) -> Sequence[float]:
        info = torch.finfo(dtype)
        if inputs.pointwise:
            return info.max, -info.max / 2, info.smallest_normal, -info.max, info.max / 4
        large = 2.0 ** int(math.log2(info.max) * 0.49 - 3)
        return large, info.smallest_normal, -large / 2

    return _value_variant(choose)(inputs)


def _duplicates(inputs: CallTensors) -> list[torch.Tensor] | None:
    floats = any(t.is_floating_point() or t.is_complex() for t in inputs.tensors)
    varied, changed = list(inputs.tensors), False
    for i, t in enumerate(inputs.tensors):
        movable = t.is_floating_point() or t.is_complex() or not (floats or inputs.may_hold_indices)
        if i in inputs.write_only or t.numel() < 3 or not movable or t.dtype == torch.bool:
            continue
        copy = owned_copy(t)
        flat = copy.as_strided((copy.untyped_storage().nbytes() // copy.element_size(),), (1,), 0)
        few = flat[:: max(1, len(flat) // 3)][:3].clone()
        generator = torch.Generator().manual_seed(inputs.seed + i)
        flat.copy_(few[torch.randint(len(few), (len(flat),), generator=generator)])
        varied[i], changed = copy, True
    return varied if changed else None


def _integers(inputs: CallTensors) -> list[torch.Tensor] | None:
    """Put range ends into integers that are not positions; invert every other boolean."""
    varied, changed = list(inputs.tensors), False
    for i, t in enumerate(inputs.tensors):
        if i in inputs.write_only or not t.numel() or t.is_floating_point() or t.is_complex():
            continue
        if t.dtype != torch.bool and (inputs.may_hold_indices or not inputs.pointwise):
            continue
        copy = owned_copy(t)
        flat = copy.as_strided((copy.untyped_storage().nbytes() // copy.element_size(),), (1,), 0)
        if t.dtype == torch.bool:
            flat[inputs.seed % 2 :: 2].logical_not_()
            varied[i], changed = copy, True
            continue
        info = torch.iinfo(t.dtype)
        for index, value in ((0, info.max), (len(flat) // 2, max(info.min, -info.max)), (len(flat) - 1, info.max - 1)):
            flat[index] = value
        varied[i], changed = copy, True
    return varied if changed else None


LAYOUT_VARIANTS: dict[str, MakeVariant] = {
    "transposed": _layout_variant("transposed", _transposed),
    "pitched": _layout_variant("pitched", _pitched),
    "strided": _layout_variant("strided", _strided),
    "permuted": _layout_variant("permuted", _permuted),
    "offset": _layout_variant("offset", _offset),
    "expanded": _expansion_variant("expanded", 0),
    "expanded_last": _expansion_variant("expanded_last", -1),
    "channels_last": _layout_variant("channels_last", _channels_last),
    "empty": _empty,
    "zero_dim": _zero_dim,
    "one_transposed": _one_transposed,
    "broadcast": _broadcast,
    ONE_TENSOR_TWICE: _one_tensor_twice,
}
VALUE_VARIANTS: dict[str, MakeVariant] = {
    "nan": _value_variant(lambda _: (float("nan"),)),
    "inf": _value_variant(lambda _: (float("inf"), float("-inf"))),
    "negative_zero": _value_variant(lambda _: (-0.0, 0.0), every=2),
    "denormals": _value_variant(_denormals),
    "extremes": _extremes,
    "magnitudes": _magnitudes,
    "duplicates": _duplicates,
    "integers": _integers,
    "branch_cuts": _branch_cuts,
    "meeting": _meeting,
    "edges": _edges,
    "exponents": _exponents,
    "shifted": _shifted,
    "masked": _masked,
    "nan_in_first": _nan_in_first,
    "wide_integers": _wide_integers,
    "zeros": _zeros,
    "negative_position": _position_variant(lambda _elements: -1),
    "position_out_of_range": _position_variant(lambda elements: elements + 1),
}
MAY_RAISE = frozenset({"zeros", "negative_position", "position_out_of_range"})
"""Variants for which raising may be the right answer."""
LARGE_VARIANTS: dict[str, MakeVariant] = {
    variant: _sixteenfold if variant == SIXTEENFOLD else _large_variant(variant) for variant in LARGE_VARIANT_NAMES
}
VARIANTS = LAYOUT_VARIANTS | VALUE_VARIANTS | LARGE_VARIANTS
ILL_CONDITIONED = frozenset({"expanded", "expanded_last", "zero_dim", *VALUE_VARIANTS})
"""Variants that make a system of equations unsolvable."""


def changed_contents(inputs: CallTensors, *, reordered: bool) -> list[torch.Tensor] | None:
    """Return the tensors with other contents of the same kind, or the same in another order.

    Keeps the geometry, and the first and last element of three or more.
    """

    def fixed(number: int, tensor: torch.Tensor) -> bool:
        return number in inputs.write_only or (
            inputs.may_hold_indices and not (tensor.is_floating_point() or tensor.is_complex())
        )

    varied = [t if fixed(i, t) else _changed(t, 1.0 if reordered else 0.75) for i, t in enumerate(inputs.tensors)]
    return varied if any(a is not b for a, b in zip(varied, inputs.tensors, strict=True)) else None


def _changed(t: torch.Tensor, factor: float) -> torch.Tensor:
    copy = owned_copy(t)
    flat = copy.as_strided((copy.untyped_storage().nbytes() // copy.element_size(),), (1,), 0)
    middle = flat[1:-1] if len(flat) > 2 else flat
    if t.is_floating_point() or t.is_complex():
        middle.copy_((to_float64(middle).flip(0) * factor).to(t.dtype))
    else:
        middle.copy_(middle.flip(0))
    return copy


def variants_to_try(
    case_index: int, case_count: int, tried: Mapping[str, int], *, with_values: bool
) -> Iterator[tuple[int, list[str]]]:
    """Yield the number of variants to try on a case and all their names, for layouts and then values.

    The least tried come first.
    """
    for kinds in (tuple(LAYOUT_VARIANTS), tuple(VALUE_VARIANTS) if with_values else ()):
        if kinds:
            count = min(len(kinds), max(1, -(-_TRIES_PER_VARIANT * len(kinds) // max(case_count, 1))))
            start = case_index * count % len(kinds)
            yield count, sorted([*kinds[start:], *kinds[:start]], key=lambda name: tried.get(name, 0))


_TRIES_PER_VARIANT = 2
"""Tries of each variant over the cases of an operator, if those are few."""
