"""Hostile forms of a call's tensors: the same call in a layout, or with values, that careless kernels get wrong.

A twist takes the tensors of a call and gives other ones; whether ATen takes the twisted call is for the judge to find
out. What lies in memory between and around the elements of a twisted tensor is poison, so that a kernel that reads it
shows: NaN, infinity, or the tensor's own elements in another order, which no check for the range of an index turns down.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from opforge.cases.forms import LARGE_FORMS, ONE_TENSOR_TWICE, enlarged
from opforge.cases.materialise import owned_copy
from opforge.runtime.layouts import OFFSET, layouts


@dataclass(frozen=True, slots=True)
class Inputs:
    """The tensors of a call, and what the operator does with them."""

    tensors: tuple[torch.Tensor, ...]
    written: frozenset[int] = frozenset()
    """Those that the operator writes to."""
    blank: frozenset[int] = frozenset()
    """Those of which only the memory counts, as ``out`` has it."""
    pointwise: bool = False
    indexes: bool = False
    """Whether integers among them may be positions, which must stay in range."""
    seed: int = 0


Twist = Callable[[Inputs], "list[torch.Tensor] | None"]
"""Returns the twisted tensors, or None when it would change nothing."""


Relay = Callable[[torch.Tensor, "float | None"], "torch.Tensor | None"]
"""Lays a tensor's elements out anew, with a poison or its own elements around them; None when it would change nothing."""
_POISONS = (math.nan, None, math.inf)


def _layout(name: str, change: Relay) -> Twist:
    """Make a twist of a change of one tensor's geometry that keeps its elements; tensors too small to have the layout stay as they are."""

    def twist(inputs: Inputs) -> list[torch.Tensor] | None:
        made = [change(t, _POISONS[inputs.seed % len(_POISONS)]) for t in inputs.tensors]
        made = [m if m is not None and name in (OFFSET, *layouts(m.shape, m.stride())) else None for m in made]
        if all(m is None for m in made):
            return None
        return [t if m is None else m for t, m in zip(inputs.tensors, made, strict=True)]

    return twist


def _filled(base: torch.Tensor, view: torch.Tensor, source: torch.Tensor, poison: float | None) -> torch.Tensor:
    """Poison a block of memory, write a tensor's elements into a view of it, and return the view."""
    if poison is not None and (base.is_floating_point() or base.is_complex()):
        base.fill_(poison)
    else:
        flat, own = base.view(-1), source.reshape(-1)
        flat.copy_(own[torch.arange(len(flat), 0, -1) % len(own)])
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
    base = torch.empty(
        (*t.shape[:-1], 2 * t.shape[-1] + (t.dim() > 1)), dtype=t.dtype
    )  # rows do not go on into each other
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
    flipped = _pitched(t.permute(order), poison)
    return None if flipped is None else flipped.permute(order)


def _offset(t: torch.Tensor, poison: float | None) -> torch.Tensor | None:
    if t.numel() == 0:
        return None
    base = torch.empty(t.numel() + 8, dtype=t.dtype)
    return _filled(base, base[5 : 5 + t.numel()].view(t.shape), t, poison)


def _channels_last(t: torch.Tensor, poison: float | None) -> torch.Tensor | None:
    del poison  # there is nothing around the elements
    if t.dim() not in (4, 5) or t.numel() < 2:
        return None
    made = t.contiguous(memory_format=torch.channels_last if t.dim() == 4 else torch.channels_last_3d)
    return None if made.stride() == t.stride() else made.clone()


def _expanded(name: str, dimension: int) -> Twist:
    """Make a twist in which one dimension, the first or the last of several places, has one place for all."""

    def twist(inputs: Inputs) -> list[torch.Tensor] | None:
        made, changed = list(inputs.tensors), False
        for i, t in enumerate(inputs.tensors):
            wide = [d for d, size in enumerate(t.shape) if size > 1]
            if not wide or t.numel() < 2 or i in inputs.written or not (t.is_floating_point() or t.is_complex()):
                continue
            one = t.narrow(wide[dimension], 0, 1).contiguous().expand(t.shape)
            if name in layouts(one.shape, one.stride()):
                made[i], changed = one, True
        return made if changed else None

    return twist


