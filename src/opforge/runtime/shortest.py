"""The shortest way from the dispatcher to a kernel, for calls of which it is known at once that they are inside of what is proven.

What is done here is done for every call of a model, so that each attribute that is read counts: the geometry of a call is remembered, and the next
one like it is known by a single question, which torch's own guards answer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

Function = Callable[..., Any]
Check = Callable[..., bool]
"""Whether so many tensors, the first arguments of a call, are of one geometry, or inside."""
Whole = Callable[..., Any]
"""Answers a call in the long way: positional arguments, keywords and, if the kernel has been asked, what it raised."""
MOST_KNOWN = 256
"""Geometries that are remembered at one operator."""
_GUARDS: Any = getattr(getattr(torch._C, "_dynamo", None), "guards", None)  # noqa: SLF001
GUARDED = _GUARDS is not None
"""Whether torch has guards, which are not public; without them attributes are read each time."""


class _Inside(threading.local):
    """Whether this thread is inside a kernel."""

    def __init__(self) -> None:
        self.now = False


INSIDE = _Inside()
"""Inside a kernel every operator is ATen's own."""


def geometry(*tensors: Any) -> Check:
    """Return what knows tensors of the same class, dtype, device, shape and strides, that want gradients or not as these do, and are different ones."""
    check: Check = _GUARDS.TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    return check


@dataclass
class Quick:
    """Knows many calls that are inside by their first tensors, one or two; what it does not know may be inside all the same."""

    inside: Check
    lasting: bool
    """Whether what is true of a call is true of all of its geometry, wherever in memory its tensors begin."""
    last: list[Check] = field(default_factory=lambda: [_no])
    """What knows the geometry of the last call that was found inside, by itself in a list: threads share it."""
    _known: dict[tuple[int, bool], Check] = field(default_factory=dict)

    def find(self, *tensors: Any) -> Check | None:
        """Return what knows further calls of the same geometry, or nothing, as inside; None where this one is not known to be inside."""
        twice = len(tensors) > 1 and tensors[0] is tensors[1]
        key = (tensors[0].numel(), twice)
        known = self._known.get(key)
        if known is not None and known(*tensors):
            return known
        if not self.inside(*tensors):
            return None
        if known is not None or not self.lasting or not GUARDED or len(self._known) >= MOST_KNOWN:
            return _no
        self._known[key] = known = _twice(geometry(tensors[0])) if twice else geometry(*tensors)
        return known


def _twice(known: Check) -> Check:
    """Return what knows one tensor given twice, which guards of two take for none."""
    return lambda one, other: one is other and known(one)


def _no(*_tensors: Any) -> bool:
    return False


def _nothing(*_tensors: Any) -> None:
    return None


def shortest(whole: Whole, count: int) -> tuple[Function, Callable[[Quick | None, Function, Any], None]]:
    """Return what the dispatcher calls, and what tells it who is asked first: what is inside, the function, what counts calls that were served.

    ``count`` is how many tensors come first; for more than two every call goes the long way. Who is asked is read at once: another thread may be changing it.
    One and two have a function each, which differ in an argument: to pass all in a tuple takes a tenth of what a call takes.
    """
    nobody: tuple[list[Check], Callable[..., Check | None], Function, Any] = ([_no], _nothing, whole, None)
    now = nobody
    inside, tensor = INSIDE, torch.Tensor

    def take(quick: Quick | None, function: Function, counted: Any) -> None:
        nonlocal now
        now = nobody if quick is None else (quick.last, quick.find, function, counted)

    def other_than_tensor(result: Any) -> TypeError:
        return TypeError(f"it returned {type(result).__name__}, not a tensor")

    def call_of_one(one: Any, *rest: Any, **kwargs: Any) -> Any:
        here = inside.__dict__
        last, find, function, counted = now
        if here["now"]:
            return whole((one, *rest), kwargs)
        if not last[0](one):
            if (found := find(one)) is None:
                return whole((one, *rest), kwargs)
            last[0] = found
        here["now"] = True
        try:
            result = function(one, *rest, **kwargs) if rest or kwargs else function(one)
        except Exception as error:  # noqa: BLE001  # kernels raise anything
            here["now"] = False
            return whole((one, *rest), kwargs, error)
        finally:
            here["now"] = False
        if result.__class__ is not tensor:
            return whole((one, *rest), kwargs, other_than_tensor(result))
        counted.served += 1
        return result

    def call_of_two(one: Any, other: Any, *rest: Any, **kwargs: Any) -> Any:
        here = inside.__dict__
        last, find, function, counted = now
        if here["now"]:
            return whole((one, other, *rest), kwargs)
        if not last[0](one, other):
            if (found := find(one, other)) is None:
                return whole((one, other, *rest), kwargs)
            last[0] = found
        here["now"] = True
        try:
            result = function(one, other, *rest, **kwargs) if rest or kwargs else function(one, other)
        except Exception as error:  # noqa: BLE001  # kernels raise anything
            here["now"] = False
            return whole((one, other, *rest), kwargs, error)
        finally:
            here["now"] = False
        if result.__class__ is not tensor:
            return whole((one, other, *rest), kwargs, other_than_tensor(result))
        counted.served += 1
        return result

    def call(*args: Any, **kwargs: Any) -> Any:
        return whole(args, kwargs)

    return {1: call_of_one, 2: call_of_two}.get(count, call), take
