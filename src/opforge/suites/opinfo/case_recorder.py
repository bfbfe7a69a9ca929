"""Record dispatched calls as cases: arguments as data, with tensor contents before the call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from opforge.cases.text import format_arguments
from opforge.cases.values import TensorSpec
from opforge.ops import Operator, SchemaKind, table
from opforge.runtime.trees import instances, map_instances
from opforge.suites.opinfo.stream import RecordedCase
from opforge.traces.capture import (
    OVERLAPPING_WRITE,
    arguments_json,
    operator_name,
    spec_of,
    storage_bytes,
    storage_size,
    to_arguments,
    unsendable_part,
    writes_to_overlap,
)
from opforge.traces.stream import OFFSET_PLACEHOLDER

PHASES = ("forward", "backward", "variant", "composite", "error")
"""Origins of a call, the best first.

``variant`` is an in-place or out form, ``composite`` a direct call, ``error`` an invalid input.
"""
_MAX_STORED_BYTES = 4 << 20
"""Byte limit for storing floating-point storages; larger ones get seeded contents."""
_MAX_CASES_PER_VARIANT = 64
"""Limit of derived cases per in-place or out form and OpInfo entry."""

Finish = Callable[..., None]
"""Called after the call, with whether it raised, and its result."""


@dataclass
class Snapshot:
    """The arguments of a call as data, taken before the call."""

    home: str
    """Device type of the recording; only tensors on other devices store their device."""
    keep: bool
    storages: list[bytes] = field(default_factory=list)

    def tensor(self, value: torch.Tensor) -> TensorSpec:
        if type(value) not in (torch.Tensor, torch.nn.Parameter):
            raise TypeError(f"a case cannot hold a {type(value).__name__}")
        if value.layout == torch.strided and not value.is_meta:
            value = _plain(value)
        spec = spec_of(value, self.home)
        nbytes = storage_size(value)
        is_seeded = nbytes > _MAX_STORED_BYTES and value.is_floating_point()
        if is_seeded or not nbytes:
            return spec
        placeholder = OFFSET_PLACEHOLDER + len(self.storages)
        self.storages.append(storage_bytes(value, nbytes) if self.keep else b"")
        size = None if nbytes == spec.storage_nbytes else nbytes
        return TensorSpec(spec.shape, spec.dtype, spec.stride, spec.offset, spec.device, placeholder, size)


def _plain(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor with its values in memory: no lazy conjugation, negation or zero tensor."""
    if torch._is_zerotensor(value):  # noqa: SLF001  # torch has no public test for it
        value = torch.zeros(value.shape, dtype=value.dtype, device=value.device)
    return value.detach().resolve_conj().resolve_neg()


class CaseRecorder:
    """Emits one case for each new signature."""

    def __init__(self, emit: Callable[[RecordedCase], None], device: str) -> None:
        self._emit = emit
        self._home = torch.device(device).type
        self._seen: dict[str, int] = {}
        """Earliest phase in which each signature was seen, as an index into PHASES."""
        self._variants: Counter[str] = Counter()
        self.losses: Counter[str] = Counter()
        self.phase = "forward"

    def begin_entry(self) -> None:
        """Reset the count of derived cases for a new OpInfo entry."""
        self._variants.clear()

    def begin_call(self, op: str, args: Any, kwargs: Mapping[str, Any]) -> Finish | None:
        """Snapshot a call before it runs.

        Returns a function to call with the outcome, or None if the call is known or unusable.
        """
        try:
            geometry = to_arguments(args, kwargs, Snapshot(self._home, keep=False).tensor)
            signature = f"{op}|{format_arguments(*geometry)}"
        except TypeError as error:
            self.losses[f"{op}: {error}"] += 1
            return None
        if self.phase != "error" and writes_to_overlap(op, args, kwargs):
            self.losses[f"{op}: {OVERLAPPING_WRITE}"] += 1
            return None
        if signature in self._seen:
            self._emit_earlier_phase(op, signature)
            return None
        snapshot = Snapshot(self._home, keep=True)
        data = to_arguments(args, _with_filled_outs(op, args, kwargs), snapshot.tensor)

        def finish(raised: bool, result: Any = None) -> None:
            if raised != (self.phase == "error"):
                return
            if oddity := unsendable_part(result):
                self.losses[f"{op}: its result is {oddity}"] += 1
                return
            self._seen[signature] = PHASES.index(self.phase)
            self._emit(
                RecordedCase(
                    op, self.phase, raised, format_arguments(*data), signature, arguments_json(data), snapshot.storages
                )
            )

        return finish

    def _emit_earlier_phase(self, op: str, signature: str) -> None:
        """Emit an update if a known call is seen in an earlier phase.

        A derived call may also be dispatched itself.
        """
        rank = PHASES.index(self.phase)
        if rank < self._seen[signature] and self.phase != "error":
            self._seen[signature] = rank
            self._emit(RecordedCase(op, self.phase, False, "", signature, "", []))

    def record_other_kinds(self, op: str, args: Any, kwargs: Mapping[str, Any]) -> None:
        """Record the in-place and out forms of a functional call, if ATen accepts them."""
        facts = table().get(op)
        if facts is None or facts.kind is not SchemaKind.FUNCTIONAL or facts.is_random:
            return
        phase, self.phase = self.phase, "variant"
        try:
            for other in table().family(facts):
                if (
                    other.kind in (SchemaKind.INPLACE, SchemaKind.OUT)
                    and self._variants[other.name] < _MAX_CASES_PER_VARIANT
                ):
                    self._variants[other.name] += self._derive_form(facts, other, args, kwargs)
        finally:
            self.phase = phase

    def _derive_form(self, functional: Operator, other: Operator, args: Any, kwargs: Mapping[str, Any]) -> bool:
        named = dict(kwargs)
        try:
            if other.kind is SchemaKind.OUT:
                result = call_aten(functional.name, _copied(args), _copied(named))
                outs = list(result) if isinstance(result, tuple) else [result]
                names = [a.name for a in other.arguments if a.writes]
                named.update({name: _out_tensor(out) for name, out in zip(names, outs, strict=True)})
            result = call_aten(other.name, _copied(args), _copied(named))
        except Exception:  # noqa: BLE001  # ATen rejects this form with these arguments: no case
            return False
        finish = self.begin_call(other.name, args, named)
        if finish is None:
            return False
        finish(False, result)
        return True


