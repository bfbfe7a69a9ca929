"""Fast path from the dispatcher to a kernel or to ATen, for calls seen before.

It runs for every call of a model, so each attribute lookup counts. The decision for a call is
remembered by the geometry of its tensors and by its other arguments. A call like it is recognised
by one torch guard for the geometry and by comparing the other arguments.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from .aten_kernels import NUMBER_TYPES
from .proven_calls import ProvenCalls, has_offset
from .value_ranges import AllowedValues

Function = Callable[..., Any]
GeometryCheck = Callable[..., bool]
"""Whether the tensors of a call, or values in their place, have a certain geometry."""
Decision = tuple[GeometryCheck, Any, Any, Function, str]
"""The decision for calls of one geometry with the same other arguments.

Fields: check of the geometry, other positional arguments, keyword arguments, function that answers,
and why the call is not proven (empty if it is).
"""
SlowPath = Callable[..., Any]
"""Answers a call on the slow path.

Takes positional arguments, keywords and, if a kernel has been tried, its exception and its counts.
"""
_GeometryDecision = tuple[GeometryCheck, Function, str, AllowedValues]
"""What is known of calls of one geometry.

Fields: check of the geometry, function that answers, why none of the calls is proven (empty if some
may be), and the allowed values of the other arguments.
"""
MAX_GEOMETRIES = 256
"""Geometries remembered at one operator. When this is exceeded, all are forgotten."""
_DYNAMO_GUARDS: Any = getattr(getattr(torch._C, "_dynamo", None), "guards", None)  # noqa: SLF001
HAS_GUARDS = _DYNAMO_GUARDS is not None
"""Whether torch has guards, which are private. Without them every call takes the slow path."""


class _Inside(threading.local):
    """Whether this thread is inside a kernel."""

    def __init__(self) -> None:
        self.now = False


INSIDE_KERNEL = _Inside()
"""Marks threads inside a kernel, where every operator is ATen's own."""


def below_autocast(function: Function) -> Function:
    """Return a function that runs with autocast off: kernels are below autocast."""
    if not torch._C._is_any_autocast_enabled():  # noqa: SLF001  # torch.is_autocast_enabled is for one device
        return function

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._C._DisableAutocast():  # noqa: SLF001  # torch.autocast(enabled=False) is for one device, and slower
            return function(*args, **kwargs)

    return call


class DecisionCache:
    """Decisions about calls of one operator, by the geometry of their tensors."""

    def __init__(self, proven_calls: ProvenCalls, function: Function, detached: Function, *, any_number: bool) -> None:
        """Remember decisions for one kernel.

        ``function`` answers calls in the domain. ``detached`` does so if a tensor requires
        gradients, because grad mode differs from call to call. With ``any_number``, an argument of
        the operator takes both integers and other numbers: 1 and 1.0 are equal but not the same.
        """
        self.last_decision: list[Decision] = [_NO_DECISION]
        """Decision for the last call. It is alone in a list because threads share it."""
        self._proven_calls, self._function, self._detached, self._any_number = (
            proven_calls,
            function,
            detached,
            any_number,
        )
        self._learnt: dict[tuple[Any, Any], list[_GeometryDecision]] = {}
        self._free_entries = MAX_GEOMETRIES

    def find(
        self, given: Sequence[Any], rest: tuple[Any, ...], kwargs: dict[str, Any], args: tuple[Any, ...]
    ) -> Decision | None:
        """Return the decision for calls like this one; None if it cannot be remembered.

        ``given`` are the tensors, ``rest`` the other positional arguments, ``args`` all positional
        ones.
        """
        first, last = given[0], given[-1]
        key = (
            first.numel() if isinstance(first, torch.Tensor) else None,
            last.numel() if isinstance(last, torch.Tensor) else None,
        )
        for learnt in self._learnt.get(key, ()):
            if learnt[0](*given):
                break
        else:
            if (added := self._learn(key, given)) is None:
                return None
            learnt = added
        check, function, reason, arguments = learnt
        reason = reason or self._proven_calls.reject_arguments(arguments, given, args, kwargs)
        return check, self._equality_of(rest), self._equality_of(kwargs), function, reason

    def _learn(self, key: tuple[Any, Any], given: Sequence[Any]) -> _GeometryDecision | None:
        has_tensor = any(isinstance(v, torch.Tensor) for v in given)  # guards need one to check modes too
        if not has_tensor or not all(v is None or isinstance(v, (torch.Tensor, *NUMBER_TYPES)) for v in given):
            return None
        reason, any_offset = self._proven_calls.reject_tensors(given), self._proven_calls.any_offset(given)
        if not any_offset and not _all_at_memory_start(*given):  # without an offset, the same geometry may be inside
            return None
        needs_grad = any(getattr(v, "requires_grad", False) for v in given)
        check = geometry_check(*given) if any_offset or reason else _both(geometry_check(*given), _all_at_memory_start)
        function = below_autocast(self._detached if needs_grad else self._function)  # guards distinguish calls by it
        learnt = (check, function, reason, self._proven_calls.allowed_values(given))
        if self._free_entries <= 0:
            self._learnt, self._free_entries = {}, MAX_GEOMETRIES
        self._free_entries -= 1
        self._learnt.setdefault(key, []).append(learnt)
        return learnt

    def _equality_of(self, values: Any) -> Any:
        """Return an object equal to arguments like these."""
        return (
            _EqualWithTypes(values) if values and (self._any_number or _has_ambiguous(values)) else _deep_copy(values)
        )


