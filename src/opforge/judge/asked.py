"""A user's own reference: it runs in a worker like a kernel and answers over the wire."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from opforge.cases.encoding import SHORT_DTYPES, TORCH_DTYPES
from opforge.cases.materialise import flat_bytes, owned_copy, tensor_over
from opforge.cases.values import contiguous_strides
from opforge.judge.reference import (
    Answer,
    Call,
    ReferenceFaultError,
    ReferenceRaisedError,
    tensors_of,
    wide_dtype,
    widen,
)
from opforge.judge.replies import FORGED, replies_of
from opforge.judge.rooms import Rooms
from opforge.judge.trees import INPUTS_AT, aligned, rows_of, storage_bytes, with_rows
from opforge.judge.workers import DeathError, KernelWorker, WorkerConfig
from opforge.sandbox.client import Spawner

LOAD_LIMIT_S = 120.0
_MAX_DEATHS = 3
_RELATIVE_INPUT_CHANGE = 1e-9
"""Relative change of an input, to detect whether a function rounds internally."""

Change = Callable[[torch.Tensor], torch.Tensor]


class Reference:
    """Worker process of a user's reference.

    A process that dies is restarted a few times. Its death is never blamed on a kernel.
    """

    def __init__(self, spawner: Spawner, config: WorkerConfig, rooms: Rooms | None, described: dict[str, Any]) -> None:
        self._spawner = spawner
        self._config = config
        self._rooms = rooms
        self.described = described
        self.draws: bool | None = None
        """Whether it draws random numbers; None until checked."""
        self._worker: KernelWorker | None = None
        self._deaths = 0
        self._broken: ReferenceFaultError | None = None

    def answer(self, call: AskedCall, change: Change | None) -> Answer:
        """Return the reference's answer to a call; ``change`` is applied to its inputs if given."""
        inputs = replace(call, device=torch.device("cpu"), own=False).build(change)[2]
        try:
            reply = self._ask(self._ready(), call, inputs, wide=change is not None)
            return self._answer_from_reply(reply, inputs)
        except (ReferenceRaisedError, ReferenceFaultError) as error:
            return Answer(inputs=inputs, raised=error)
        except DeathError as death:
            self._count_death(death)
            return Answer(
                inputs=inputs, raised=ReferenceFaultError(f"gave no answer to this case: {_death_reason(death)}")
            )
        except (KeyError, IndexError, TypeError, ValueError, OverflowError, RuntimeError) as error:
            return Answer(inputs=inputs, raised=ReferenceFaultError(f"gave no answer that can be read: {error}"))

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def _ready(self) -> KernelWorker:
        """Return the reference's worker, with the reference loaded."""
        if self._broken is not None:
            raise self._broken
        if self._worker is None:
            worker = KernelWorker(self._spawner, self._config, self.room())
            try:
                self._worker = load(worker, self.described, self._config.timeout_s)
            except ReferenceFaultError as error:
                self._broken = error
                raise
        return self._worker

    def room(self) -> Any:
        """Return the folder and permissions of a reference's process; None if unconfined."""
        return (
            None
            if self._rooms is None
            else self._rooms.reference(self.described["file"], self.described.get("library"))
        )

    def _count_death(self, death: DeathError) -> None:
        self._worker = None
        self._deaths += 1
        if self._deaths >= _MAX_DEATHS:
            self._broken = ReferenceFaultError(
                f"is not asked any more: its process was lost {self._deaths} times ({_death_reason(death)})"
            )

    def _ask(self, worker: KernelWorker, call: AskedCall, inputs: list[torch.Tensor], *, wide: bool) -> dict[str, Any]:
        """Write the inputs into the reference's arena, call it and return its reply."""
        rows: list[list[Any]] = []
        start = INPUTS_AT
        for tensor, row in zip(inputs, rows_of([call.args, call.kwargs]), strict=True):
            contents = storage_bytes(tensor.cpu())
            if start + len(contents) > self._config.in_bytes:
                raise ReferenceFaultError("was not asked: the inputs take more than its arena has")
            worker.bytes[start : start + len(contents)] = contents
            geometry = [list(tensor.shape), list(tensor.stride()), tensor.storage_offset()]
            rows.append([start, len(contents), SHORT_DTYPES[tensor.dtype], *geometry, row[6]])
            start += aligned(len(contents))
        args, kwargs = with_rows([call.args, call.kwargs], iter(rows))
        case: dict[str, Any] = {"args": args, "kwargs": kwargs, "own": True}
        if wide:
            case |= {"args": _widened(args), "kwargs": _widened(kwargs)}
        if call.seed is not None:
            case |= {"seed": call.seed, "watch_draws": True}
        random = call.seed is not None or bool(self.draws)
        message = worker.ask({"do": "call", "op": call.op, "random": random, "cases": [case], "trusted": True})
        replies = replies_of(message, 1)
        if replies is None:
            raise ReferenceFaultError(f"gave no answer that can be read: {FORGED}")
        return replies[0]

    def _answer_from_reply(self, reply: dict[str, Any], inputs: list[torch.Tensor]) -> Answer:
        if tried := reply.get("tried"):
            raise ReferenceFaultError(str(tried))
        if "exited" in reply:
            raise ReferenceFaultError(f"tried to end its process: SystemExit({reply['exited']})")
        if "raised" in reply:
            kind, text = reply["raised"]
            raise ReferenceRaisedError(str(kind), str(text))
        if changes := reply.get("state"):
            raise ReferenceFaultError(f"changed global state: {'; '.join(map(str, changes))}")
        after = [self._tensor({"T": row}) for row in reply["inputs"]]
        if len(after) != len(inputs):
            raise ReferenceFaultError(f"gave no answer that can be read: {FORGED}")
        shared: dict[int, list[int]] = {}
        result = self._value(reply["returned"], after, shared)
        return Answer(after, result, drew=bool(reply.get("drew")), shared=shared)

    def _value(self, reported: Any, after: list[torch.Tensor], shared: dict[int, list[int]]) -> Any:
        match reported:
            case list():
                return [self._value(v, after, shared) for v in reported]
            case {"T": _}:
                same = reported.get("same")
                tensor = after[same[0]] if same else self._tensor(reported)
                shared[id(tensor)] = [int(i) for i in reported.get("alias", [])]
                return tensor
            case {"complex": [real, imaginary]}:
                return complex(real, imaginary)
            case {"dtype": short}:
                return TORCH_DTYPES[short]
            case None | bool() | int() | float():
                return reported
            case {"junk": kind}:
                raise ReferenceFaultError(f"returned {kind}, which cannot be compared")
        raise ReferenceFaultError(f"gave no answer that can be read: {FORGED}")

    def _tensor(self, reported: dict[str, Any]) -> torch.Tensor:
        """Return a tensor of the reference's reply with its elements, dtype, strides and device."""
        if "class" in reported:
            raise ReferenceFaultError(f"returned a {reported['class']}, a subclass of Tensor")
        if self._worker is None:
            raise ReferenceFaultError("is gone")
        start, nbytes, dtype, shape, strides, _offset, device = reported["T"]
        if not (self._config.in_bytes <= start <= start + nbytes <= self._config.arena_bytes):
            raise ReferenceFaultError(f"gave no answer that can be read: {FORGED}")
        contents = bytearray(self._worker.bytes[start : start + nbytes])
        flat = tensor_over(contents, [0, nbytes, dtype, shape, contiguous_strides(tuple(shape)), 0, None])
        strided = _with_strides(flat, strides)
        return strided if torch.device(device) == strided.device else owned_copy(strided, torch.device(device))


