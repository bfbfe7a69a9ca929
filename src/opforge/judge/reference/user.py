"""A user's own reference: it runs in a worker like a kernel and answers over the wire."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from opforge.cases.tensors import flat_bytes, owned_copy, tensor_from_row
from opforge.cases.values import contiguous_strides
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
from opforge.judge.replies import MALFORMED_REPLY, parse_replies
from opforge.judge.wire_arguments import INPUTS_OFFSET, aligned_size, replace_tensor_rows, storage_bytes, tensor_rows
from opforge.judge.worker_folders import WorkerFolders
from opforge.runtime.trees import instances
from opforge.sandbox.host.client import Spawner

LOAD_TIMEOUT_S = 120.0
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
        except (KeyError, IndexError, TypeError, ValueError, OverflowError, RuntimeError) as error:
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
                self._worker = load_reference(worker, self.description, self._config.timeout_s)
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

    def _ask(self, worker: KernelWorker, call: UserCall, inputs: list[torch.Tensor], *, wide: bool) -> dict[str, Any]:
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
        case: dict[str, Any] = {"args": args, "kwargs": kwargs, "own": True}
        if wide:
            case |= {"args": _widened(args), "kwargs": _widened(kwargs)}
        if call.rng_seed is not None:
            case |= {"seed": call.rng_seed, "watch_draws": True}
        random = call.rng_seed is not None or bool(self.uses_rng)
        message = worker.ask({"do": "call", "op": call.op, "random": random, "cases": [case], "trusted": True})
        replies = parse_replies(message, 1)
        if replies is None:
            raise ReferenceFaultError(f"gave no readable result: {MALFORMED_REPLY}")
        return replies[0]

    def _answer_from_reply(self, reply: dict[str, Any], inputs: list[torch.Tensor]) -> CallOutcome:
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
            raise ReferenceFaultError(f"gave no readable result: {MALFORMED_REPLY}")
        shared: dict[int, list[int]] = {}
        result = self._value(reply["returned"], after, shared)
        return CallOutcome(after, result, used_rng=bool(reply.get("drew")), shared_inputs=shared)

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
        raise ReferenceFaultError(f"gave no readable result: {MALFORMED_REPLY}")

    def _tensor(self, reported: dict[str, Any]) -> torch.Tensor:
        """Return a tensor of the reference's reply with its elements, dtype, strides and device."""
        if "class" in reported:
            raise ReferenceFaultError(f"returned a {reported['class']}, a subclass of Tensor")
        if self._worker is None:
            raise ReferenceFaultError("is gone")
        start, nbytes, dtype, shape, strides, _offset, device = reported["T"]
        if not (self._config.input_bytes <= start <= start + nbytes <= self._config.arena_bytes):
            raise ReferenceFaultError(f"gave no readable result: {MALFORMED_REPLY}")
        contents = bytearray(self._worker.arena_view[start : start + nbytes])
        flat = tensor_from_row(contents, [0, nbytes, dtype, shape, contiguous_strides(tuple(shape)), 0, None])
        strided = _with_strides(flat, strides)
        return strided if torch.device(device) == strided.device else owned_copy(strided, torch.device(device))


@dataclass(frozen=True, slots=True)
class UserCall(ReferenceCall):
    """A call that a user's reference answers, in its own process."""

    reference: UserReference | None = None

    def run(self, change: InputChange | None = None) -> CallOutcome:
        """Ask the reference; an exception is part of the answer."""
        if self.reference is None:
            raise ValueError("the call has no reference")
        return self.reference.answer(self, change)

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
        return any(
            b.shape != a.shape or not torch.equal(flat_bytes(b), flat_bytes(a.cpu()))
            for b, a in zip(before, answer.inputs, strict=True)
        )


def load_reference(worker: KernelWorker, description: dict[str, Any], timeout_s: float) -> KernelWorker:
    """Load a user's reference into a worker and return it; raise ReferenceFaultError on failure."""
    try:
        reply = worker.ask({"do": "load", "kernel": description}, timeout_s=max(LOAD_TIMEOUT_S, timeout_s))
    except WorkerDiedError as death:
        raise ReferenceFaultError(f"cannot be loaded: {_death_reason(death)}") from None
    fault = reply.get("tried") or reply.get("error") if isinstance(reply, dict) else MALFORMED_REPLY
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