class _EqualWithTypes:
    """Equal only to the same values of the same types.

    Here 1 is neither 1.0 nor True, and 0.0 is not -0.0.
    """

    def __init__(self, values: Any) -> None:
        self._values = _deep_copy(values)
        self._kinds = _kinds(values)

    def __ne__(self, other: object) -> bool:
        return bool(other != self._values) or _kinds(other) != self._kinds


def _deep_copy(value: Any) -> Any:
    """Return a copy that nobody else can change."""
    if isinstance(value, list | tuple):
        return type(value)(map(_deep_copy, value))
    return {name: _deep_copy(item) for name, item in value.items()} if isinstance(value, dict) else value


def _kinds(values: Any) -> list[Any]:
    return [*map(_kind, values.values() if values.__class__ is dict else values)]


def _kind(value: Any) -> Any:
    kind = value.__class__
    if kind is list or kind is tuple:
        return _kinds(value)
    return repr(value) if (kind is float or kind is complex) and _is_ambiguous(value) else kind


def _has_ambiguous(value: Any) -> bool:
    """Whether there are numbers that equal different ones, such as signed zeros."""
    if isinstance(value, list | tuple):
        return any(map(_has_ambiguous, value))
    return any(map(_has_ambiguous, value.values())) if isinstance(value, dict) else _is_ambiguous(value)


def _is_ambiguous(value: Any) -> bool:
    return isinstance(value, complex) or (isinstance(value, float) and value == 0)


def geometry_check(*given: Any) -> GeometryCheck:
    """Return a check for values like these.

    Tensors match by class, dtype, device, shape, strides and whether they require gradients.
    Numbers match by type. None matches None.
    """
    tensors = [v for v in given if isinstance(v, torch.Tensor)]
    if len(tensors) == len(given) == len(set(map(id, tensors))):
        return _tensor_guard(*tensors)
    checks = [_tensor_guard(v) if isinstance(v, torch.Tensor) else _class_check(v.__class__) for v in given]
    if len(given) != 2:
        return lambda *values: all(check(value) for check, value in zip(checks, values, strict=True))
    one_is, other_is = checks
    if given[0] is given[1]:
        return lambda one, other: one is other and one_is(one)
    if not isinstance(given[1], torch.Tensor):
        kind = given[1].__class__
        return lambda one, other: other.__class__ is kind and one_is(one)
    return lambda one, other: one_is(one) and other_is(other)


def _tensor_guard(*tensors: Any) -> GeometryCheck:
    """Return a guard for tensors like these, which must be distinct objects.

    A guard never matches a tensor that is passed twice.
    """
    check: GeometryCheck = _DYNAMO_GUARDS.TensorGuards(
        *tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None
    ).check
    return check


def _both(first: GeometryCheck, second: GeometryCheck) -> GeometryCheck:
    return lambda *given: first(*given) and second(*given)


def _all_at_memory_start(*given: Any) -> bool:
    """Whether all tensors begin where their memory begins."""
    return not any(has_offset(v) for v in given if isinstance(v, torch.Tensor))


def _class_check(kind: type) -> GeometryCheck:
    return lambda value: value.__class__ is kind


def _return_none(*_given: Any) -> Any:
    return None


_NO_DECISION: Decision = (_return_none, (), {}, _return_none, "")


class CallCountsLike(Protocol):
    """Counts of the calls to a kernel."""

    served: int
    aten: defaultdict[str, int]