@dataclass(frozen=True, slots=True)
class AskedCall(Call):
    """A call that a user's reference answers, in its own process."""

    reference: Reference | None = None

    def run(self, change: Change | None = None) -> Answer:
        """Ask the reference; an exception is part of the answer."""
        if self.reference is None:
            raise ValueError("the call has no reference")
        return self.reference.answer(self, change)

    def run_poisoned(self) -> Answer:
        """Call again as usual: the memory of another process cannot be poisoned from here."""
        return self.run()

    def rounds_inside(self) -> bool:
        """Whether the reference rounds float64 inputs to a narrower dtype internally.

        The inputs are moved slightly, so that no narrower dtype holds them. If a narrower dtype
        still holds all results, the reference rounds.
        """
        plain, moved = self.run(), self.run(_moved)
        if plain.tensors is None or moved.tensors is None:
            return False
        pairs = zip(tensors_of(plain.result), tensors_of(moved.result), strict=False)
        floats = [(p, m) for p, m in pairs if wide_dtype(p.dtype) is not None]
        return bool(floats) and all(_holds(p.dtype, m) for p, m in floats)

    def writes(self, answer: Answer) -> bool:
        """Whether the reference changed an input."""
        before = replace(self, device=torch.device("cpu"), own=False).build()[2]
        return any(
            b.shape != a.shape or not torch.equal(flat_bytes(b), flat_bytes(a.cpu()))
            for b, a in zip(before, answer.inputs, strict=True)
        )