class RecordingMode(TorchDispatchMode):
    """Passes every ATen call to a recorder."""

    def __init__(self, recorder: CaseRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace != "aten":
            return func(*args, **kwargs)
        op = operator_name(func)
        finish = self._recorder.begin_call(op, args, kwargs)
        if finish is None:
            return func(*args, **kwargs)
        copies = _copied([list(args), kwargs])
        try:
            result = func(*args, **kwargs)
        except Exception:  # ATen may raise anything; passed on
            if _raises_only_for_out(op, *copies):
                self._recorder.losses[
                    f"{op}: raises only because of its out tensor, which a functional kernel never sees"
                ] += 1
            elif _raises_on_copies(op, *copies):
                finish(True)
            else:
                self._recorder.losses[f"{op}: raises only because its arguments share memory"] += 1
            raise
        finish(False, result)
        if self._recorder.phase != "error":
            self._recorder.record_other_kinds(op, *copies)
        return result


def call_aten(op: str, args: Any, kwargs: Any) -> Any:
    """Call an overload by its name."""
    base, _, overload = op.partition(".")
    with torch.no_grad():
        return getattr(getattr(torch.ops.aten, base), overload)(*args, **kwargs)


def _raises_on_copies(op: str, args: Any, kwargs: Any) -> bool:
    """Whether a call also raises on copies of its arguments, as a case would pass them."""
    try:
        call_aten(op, args, kwargs)
    except Exception:  # noqa: BLE001  # any error is the answer
        return True
    return False


def _raises_only_for_out(op: str, args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether the functional form of an out call accepts the same inputs."""
    facts = table().get(op)
    if facts is None or facts.kind is not SchemaKind.OUT:
        return False
    functional = next((o for o in table().family(facts) if o.kind is SchemaKind.FUNCTIONAL), None)
    if functional is None:
        return False
    written = {a.name for a in facts.arguments if a.writes}
    return not _raises_on_copies(functional.name, args, {n: v for n, v in kwargs.items() if n not in written})


def _with_filled_outs(op: str, args: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return keyword arguments in which out tensors have fixed contents, unless they share memory with an input.

    ATen passes uninitialised out tensors on; recording those would make every recording different.
    """
    facts = table().get(op)
    if facts is None or facts.kind is not SchemaKind.OUT:
        return dict(kwargs)
    written = {a.name for a in facts.arguments if a.writes} & kwargs.keys()
    inputs = [args, {name: value for name, value in kwargs.items() if name not in written}]
    shared = {_storage_address(value) for value in instances(inputs, torch.Tensor)}

    def filled(value: torch.Tensor) -> torch.Tensor:
        copy = value if _storage_address(value) in shared else _copied_tensor(value)
        if copy is not value:
            copy.as_strided((storage_size(copy) // copy.element_size(),), (1,), 0).fill_(7)
        return copy

    return {**kwargs, **{name: map_instances(kwargs[name], torch.Tensor, filled) for name in written}}


def _storage_address(value: torch.Tensor) -> int:
    return value.untyped_storage().data_ptr() if value.layout == torch.strided and not value.is_meta else 0


def _copied(tree: Any) -> Any:
    return map_instances(tree, torch.Tensor, _copied_tensor)


def _copied_tensor(value: torch.Tensor) -> torch.Tensor:
    """Copy a tensor with its geometry; one that a case cannot hold is returned as it is."""
    plain_class = type(value) in (torch.Tensor, torch.nn.Parameter)
    if not plain_class or value.layout != torch.strided or value.is_quantized or value.is_meta:
        return value
    plain = value.detach().resolve_conj().resolve_neg()
    count = plain.untyped_storage().nbytes() // plain.element_size()
    flat = plain.as_strided((count,), (1,), 0).clone()
    return flat.as_strided(plain.shape, plain.stride(), plain.storage_offset())


def _out_tensor(result: Any) -> Any:
    """Return an out tensor for a result: same geometry, other contents."""
    if isinstance(result, list | tuple):
        return [_out_tensor(r) for r in result]
    return torch.empty_strided(result.shape, result.stride(), dtype=result.dtype, device=result.device).fill_(7)
