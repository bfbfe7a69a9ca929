"""A user's own reference: it runs in a worker like a kernel and answers over the wire."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from opforge.cases.tensors import owned_copy, same_bytes, tensor_from_row
from opforge.cases.wire import SHORT_DTYPES, TORCH_DTYPES
from opforge.judge.kernel_worker import KernelWorker, WorkerConfig, WorkerDiedError
from opforge.judge.reference.aten import (
    CallOutcome,
    ReferenceCall,
    ReferenceFaultError,
    ReferenceRaisedError,
    wide_dtype,
    widen,
)
from opforge.judge.wire_arguments import INPUTS_OFFSET, aligned_size, replace_tensor_rows, storage_bytes, tensor_rows
from opforge.judge.worker_folders import WorkerFolders
from opforge.runtime.trees import instances
from opforge.sandbox.host.client import Spawner
from opforge.sandbox.host.reply import (
    CallReply,
    CallsReply,
    LoadReply,
    MalformedReplyError,
    ReportedDtype,
    ReportedObject,
    ReportedTensor,
    Returned,
)
from opforge.sandbox.host.request import CallRequest, CaseRequest, LoadRequest

_MAX_DEATHS = 3
_RELATIVE_INPUT_CHANGE = 1e-9
"""Relative change of an input, to detect whether a function rounds internally."""

InputChange = Callable[[torch.Tensor], torch.Tensor]


class UserReference:
    """Worker process of a user's reference.

    A process that dies is restarted a few times. Its death is never blamed on a kernel.
    """

    def __init__(
        self, spawner: Spawner, config: WorkerConfig, worker_folders: WorkerFolders | None, description: dict[str, Any]
    ) -> None:
        self._spawner = spawner
        self._config = config
        self._worker_folders = worker_folders
        self.description = description
        self.uses_rng: bool | None = None
        """Whether it draws random numbers; None until checked."""
        self._worker: KernelWorker | None = None
        self._deaths = 0
        self._failure: ReferenceFaultError | None = None

    def answer(self, call: UserCall, change: InputChange | None) -> CallOutcome:
        """Return the reference's answer to a call; ``change`` is applied to its inputs if given."""
        inputs = replace(call, device=torch.device("cpu"), owns_storage=False).build_arguments(change)[2]
        try:
            reply = self._ask(self._ready_worker(), call, inputs, wide=change is not None)
            return self._answer_from_reply(reply, inputs)
        except (ReferenceRaisedError, ReferenceFaultError) as error:
            return CallOutcome(inputs=inputs, raised=error)
        except WorkerDiedError as death:
            self._count_death(death)
            return CallOutcome(
                inputs=inputs, raised=ReferenceFaultError(f"gave no result for this case: {_death_reason(death)}")
            )
        except (MalformedReplyError, IndexError, KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:
            return CallOutcome(inputs=inputs, raised=ReferenceFaultError(f"gave no readable result: {error}"))

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def _ready_worker(self) -> KernelWorker:
        """Return the reference's worker, with the reference loaded."""
        if self._failure is not None:
            raise self._failure
        if self._worker is None:
            worker = KernelWorker(self._spawner, self._config, self.confinement())
            try:
                self._worker = load_reference(worker, self.description)
            except ReferenceFaultError as error:
                self._failure = error
                raise
        return self._worker

    def confinement(self) -> Any:
        """Return the folder and permissions of a reference's process; None if unconfined."""
        return (
            None
            if self._worker_folders is None
            else self._worker_folders.reference_confinement(self.description["file"], self.description.get("library"))
        )

    def _count_death(self, death: WorkerDiedError) -> None:
        self._worker = None
        self._deaths += 1
        if self._deaths >= _MAX_DEATHS:
            self._failure = ReferenceFaultError(
                f"is not called any more: its process died {self._deaths} times ({_death_reason(death)})"
            )

    def _ask(self, worker: KernelWorker, call: UserCall, inputs: list[torch.Tensor], *, wide: bool) -> CallReply:
        """Write the inputs into the reference's arena, call it and return its reply."""
        rows: list[list[Any]] = []
        start = INPUTS_OFFSET
        for tensor, row in zip(inputs, tensor_rows([call.args, call.kwargs]), strict=True):
            contents = storage_bytes(tensor.cpu())
            if start + len(contents) > self._config.input_bytes:
                raise ReferenceFaultError("was not called: the inputs take more memory than its arena has")
            worker.arena_view[start : start + len(contents)] = contents
            geometry = [list(tensor.shape), list(tensor.stride()), tensor.storage_offset()]
            rows.append([start, len(contents), SHORT_DTYPES[tensor.dtype], *geometry, row[6]])
            start += aligned_size(len(contents))
        args, kwargs = replace_tensor_rows([call.args, call.kwargs], iter(rows))
        if wide:
            args, kwargs = _widened(args), _widened(kwargs)
        watch_rng = True if call.rng_seed is not None else None
        case = CaseRequest(args, kwargs, owns_storage=True, seed=call.rng_seed, watch_rng=watch_rng)
        random = call.rng_seed is not None or bool(self.uses_rng)
        answer = worker.ask(CallRequest(call.op, [case], random, trusted=True))
        (reply,) = CallsReply.from_wire(answer, 1, self._config.results_region).calls
        return reply

    def _answer_from_reply(self, reply: CallReply, inputs: list[torch.Tensor]) -> CallOutcome:
        if reply.escape_attempts:
            raise ReferenceFaultError(reply.escape_attempts)
        if reply.exited is not None:
            raise ReferenceFaultError(f"tried to end its process: SystemExit({reply.exited})")
        if reply.raised is not None:
            raise ReferenceRaisedError(*reply.raised)
        if reply.state_changes:
            raise ReferenceFaultError(f"changed global state: {'; '.join(reply.state_changes)}")
        if reply.malformed or reply.inputs is None or len(reply.inputs) != len(inputs):
            raise MalformedReplyError(reply.malformed)
        after = [self._tensor(tensor) for tensor in reply.inputs]
        shared: dict[int, list[int]] = {}
        result = self._value(reply.returned, after, shared)
        return CallOutcome(after, result, used_rng=reply.used_rng, shared_inputs=shared)

    def _value(self, reported: Returned, after: list[torch.Tensor], shared: dict[int, list[int]]) -> Any:
        match reported:
            case list():
                return [self._value(v, after, shared) for v in reported]
            case ReportedTensor():
                tensor = after[reported.same[0]] if reported.same else self._tensor(reported)
                shared[id(tensor)] = list(reported.aliases)
                return tensor
            case ReportedDtype(short):
                return TORCH_DTYPES[short]
            case ReportedObject(kind):
                raise ReferenceFaultError(f"returned {kind}, which cannot be compared")
            case str():
                raise MalformedReplyError
        return reported

    def _tensor(self, reported: ReportedTensor | None) -> torch.Tensor:
        """Return a tensor of the reference's reply with its elements, dtype, strides and device."""
        if reported is None:
            raise MalformedReplyError
        if reported.subclass:
            raise ReferenceFaultError(f"returned a {reported.subclass}, a subclass of Tensor")
        if self._worker is None:
            raise ReferenceFaultError("is gone")
        start, device = reported.start, torch.device(reported.device)
        contents = bytearray(self._worker.arena_view[start : start + reported.nbytes])
        strided = _with_strides(tensor_from_row(contents, reported.row(start)), list(reported.strides))
        return strided if device == strided.device else owned_copy(strided, device)


@dataclass(frozen=True, slots=True)
class UserCall(ReferenceCall):
    """A call that a user's reference answers, in its own process."""

    reference: UserReference | None = None

    def run(self, change: InputChange | None = None) -> CallOutcome:
        """Ask the reference; an exception is part of the answer."""
        if self.reference is None:
            raise ValueError("the call has no reference")
        return self.reference.answer(self, change)

    def run_ahead(self, change: InputChange | None = None) -> CallOutcome:
        """Ask the reference and wait: its answer is on the CPU."""
        return self.run(change)

    def run_poisoned(self) -> CallOutcome:
        """Call again as usual: the memory of another process cannot be poisoned from here."""
        return self.run()

    def rounds_internally(self) -> bool:
        """Whether the reference rounds float64 inputs to a narrower dtype internally.

        The inputs are moved slightly, so that no narrower dtype holds them. If a narrower dtype
        still holds all results, the reference rounds.
        """
        plain, moved = self.run(), self.run(_perturbed)
        if plain.tensors is None or moved.tensors is None:
            return False
        pairs = zip(instances(plain.result, torch.Tensor), instances(moved.result, torch.Tensor), strict=False)
        floats = [(p, m) for p, m in pairs if wide_dtype(p.dtype) is not None]
        return bool(floats) and all(_represents(p.dtype, m) for p, m in floats)

    def writes_inputs(self, answer: CallOutcome) -> bool:
        """Whether the reference changed an input."""
        before = replace(self, device=torch.device("cpu"), owns_storage=False).build_arguments()[2]
        return any(b.shape != a.shape or not same_bytes(b, a.cpu()) for b, a in zip(before, answer.inputs, strict=True))


def load_reference(worker: KernelWorker, description: dict[str, Any]) -> KernelWorker:
    """Load a user's reference into a worker and return it; raise ReferenceFaultError on failure."""
    try:
        answer = worker.ask(LoadRequest(description), timeout_s=worker.config.preparation_timeout_s)
        reply = LoadReply.from_wire(answer)
        fault = reply.escape_attempts or reply.error
    except WorkerDiedError as death:
        raise ReferenceFaultError(f"cannot be loaded: {_death_reason(death)}") from None
    except MalformedReplyError as error:
        fault = str(error)
    if fault:
        worker.close()
        raise ReferenceFaultError(f"cannot be loaded: {fault}")
    return worker


def _perturbed(tensor: torch.Tensor) -> torch.Tensor:
    wide = widen(tensor)
    return wide * (1 + _RELATIVE_INPUT_CHANGE) if wide.dtype in (torch.float64, torch.complex128) else wide


def _represents(dtype: torch.dtype, tensor: torch.Tensor) -> bool:
    """Whether a dtype represents all finite numbers of a tensor exactly."""
    finite = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    narrow = dtype.to_real() if dtype.is_complex else dtype
    finite = finite[finite.isfinite()]
    return bool((finite.to(narrow).to(finite.dtype) == finite).all())


def _death_reason(death: WorkerDiedError) -> str:
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