def _empty(inputs: Inputs) -> list[torch.Tensor] | None:
    first = next((t for t in inputs.tensors if t.dim() and t.numel()), None)
    if first is None:
        return None
    size = first.shape[0]
    return [t.narrow(0, 0, 0).clone() if t.dim() and t.shape[0] == size else t for t in inputs.tensors]


def _zero_dim(inputs: Inputs) -> list[torch.Tensor] | None:
    if not any(t.dim() for t in inputs.tensors) or not all(t.numel() for t in inputs.tensors):
        return None
    return [t.reshape(-1)[0].clone() if t.dim() else t for t in inputs.tensors]


def _one_transposed(inputs: Inputs) -> list[torch.Tensor] | None:
    """Transpose the last tensor alone: the others have other strides than it."""
    made = list(inputs.tensors)
    for i in reversed(range(1, len(made))):
        other = None if i in inputs.blank else _transposed(made[i], _POISONS[inputs.seed % len(_POISONS)])
        if other is not None:
            made[i] = other
            return made
    return None


def _broadcast(inputs: Inputs) -> list[torch.Tensor] | None:
    """Leave the last tensor that is only read one place in its last dimension, where others have several."""
    given = inputs.tensors
    if not inputs.pointwise or len(given) < 2:
        return None
    for i in reversed(range(len(given))):
        t = given[i]
        dimension = next((d for d in reversed(range(t.dim())) if t.shape[d] > 1), None)
        wide = any(o is not t and o.shape == t.shape for o in given)
        if dimension is not None and wide and i not in inputs.written and i not in inputs.blank:
            return [*given[:i], t.narrow(dimension, 0, 1).clone(), *given[i + 1 :]]
    return None


def _one_tensor_twice(inputs: Inputs) -> list[torch.Tensor] | None:
    """Give the tensor of one argument for another one like it too, as in ``x.mul_(x)`` and ``exp(x, out=x)``."""
    if not inputs.pointwise:
        return None  # many others have no answer to that
    read = [i for i, t in enumerate(inputs.tensors) if i not in inputs.written and t.numel()]
    for i in read:
        for j in (*sorted(inputs.written), *(other for other in read if other > i)):
            one, other = inputs.tensors[i], inputs.tensors[j]
            if (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride()):
                return [*inputs.tensors[:j], one, *inputs.tensors[j + 1 :]]
    return None


def _magnitudes(inputs: Inputs) -> list[torch.Tensor] | None:
    """Put in numbers of all magnitudes between those that are usual and the ends of the range."""
    if not inputs.pointwise:
        return None

    def choose(dtype: torch.dtype) -> Sequence[float]:
        top = math.log(torch.finfo(dtype).max)
        return [sign * math.exp(share * top) for share in (0.1, 0.3, 0.5, 0.7, 0.9) for sign in (1, -1)]

    return _values(choose, every=2)(inputs)


def _large(form: str) -> Twist:
    """Make a twist with many more elements: new ones that lie between those that there are."""

    def twist(inputs: Inputs) -> list[torch.Tensor] | None:
        given = inputs.tensors
        shapes = [tuple(t.shape) for t in given]
        alike = inputs.pointwise or (len({*shapes}) == 1 and not (inputs.indexes and any(map(_whole, given))))
        wanted = enlarged(form, shapes) if alike and all(map(tame, given)) else None
        if wanted is None or max(map(torch.Tensor.numel, given)) >= max(map(math.prod, wanted)):
            return None
        if not inputs.pointwise and any(t.dtype in (torch.float64, torch.complex128) for t in given):
            return None  # nothing wider tells what so many roundings may add up to
        if any(math.prod(wanted[i]) != max(map(math.prod, wanted)) for i in inputs.written):
            return None
        generator = torch.Generator().manual_seed(inputs.seed % (1 << 62))
        made = [_between(t, shape, generator) for t, shape in zip(given, wanted, strict=True)]
        if form != "long_pitched":
            return made
        return [t if (laid := _pitched(t, math.nan)) is None else laid for t in made]

    return twist


def _whole(t: torch.Tensor) -> bool:
    return not (t.is_floating_point() or t.is_complex() or t.dtype == torch.bool)