def load(worker: KernelWorker, described: dict[str, Any], timeout_s: float) -> KernelWorker:
    """Load a user's reference into a worker and return it; raise ReferenceFaultError on failure."""
    try:
        reply = worker.ask({"do": "load", "kernel": described}, timeout_s=max(LOAD_LIMIT_S, timeout_s))
    except DeathError as death:
        raise ReferenceFaultError(f"cannot be loaded: {_death_reason(death)}") from None
    fault = reply.get("tried") or reply.get("error") if isinstance(reply, dict) else FORGED
    if fault:
        worker.close()
        raise ReferenceFaultError(f"cannot be loaded: {fault}")
    return worker


def _moved(tensor: torch.Tensor) -> torch.Tensor:
    wide = widen(tensor)
    return wide * (1 + _RELATIVE_INPUT_CHANGE) if wide.dtype in (torch.float64, torch.complex128) else wide


def _holds(dtype: torch.dtype, tensor: torch.Tensor) -> bool:
    """Whether a dtype represents all finite numbers of a tensor exactly."""
    finite = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    narrow = dtype.to_real() if dtype.is_complex else dtype
    finite = finite[finite.isfinite()]
    return bool((finite.to(narrow).to(finite.dtype) == finite).all())


def _death_reason(death: DeathError) -> str:
    return str(death).replace("the kernel's process", "its process")


def _with_strides(flat: torch.Tensor, strides: list[int]) -> torch.Tensor:
    """Return the tensor with the given strides, which are 0 for expanded dimensions.

    It is returned unchanged if strides are negative, or span too little or too much memory.
    """
    if list(flat.stride()) == strides or flat.numel() <= 1:
        return flat
    narrow = flat
    for dim, step in enumerate(strides):
        if step == 0:
            narrow = narrow.narrow(dim, 0, 1)
    span = sum((size - 1) * step for size, step in zip(narrow.shape, strides, strict=True)) + 1
    if any(step < 0 for step in strides) or not narrow.numel() <= span <= 64 * narrow.numel() + 4096:
        return flat
    base = torch.zeros(span, dtype=flat.dtype).as_strided(narrow.shape, strides)
    return base.copy_(narrow).expand(flat.shape)


def _widened(tree: Any) -> Any:
    """Return a JSON tree with its dtype arguments replaced by their wide dtypes."""
    match tree:
        case {"dtype": short}:
            wide = wide_dtype(TORCH_DTYPES[short])
            return {"dtype": short if wide is None else SHORT_DTYPES[wide]}
        case list():
            return [_widened(v) for v in tree]
        case dict() if "T" not in tree:
            return {n: _widened(v) for n, v in tree.items()}
    return tree
