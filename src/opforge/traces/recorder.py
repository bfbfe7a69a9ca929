"""Record every dispatched call of a running program: once per signature, with counts per phase.

No tensor is kept alive: a call is converted to data before it is made. Its contents are read, and
perhaps copied, only the first time.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, BinaryIO

import torch
from torch._subclasses import FakeTensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode

from opforge.cases.text import format_arguments
from opforge.cases.values import TensorSpec
from opforge.ops import table
from opforge.procs.child import send
from opforge.runtime.trees import instances
from opforge.traces.call_cost import flops, input_bytes
from opforge.traces.capture import (
    OVERLAPPING_WRITE,
    operator_name,
    spec_of,
    storage_bytes,
    to_arguments,
    unsendable_part,
    writes_to_overlap,
)
from opforge.traces.contents import (
    ContentNeed,
    IntegersBelow,
    Need,
    check_storable,
    content_needs,
    is_integral,
    map_specs,
    with_default_range,
)
from opforge.traces.stream import OFFSET_PLACEHOLDER, NewCall

FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer"
_MAX_READ_ELEMENTS = 1 << 28
"""Maximum elements of a tensor whose values are read."""
_FLUSH_INTERVAL_S = 0.2
"""Seconds between sends of counts; short, so that a crash loses few of them."""
_UNRECORDED = frozenset({"prim", "prims", "profiler"})
"""Namespaces of torch's own queries and markers, which are no work for a device."""
_NUMBERS = re.compile(r", offset=\d+|(?<![\w.])-?\d+(\.\d+(e[-+]?\d+)?|e[-+]?\d+)")
_MAX_SIMILAR_CALLS = 4
"""Number of calls to keep that differ only in such numbers; others count with the first.

Examples are the step size of an optimizer and the offset of a view.
"""
_PLAIN = (torch.Tensor, torch.nn.Parameter, FakeTensor)


@dataclass
class _KnownCall:
    """A known signature: its number, or why it is not kept."""

    number: int
    loss_reason: str = ""


@dataclass(frozen=True, slots=True)
class _UnsentCall:
    """A new call before it is made; its result is not known yet."""

    message: NewCall
    contents: bytes