def make_fast_path(  # noqa: PLR0915  # one function in three versions, for speed
    slow_path: SlowPath, positions: Sequence[int], check: Callable[[Any], None], *, leading: bool
) -> tuple[Function, Callable[[DecisionCache | None, CallCountsLike | None, Function | None], None]]:
    """Return the function that the dispatcher calls, and one that sets the kernel tried first.

    The latter takes the kernel's memory, its counts, and ATen's own kernel if that is next. ``positions``
    are those of all tensors; without any, every call takes the slow path. ``check`` raises
    for results of the wrong type. A call reads these settings at once: another thread may be
    changing them.

    Tensors are ``leading`` if they are the first arguments of every call and one is returned. Then
    one and two tensors have a function each: passing all in a tuple takes a tenth of the time of a
    call.
    """
    settings: tuple[list[Decision], Callable[..., Decision | None], Any, Function | None] = (
        [_NO_DECISION],
        _return_none,
        None,
        None,
    )
    no_kernel = settings
    inside, tensor = INSIDE_KERNEL, torch.Tensor
    min_args = max(positions, default=0) + 1
    non_tensor_positions = [i for i in range(min_args) if i not in positions]

    def take(memory: DecisionCache | None, counted: CallCountsLike | None, original: Function | None) -> None:
        nonlocal settings
        settings = no_kernel if memory is None else (memory.last_decision, memory.find, counted, original)

    def other_than_tensor(result: Any) -> TypeError:
        return TypeError(f"it returned {type(result).__name__}, not a tensor")

    def call_of_one(one: Any, *rest: Any, **kwargs: Any) -> Any:
        thread_state = inside.__dict__
        last_decision, find, counted, original = settings
        if thread_state["now"]:
            return slow_path((one, *rest), kwargs)
        same_geometry, same_rest, same_kwargs, function, reason = last_decision[0]
        if not same_geometry(one) or rest != same_rest or kwargs != same_kwargs:
            if (decision := find((one,), rest, kwargs, (one, *rest))) is None:
                return slow_path((one, *rest), kwargs)
            last_decision[0] = decision
            *_, function, reason = decision
        if reason:
            if original is None:
                return slow_path((one, *rest), kwargs)
            counted.aten[reason] += 1
            return original(one, *rest, **kwargs)
        thread_state["now"] = True
        try:
            result = function(one, *rest, **kwargs) if rest or kwargs else function(one)
        except Exception as error:  # noqa: BLE001  # kernels raise anything
            thread_state["now"] = False
            return slow_path((one, *rest), kwargs, error, counted)
        finally:
            thread_state["now"] = False
        if result.__class__ is not tensor and not isinstance(result, tensor):
            return slow_path((one, *rest), kwargs, other_than_tensor(result), counted)
        counted.served += 1
        return result

    def call_of_two(one: Any, other: Any, *rest: Any, **kwargs: Any) -> Any:
        thread_state = inside.__dict__
        last_decision, find, counted, original = settings
        if thread_state["now"]:
            return slow_path((one, other, *rest), kwargs)
        same_geometry, same_rest, same_kwargs, function, reason = last_decision[0]
        if not same_geometry(one, other) or rest != same_rest or kwargs != same_kwargs:
            if (decision := find((one, other), rest, kwargs, (one, other, *rest))) is None:
                return slow_path((one, other, *rest), kwargs)
            last_decision[0] = decision
            *_, function, reason = decision
        if reason:
            if original is None:
                return slow_path((one, other, *rest), kwargs)
            counted.aten[reason] += 1
            return original(one, other, *rest, **kwargs)
        thread_state["now"] = True
        try:
            result = function(one, other, *rest, **kwargs) if rest or kwargs else function(one, other)
        except Exception as error:  # noqa: BLE001  # kernels raise anything
            thread_state["now"] = False
            return slow_path((one, other, *rest), kwargs, error, counted)
        finally:
            thread_state["now"] = False
        if result.__class__ is not tensor and not isinstance(result, tensor):
            return slow_path((one, other, *rest), kwargs, other_than_tensor(result), counted)
        counted.served += 1
        return result

    def call_of_many(*args: Any, **kwargs: Any) -> Any:
        thread_state = inside.__dict__
        last_decision, find, counted, original = settings
        if thread_state["now"] or len(args) < min_args:
            return slow_path(args, kwargs)
        given = [args[i] for i in positions]
        rest = args[min_args:]
        for i in non_tensor_positions:
            rest += (args[i],)
        same_geometry, same_rest, same_kwargs, function, reason = last_decision[0]
        if not same_geometry(*given) or rest != same_rest or kwargs != same_kwargs:
            if (decision := find(given, rest, kwargs, args)) is None:
                return slow_path(args, kwargs)
            last_decision[0] = decision
            *_, function, reason = decision
        if reason:
            if original is None:
                return slow_path(args, kwargs)
            counted.aten[reason] += 1
            return original(*args, **kwargs)
        thread_state["now"] = True
        try:
            result = function(*args, **kwargs)
            check(result)
        except Exception as error:  # noqa: BLE001  # kernels raise anything
            thread_state["now"] = False
            return slow_path(args, kwargs, error, counted)
        finally:
            thread_state["now"] = False
        counted.served += 1
        return result

    def call(*args: Any, **kwargs: Any) -> Any:
        return slow_path(args, kwargs)

    if not positions:
        return call, take
    return {1: call_of_one, 2: call_of_two}.get(len(positions) if leading else 0, call_of_many), take