def _between(t: torch.Tensor, shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    """Return a tensor of another shape whose elements lie between two of this one's; of integers and booleans, are some of them."""
    flat, count = t.reshape(-1), math.prod(shape)
    if not (t.is_floating_point() or t.is_complex()):
        return flat[torch.randint(len(flat), (count,), generator=generator)].reshape(shape)
    wide = flat.to(torch.complex128 if t.is_complex() else torch.float64)
    one, other = (wide[torch.randint(len(flat), (count,), generator=generator)] for _ in range(2))
    return (
        torch.lerp(one, other, torch.rand(count, generator=generator, dtype=torch.float64).to(wide.dtype))
        .to(t.dtype)
        .reshape(shape)
    )


def _values(choose: Callable[[torch.dtype], Sequence[float]], every: int = 4) -> Twist:
    """Make a twist that puts some values into the memory of floating-point inputs."""

    def twist(inputs: Inputs) -> list[torch.Tensor] | None:
        made, changed = list(inputs.tensors), False
        if not all(map(tame, inputs.tensors)):
            return None  # values that hurt in two ways at once have answers that depend on how one computes
        for i, t in enumerate(inputs.tensors):
            if i in inputs.blank or not t.numel() or not (t.is_floating_point() or t.is_complex()):
                continue
            made[i] = _with_values(t, choose(t.dtype), every, inputs.seed + i)
            changed = True
        return made if changed else None

    return twist


_LARGE_INTEGER = 1 << 31


def tame(t: torch.Tensor) -> bool:
    """Whether a tensor's numbers are finite and far from the end of their range."""
    if not t.numel() or not (t.is_floating_point() or t.is_complex()):
        return not t.numel() or t.dtype != torch.int64 or bool((t.abs() <= _LARGE_INTEGER).all())
    wide = t if t.dtype.itemsize > 1 else t.float()
    return bool(wide.abs().amax() <= math.sqrt(torch.finfo(t.dtype).max))


def _with_values(t: torch.Tensor, values: Sequence[float], every: int, start: int) -> torch.Tensor:
    """Return a copy in which every so many elements of memory, and one that is surely looked at, hold the values in turn."""
    copy = owned_copy(t)
    flat = copy.as_strided((copy.untyped_storage().nbytes() // copy.element_size(),), (1,), 0)
    for number, value in enumerate(values):
        flat[start % every + number * every :: every * len(values)] = value
    flat[t.storage_offset()] = values[start % len(values)]
    return copy


def _denormals(dtype: torch.dtype) -> Sequence[float]:
    info = torch.finfo(dtype)
    small = info.smallest_normal
    return small / 2, -small / 4, small


def _extremes(inputs: Inputs) -> list[torch.Tensor] | None:
    """Put in values near the ends of the range; where many are added up, such that any order of adding stays inside it."""

    def choose(dtype: torch.dtype) -> Sequence[float]:
        info = torch.finfo(dtype)
        if inputs.pointwise:
            return info.max, -info.max / 2, info.smallest_normal, -info.max, info.max / 4
        large = 2.0 ** int(math.log2(info.max) * 0.49 - 3)
        return large, info.smallest_normal, -large / 2

    return _values(choose)(inputs)


def _duplicates(inputs: Inputs) -> list[torch.Tensor] | None:
    floats = any(t.is_floating_point() or t.is_complex() for t in inputs.tensors)
    made, changed = list(inputs.tensors), False
    for i, t in enumerate(inputs.tensors):
        movable = t.is_floating_point() or t.is_complex() or not (floats or inputs.indexes)
        if i in inputs.blank or t.numel() < 3 or not movable or t.dtype == torch.bool:
            continue
        copy = owned_copy(t)
        flat = copy.as_strided((copy.untyped_storage().nbytes() // copy.element_size(),), (1,), 0)
        few = flat[:: max(1, len(flat) // 3)][:3].clone()
        generator = torch.Generator().manual_seed(inputs.seed + i)
        flat.copy_(few[torch.randint(len(few), (len(flat),), generator=generator)])
        made[i], changed = copy, True
    return made if changed else None


def _integers(inputs: Inputs) -> list[torch.Tensor] | None:
    """Put the ends of the range into integers that are no positions, and turn every other boolean over."""
    made, changed = list(inputs.tensors), False
    for i, t in enumerate(inputs.tensors):
        if i in inputs.blank or not t.numel() or t.is_floating_point() or t.is_complex():
            continue
        if t.dtype != torch.bool and (inputs.indexes or not inputs.pointwise):
            continue
        copy = owned_copy(t)
        flat = copy.as_strided((copy.untyped_storage().nbytes() // copy.element_size(),), (1,), 0)
        if t.dtype == torch.bool:
            flat[inputs.seed % 2 :: 2].logical_not_()
            made[i], changed = copy, True
            continue
        info = torch.iinfo(t.dtype)
        for at, value in ((0, info.max), (len(flat) // 2, max(info.min, -info.max)), (len(flat) - 1, info.max - 1)):
            flat[at] = value
        made[i], changed = copy, True
    return made if changed else None


LAYOUTS: dict[str, Twist] = {
    "transposed": _layout("transposed", _transposed),
    "pitched": _layout("pitched", _pitched),
    "strided": _layout("strided", _strided),
    "permuted": _layout("permuted", _permuted),
    "offset": _layout("offset", _offset),
    "expanded": _expanded("expanded", 0),
    "expanded_last": _expanded("expanded_last", -1),
    "channels_last": _layout("channels_last", _channels_last),
    "empty": _empty,
    "zero_dim": _zero_dim,
    "one_transposed": _one_transposed,
    "broadcast": _broadcast,
    ONE_TENSOR_TWICE: _one_tensor_twice,
}
VALUES: dict[str, Twist] = {
    "nan": _values(lambda _: (float("nan"),)),
    "inf": _values(lambda _: (float("inf"), float("-inf"))),
    "negative_zero": _values(lambda _: (-0.0, 0.0), every=2),
    "denormals": _values(_denormals),
    "extremes": _extremes,
    "magnitudes": _magnitudes,
    "duplicates": _duplicates,
    "integers": _integers,
}
LARGE: dict[str, Twist] = {form: _large(form) for form in LARGE_FORMS}
TWISTS = LAYOUTS | VALUES | LARGE
ILL_CONDITIONED = frozenset({"expanded", "expanded_last", "zero_dim", *VALUES})
"""Those that make of a system of equations one without a solution."""


def changed_contents(inputs: Inputs, *, reordered: bool) -> list[torch.Tensor] | None:
    """Return the tensors with other contents of the same kind, or the same in another order.

    Geometry, first and last element are kept where there are three.
    """

    def fixed(number: int, tensor: torch.Tensor) -> bool:
        return number in inputs.blank or (inputs.indexes and not (tensor.is_floating_point() or tensor.is_complex()))

    made = [t if fixed(i, t) else _changed(t, 1.0 if reordered else 0.75) for i, t in enumerate(inputs.tensors)]
    return made if any(a is not b for a, b in zip(made, inputs.tensors, strict=True)) else None


def _changed(t: torch.Tensor, factor: float) -> torch.Tensor:
    copy = owned_copy(t)
    flat = copy.as_strided((copy.untyped_storage().nbytes() // copy.element_size(),), (1,), 0)
    middle = flat[1:-1] if len(flat) > 2 else flat
    if t.is_floating_point() or t.is_complex():
        wide = middle.to(torch.complex128 if t.is_complex() else torch.float64)
        middle.copy_((wide.flip(0) * factor).to(t.dtype))
    else:
        middle.copy_(middle.flip(0))
    return copy


def turns(number: int, cases: int, *, values: bool) -> Iterator[tuple[int, list[str]]]:
    """Yield how many twists of a kind an operator's case is tried with, and all of that kind, those first whose turn it is."""
    for kinds in (tuple(LAYOUTS), tuple(VALUES) if values else ()):
        if kinds:
            count = min(len(kinds), max(1, -(-_TIMES * len(kinds) // max(cases, 1))))
            start = number * count % len(kinds)
            yield count, [*kinds[start:], *kinds[:start]]


_TIMES = 3
"""How often each twist is tried over the cases of an operator, where it has few."""