class Recorder(TorchDispatchMode):
    """Sends recorded calls to a pipe; `opforge.traces.collect` is the other end."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise torch imports its compiler for the first mode, which takes seconds

    def __init__(self, pipe: BinaryIO, device: str) -> None:
        super().__init__()
        self._pipe = pipe
        self._pid = os.getpid()
        """Forks, such as data loader workers, inherit the recorder but must not write too."""
        self._device_type = torch.device(device).type
        self._known: dict[bytes, _KnownCall] = {}
        self._similar: dict[bytes, list[_KnownCall]] = {}
        self._counts: Counter[tuple[int, str]] = Counter()
        self._losses: Counter[str] = Counter()
        self._composite: dict[Any, bool] = {}
        self._stepping = 0
        self._last_flush_s = time.monotonic()
        self._lock = threading.RLock()  # on a GPU, backward runs in threads of its own

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_operator = isinstance(func, torch._ops.OpOverload)  # noqa: SLF001  # torch has no public name
        if not is_operator or func.namespace in _UNRECORDED or os.getpid() != self._pid:
            return func(*args, **kwargs)
        if self._is_composite(func):
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        op, phase = operator_name(func), self._phase()
        with self._lock:
            known, new = self._inspect_call(op, args, kwargs)
        result = func(*args, **kwargs)
        with self._lock:
            self._count_call(known, phase, result, new)
        return result

    @contextmanager
    def optimizer_steps(self) -> Iterator[None]:
        """Track optimizer steps, so that calls during a step get that phase."""
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        def enter(*_: Any) -> None:
            self._stepping = 1

        def leave(*_: Any) -> None:
            self._stepping = 0

        hooks = [register_optimizer_step_pre_hook(enter), register_optimizer_step_post_hook(leave)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def add_loss(self, reason: str, count: int) -> None:
        """Count calls that could not be kept as they were."""
        if count:
            self._losses[reason] += count

    def flush(self) -> None:
        """Send the counts since the last time."""
        with self._lock:
            counts = [[number, phase, count] for (number, phase), count in self._counts.items()]
            send(self._pipe, {"counts": counts, "losses": self._losses})
            self._pipe.flush()
            self._counts.clear()
            self._losses.clear()
            self._last_flush_s = time.monotonic()

    def _phase(self) -> str:
        if torch._C._current_graph_task_id() != -1:  # noqa: SLF001  # the one way to know that this is a backward pass
            return BACKWARD
        return OPTIMIZER if self._stepping else FORWARD

    def _is_composite(self, func: Any) -> bool:
        """Whether a call is decomposed before a device sees it.

        Without autograd, such a call arrives here whole.
        """
        known = self._composite.get(func)
        if known is None:
            has = torch._C._dispatch_has_kernel_for_dispatch_key  # noqa: SLF001  # torch has no public question for it
            name = func.name()
            known = has(name, "CompositeImplicitAutograd") and not has(name, self._device_type.upper())
            self._composite[func] = known
        return known

    def _inspect_call(self, op: str, args: Any, kwargs: Mapping[str, Any]) -> tuple[_KnownCall, _UnsentCall | None]:
        """Inspect a call before it is made; return its record, and what to send if it is new."""
        try:
            data = to_arguments(args, kwargs, self._geometry)
        except TypeError as error:
            return _KnownCall(-1, f"{op}: {error}"), None
        signature = f"{op}|{format_arguments(*data)}"
        key = _digest(signature)
        if (known := self._known.get(key)) is not None:
            return known, None
        alike = self._similar.setdefault(_digest(_NUMBERS.sub("", signature)), [])
        if len(alike) == _MAX_SIMILAR_CALLS:
            return alike[0], None
        send(self._pipe, {"at": op})
        self._pipe.flush()
        known = self._known[key] = _KnownCall(len(self._known))
        alike.append(known)
        if writes_to_overlap(op, args, kwargs):
            known.loss_reason = f"{op}: {OVERLAPPING_WRITE}"
            return known, None
        try:
            contents = _ReplayContents(op, list(instances([args, kwargs], torch.Tensor)), content_needs(op, data))
            with unset_fake_temporarily():  # tensors that are real in a fake run can be read
                with_contents = map_specs(data, contents.next_spec)
        except ValueError as error:
            known.loss_reason = f"{op}: {error}"
            return known, None
        text, sizes = format_arguments(*with_contents), [len(s) for s in contents.storages]
        new = NewCall(known.number, op, text, signature, input_bytes(data), flops(op, data), sizes, result_bytes=0)
        return known, _UnsentCall(new, b"".join(contents.storages))

    def _geometry(self, value: torch.Tensor) -> TensorSpec:
        if type(value) not in _PLAIN:
            raise TypeError(f"a case cannot hold a {type(value).__name__}")
        return spec_of(value, self._device_type)

    def _count_call(self, known: _KnownCall, phase: str, result: Any, new: _UnsentCall | None) -> None:
        """Count a call that was made, and send it if it is new."""
        if new is not None:
            op = new.message.op
            if strange_part := unsendable_part(result):
                known.loss_reason = f"{op}: its result is {strange_part}"
            else:
                message = replace(new.message, result_bytes=_result_bytes(op, result))
                send(self._pipe, message.wire(), new.contents)
        if known.loss_reason:
            self._losses[known.loss_reason] += 1
        else:
            self._counts[known.number, phase] += 1
        if new is not None or time.monotonic() - self._last_flush_s > _FLUSH_INTERVAL_S:
            self.flush()


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


class _ReplayContents:
    """Gives each tensor of a new call the contents that a replay needs."""

    def __init__(self, op: str, values: list[torch.Tensor], wanted: list[ContentNeed]) -> None:
        self._op = op
        self._pairs = iter(zip(values, wanted, strict=True))
        self.storages: list[bytes] = []

    def next_spec(self, spec: TensorSpec) -> TensorSpec:
        """Return the next tensor with a range or stored contents; raise ValueError if it cannot."""
        value, need = next(self._pairs)
        if isinstance(need, IntegersBelow):
            return replace(spec, low=0, high=need.high)
        if need is Need.EXACT and spec.numel:
            return self._with_stored_contents(value, spec)
        if not spec.numel or spec.dtype == "b8" or not _readable(value):
            return with_default_range(self._op, spec)
        return _with_value_range(value, spec) or with_default_range(self._op, spec)

    def _with_stored_contents(self, value: torch.Tensor, spec: TensorSpec) -> TensorSpec:
        if not _readable(value):
            raise ValueError("needs the exact contents of its tensors, which cannot be read")
        check_storable(spec)
        plain = value.detach().resolve_conj().resolve_neg()
        self.storages.append(storage_bytes(plain, spec.storage_nbytes))
        return replace(spec, at=OFFSET_PLACEHOLDER + len(self.storages) - 1)


def _readable(value: torch.Tensor) -> bool:
    """Whether a tensor's values can be read: not fake, not too large, no graph capture running."""
    if isinstance(value, FakeTensor) or value.numel() > _MAX_READ_ELEMENTS:
        return False
    return not (value.is_cuda and torch.cuda.is_current_stream_capturing())


def _with_value_range(value: torch.Tensor, spec: TensorSpec) -> TensorSpec | None:
    """Return a tensor with the range of its values.

    Integers always have one, floats only if none is negative; otherwise returns None.
    """
    if value.is_complex():
        return None
    plain = value.detach().resolve_neg()
    plain = plain.float() if plain.is_floating_point() and plain.element_size() == 1 else plain
    plain = plain.long() if is_integral(spec) else plain
    low, high = (bound.item() for bound in torch.aminmax(plain))
    if is_integral(spec):
        return replace(spec, low=int(low), high=min(int(high) + 1, (1 << 63) - 1))
    varied = low < high or (spec.numel == 1 and low > 0)
    if not (math.isfinite(high) and low >= 0 and varied):
        return None
    return replace(spec, low=_rounded_outward(low, math.floor), high=_rounded_outward(high, math.ceil))


def _rounded_outward(number: float, towards: Callable[[float], int]) -> float:
    """Return a number rounded to two digits, away from the inside of the range."""
    if number == 0:
        return 0.0
    unit = 10.0 ** (math.floor(math.log10(abs(number))) - 1)
    return float(f"{towards(number / unit) * unit:.3g}")


def _result_bytes(op: str, result: Any) -> int:
    """Return the bytes of a call's result; 0 for views of its inputs."""
    facts = table().get(op)
    if facts is not None and facts.returns and all(r.alias is not None for r in facts.returns):
        return 0
    return sum(t.numel() * t.element_size() for t in instances(result, torch.Tensor))
