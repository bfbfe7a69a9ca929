"""The process of one kernel: calls it on cases and returns the results. It judges nothing."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import mmap
import os
import struct
from collections.abc import Callable
from os import getpid
from pathlib import Path
from time import perf_counter_ns, sleep  # bound before any kernel is loaded
from typing import Any

import torch
from torch.cuda import _sleep, empty_cache, mem_get_info, memory_reserved, synchronize

from opforge.cases.tensors import flat_bytes, flat_storage, one_tensor_per_offset, owned_copy, tensor_from_row
from opforge.cases.wire import SHORT_DTYPES, decode
from opforge.procs.channel import Channel
from opforge.runtime.aten_kernels import dispatch_key
from opforge.sandbox.guard import blocked_functions, readable_paths
from opforge.sandbox.guard.audit import AuditHook
from opforge.sandbox.guard.confinement import confinement_from_wire
from opforge.sandbox.guard.integrity import FunctionSnapshot
from opforge.sandbox.guard.registrations import registration_snapshot
from opforge.sandbox.guard.traps import Traps, non_aten_operators
from opforge.sandbox.guest.aliases import InputAliases
from opforge.sandbox.guest.cpu_timed_calls import HOST_KERNEL_CALLERS, HostTimedCalls, result_parts
from opforge.sandbox.guest.global_state import GlobalState, generator_state, seed_generator, start_device
from opforge.sandbox.guest.input_file import InputFileRunner
from opforge.sandbox.guest.kept_results import KeptResults, call_and_keep
from opforge.sandbox.guest.loader import (
    KernelLoadError,
    LoadedKernel,
    aten_function,
    describe_exception,
    find_operator,
    gradients,
    override_aten,
)
from opforge.sandbox.guest.native_runtime import NativeRuntime
from opforge.sandbox.guest.pending_copies import MAX_CLONED_BYTES, FailedTogetherError, PendingCopies
from opforge.sandbox.guest.situations import (
    INFERENCE_MODE,
    KEPT_RESULTS,
    LAZY_CLONE,
    REQUIRES_GRAD,
    THREADS,
    call_in,
    call_in_two_threads,
    input_for,
)
from opforge.sandbox.guest.timed_calls import GPU_KERNEL_CALLERS, TimedCalls
from opforge.sandbox.guest.triton_autotuning import keep_short
from opforge.sandbox.guest.triton_interpreter import serialize_launches
from opforge.sandbox.mutants.mutant import Mutant

CASE_COUNTER = struct.Struct("<Q")
"""Index of the running case, at the start of the arena: tells which case a dead process was on."""
ARENA_ALIGNMENT = 64
_STREAM_PAUSE_CYCLES = 2_000_000
_MAX_OTHER_STREAMS_NS = 5_000_000
_MAX_LARGE_CASE_S = 1.0
"""Time limit for a large variant, estimated from the time per element of other cases.

A kernel estimated to take longer is not called on it.
"""
_MIN_TIMED_ELEMENTS = 64
"""A call on up to this many elements takes as long as a call on one."""
_WAITING_FIELDS = frozenset({"prefill_offsets", "large_elements", "wait_s"})
"""Fields of cases whose calls are watched or timed, and so waited for."""
_MAX_CACHED_MEMORY_SHARE = 1 / 64
"""Share of GPU memory; above it, cached memory is released after a race or a batch of calls."""


function_snapshot = functools.cache(FunctionSnapshot)
"""Functions that no kernel may replace; the server takes this snapshot before any kernel loads."""


def prepare() -> None:
    """Compute in the server what every worker would otherwise compute again."""
    function_snapshot()
    registration_snapshot()
    non_aten_operators()
    blocked_functions.function_addresses()


def serve(config: dict[str, Any], fds: list[int]) -> None:
    """Answer requests until the judge hangs up."""
    memory_fd, channel_fd, arena_fd = fds
    channel = Channel.from_fd(channel_fd)
    channel.send({"memory": True}, [memory_fd])  # for the judge; it ignores later messages of this kind
    os.close(memory_fd)
    arena = mmap.mmap(arena_fd, config["arena_bytes"])
    os.close(arena_fd)
    confinement = config.get("confinement")
    audit = AuditHook(confinement_from_wire(confinement), readable_paths.home_folders()) if confinement else None
    Worker(channel, arena, torch.device(config["device"]), config["results_offset"], audit).run()


class Worker:
    """The request loop, and the calls of a kernel."""

    def __init__(
        self,
        channel: Channel,
        arena: mmap.mmap,
        device: torch.device,
        results_offset: int,
        audit: AuditHook | None = None,
    ) -> None:
        self._channel = channel
        self._arena = arena
        self._device = device
        self._results_offset = results_offset
        self._next_offset = results_offset
        self._kernel: LoadedKernel | None = None
        self._path: Path | None = None
        self._timed_calls: TimedCalls | HostTimedCalls | None = None
        self._state_before_timing: GlobalState | None = None
        self._inputs = InputFileRunner(self._device)
        self._audit = audit
        self._pid = getpid()
        self._traps = Traps(device.type, (gradients.__code__, Worker._gradient.__code__, Worker.run.__code__))
        self._kept = KeptResults()
        self._pending: PendingCopies | None = None
        """Results that are copied later; None if each call is waited for."""
        self._native: NativeRuntime | None = None
        """The slots through which a kernel is called; None if its function is called itself."""

    def run(self) -> None:
        torch.set_grad_enabled(False)
        if self._audit is not None:
            self._audit.start()
        while True:
            request = self._channel.receive()
            match request["do"]:
                case "load":
                    reply = self._load(request["kernel"])
                case "call":
                    reply = self._call_all(request)
                case "gradient":
                    reply = self._gradient(request)
                case "allocate":
                    reply = self._allocate_timed_calls(request)
                case "estimate":
                    reply = self._on_gpu(TimedCalls.estimate)
                case "warm up":
                    reply = self._on_gpu(TimedCalls.warm_up)
                case "run":
                    reply = self._run_timed_calls(request)
                case "result":
                    reply = self._timed_result(request)
                case "registrations":
                    reply = self._tampering(thorough=True)
                case "clear":
                    reply = self._clear()
                case "tests":
                    reply = self._with_escape_attempts(self._inputs.load_tests(request["file"]))
                case "make":
                    reply = self._with_escape_attempts(
                        self._inputs.make_inputs(request, self._arena, self._results_offset)
                    )
                case unknown:
                    raise ValueError(f"unknown request {unknown!r}")
            self._exit_if_forked()
            self._channel.send(reply)
            if request["do"] == "load":
                start_device(self._device)  # while the judge has the cases answered by ATen

    def _exit_if_forked(self) -> None:
        """Exit if this is a process forked by the kernel: it must not answer for the worker."""
        if getpid() != self._pid:
            os._exit(0)

    def _with_escape_attempts(self, reply: dict[str, Any]) -> dict[str, Any]:
        """Add the kernel's attempts to break out of its confinement, if any."""
        attempts = self._audit.pop_attempts() if self._audit is not None else None
        return reply if attempts is None else {**reply, "escape_attempts": attempts}

    def _load(self, description: dict[str, Any]) -> dict[str, Any]:
        self._path = Path(description["file"]) if description["file"] else None
        state = GlobalState.now()
        if self._path is not None:
            self._traps.set_kernel_folder(self._path)
        if ops := description.get("native"):
            self._native = NativeRuntime(self._device, self._traps, ops, description["primary"])
        self._forbid(description.get("forbidden", []))
        if self._native is not None:
            self._native.install()
            self._traps.add_kernel_callers((*GPU_KERNEL_CALLERS, *HOST_KERNEL_CALLERS))
        try:
            self._kernel = LoadedKernel(description, self._traps.wrap_kernel)
            if self._native is not None:
                self._native.use(self._kernel)
        except KernelLoadError as error:
            return self._with_escape_attempts({"error": str(error)})
        if description.get("untimed"):
            keep_short()
        changes = GlobalState.now().changes_since(state, rng=False)
        return self._with_escape_attempts(
            {**self._tampering(thorough=False), **({"state": changes} if changes else {})}
        )

    def _forbid(self, operators: list[str]) -> None:
        new = [name for name in operators if name not in self._traps.trapped]
        if new:
            self._traps.add(new)
            blocked_functions.block(new)
            if self._audit is not None:
                self._audit.forbid(new)

    def _tampering(self, *, thorough: bool) -> dict[str, Any]:
        """Return the kernel's changes to functions and operators of this process, if any."""
        done = [f"replaced {name}" for name in function_snapshot().replaced()]
        if self._path is not None:
            anew = registration_snapshot().changed(self._traps.trapped, thorough=thorough)
            done += [
                f"re-registered {name}" for name in (*(f"aten::{n}" for n in self._traps.reregistered()), *anew[:8])
            ]
        return {"tampered": done} if done else {}

    def _function(self, op: str) -> Callable[..., Any]:
        if self._kernel is None:
            raise RuntimeError("no kernel is loaded")
        function = self._kernel.callable_for(op)
        return function if self._native is None else self._native.callable_for(op, function)

    def _call_all(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            return self._results(request)
        except FailedTogetherError as error:
            return {"failed_together": str(error)}
        finally:
            self._pending = None

    def _results(self, request: dict[str, Any]) -> dict[str, Any]:
        op, cases, native = request["op"], request["cases"], self._native
        random = request["random"] if "random" in request else _is_random(op)
        self._next_offset = self._results_offset
        self._kept = KeptResults()
        results = []
        try:
            function = self._function(op)
        except NotImplementedError as error:
            return {"results": [{"raised": ["NotImplementedError", str(error)]} for _ in cases]}
        state, pace_s = GlobalState.now(), math.inf
        together = (
            PendingCopies(self._tell_running) if request.get("together") and self._device.type == "cuda" else None
        )
        for index, case in enumerate(cases):
            self._tell_running(index)
            at_once = not index or not _WAITING_FIELDS.isdisjoint(case)
            if together is not None and at_once:
                together.finish()
            self._pending = None if at_once else together
            began_ns = perf_counter_ns()
            if (elements := case.get("large_elements", 0)) * pace_s > _MAX_LARGE_CASE_S:
                result: dict[str, Any] = {"raised": ["NotImplementedError", "it would take too long"]}
            else:
                in_python = native.in_python(op) if native is not None and case.get("in_python") else None
                result = self._call(in_python or function, case, index)
                if native is not None:
                    began_ns += native.pop_learning_ns()
                    result |= native.last_way if "returned" in result else {}
            if self._pending is not None:
                self._pending.end_call(index)
            elif not elements and case.get("elements"):
                pace_s = min(pace_s, (perf_counter_ns() - began_ns) / 1e9 / max(case["elements"], _MIN_TIMED_ELEMENTS))
            if isinstance(function, Mutant):
                result["mutant"] = function.effect
            after = GlobalState.now()
            if changes := after.changes_since(state, rng=not random):
                result["state"] = changes
                state.restore()
            elif random:
                state = after
            results.append(self._with_escape_attempts(result))
        if together is not None:
            together.finish()
        for index in self._kept.changed_calls():
            results[index]["changed_later"] = True
        self._kept = KeptResults()
        self._release_cached_memory()
        return {"results": results, **({} if request.get("trusted") else self._tampering(thorough=False))}

    def _call(self, function: Callable[..., Any], case: dict[str, Any], index: int) -> dict[str, Any]:
        owns_storage, situation = case["owns_storage"], case.get("situation", "")
        inputs: list[torch.Tensor] = []
        cloned: list[tuple[torch.Tensor, torch.Tensor]] = []

        @one_tensor_per_offset
        def create_tensor(row: list[Any]) -> torch.Tensor:
            argument = tensor_from_row(self._arena, row)
            if owns_storage or situation == LAZY_CLONE:
                cloned.append((argument, self._copy(argument, row)))
                argument = cloned[-1][1]
            return input_for(situation, argument)

        def tensor(row: list[Any]) -> torch.Tensor:
            inputs.append(create_tensor(row))
            return inputs[-1]

        listing = self._traps.count_calls() if case.get("count_calls") else None
        try:  # includes making the arguments: on a GPU an earlier call may have ruined the context
            args, kwargs = decode(case["args"], tensor), {n: decode(v, tensor) for n, v in case["kwargs"].items()}
            geometry = [(t.shape, t.stride(), t.storage_offset()) for t in inputs]
            if "prefill_offsets" in case:
                self._begin(function, args, kwargs, inputs, case["prefill_offsets"])
            if "seed" in case:
                seed_generator(case["seed"], self._device)
            before = generator_state(self._device) if case.get("watch_rng") else None
            with listing or contextlib.nullcontext():
                result, inputs, shared = self._call_in_situation(function, case, args, kwargs, inputs)
            early = self._early(result) if "prefill_offsets" in case else []
            busy = self._busy_elsewhere() if "prefill_offsets" in case else False
            self._wait_after(case)
            reply: dict[str, Any] = {"returned": self._describe(result, InputAliases(inputs))}
            reply["shares_result"] = self._kept.add(index, result, InputAliases(inputs)) or shared
            if unusable := _describe_unusable(result, inputs, situation):
                reply["unusable"] = unusable
            through = [
                i for i, pair in enumerate(cloned if situation == LAZY_CLONE else ()) if not _same_storage(*pair)
            ]
            reply |= {"written_through": through} if through else {}
            if before is not None and before != generator_state(self._device):
                reply["used_rng"] = True
            if busy or any(not torch.equal(flat_bytes(then), flat_bytes(now)) for now, then in early):
                reply["late"] = True
        except SystemExit as error:
            self._exit_if_forked()
            return {"exited": repr(error.code)}
        except BaseException as error:  # noqa: BLE001  # a kernel may raise anything; it becomes the verdict
            self._exit_if_forked()
            if self._pending is not None:
                self._pending.finish()
            return {
                "raised": [type(error).__name__, describe_exception(error, self._path)],
                **self._forbidden_calls(inputs),
            }
        self._exit_if_forked()
        if owns_storage:
            described = [self._tensor(t) for t in inputs]
            if junk := next((d["junk"] for d in described if "junk" in d), None):
                return {"raised": ["NotImplementedError", f"what it wrote to cannot be returned: {junk}"]}
            reply["inputs"] = [d["T"] for d in described]
        elif changed := [i for i, t in enumerate(inputs) if (t.shape, t.stride(), t.storage_offset()) != geometry[i]]:
            reply["reshaped"] = changed
        if listing is not None:
            reply["calls"] = dict(listing.calls)
        return {**reply, **self._forbidden_calls(inputs)}

    def _wait_after(self, case: dict[str, Any]) -> None:
        """Wait for a call, unless its results are copied later."""
        if "wait_s" in case:
            sleep(case["wait_s"])
        if self._pending is None:
            self._wait()

    def _tell_running(self, index: int) -> None:
        """Tell the judge the number of the call that is running."""
        CASE_COUNTER.pack_into(self._arena, 0, index)

    def _call_in_situation(
        self, function: Callable[..., Any], case: dict[str, Any], args: Any, kwargs: Any, inputs: list[torch.Tensor]
    ) -> tuple[Any, list[torch.Tensor], bool]:
        """Call the kernel in the case's situation.

        Returns its result, the inputs of that call, and whether two results share memory.
        """
        situation = case.get("situation", "")
        if situation == KEPT_RESULTS:
            result, shared = call_and_keep(functools.partial(function, *args, **kwargs), inputs)
            return result, inputs, shared
        if situation == THREADS:
            serialize_launches()  # only for Triton's interpreter; kernels on a GPU need no lock
            try:
                return *call_in_two_threads(function, lambda: self._copy_arguments(case)), False
            except Exception as error:  # noqa: BLE001  # a kernel may raise anything; ATen serves such calls
                raise NotImplementedError(f"it cannot be called from two threads: {error}") from None
        return call_in(situation, function, args, kwargs), inputs, False

    def _forbidden_calls(self, inputs: list[torch.Tensor]) -> dict[str, Any]:
        """Return the forbidden operators that the kernel called."""
        operators = self._traps.pop_forbidden_calls(floats=any(t.is_floating_point() or t.is_complex() for t in inputs))
        return {"bypass": operators} if operators else {}

    def _begin(
        self,
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
        inputs: list[torch.Tensor],
        prefill_offsets: list[int],
    ) -> None:
        """Call the kernel on other contents first, then restore the case's in the same tensors."""
        flats = [flat_storage(t) for t in inputs]
        saved = [flat.clone() for flat in flats]
        geometry = [(t.storage_offset(), t.shape, t.stride()) for t in inputs]
        for flat, offset in zip(flats, prefill_offsets, strict=True):
            if flat.numel():
                flat.copy_(torch.frombuffer(self._arena, dtype=torch.uint8, count=flat.numel(), offset=offset))
        function(*args, **kwargs)
        if self._device.type == "cuda":
            _sleep(_STREAM_PAUSE_CYCLES)  # a stream that does not wait reads the old contents
        for flat, contents, tensor, (offset, shape, strides) in zip(flats, saved, inputs, geometry, strict=True):
            if (tensor.storage_offset(), tensor.shape, tensor.stride()) != (offset, shape, strides):
                tensor.set_(contents.untyped_storage(), offset, shape, strides)  # the kernel resizes what it writes to
            else:
                flat.copy_(contents)

    def _early(self, result: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return results on a GPU with copies made on the current stream.

        The copies miss whatever another stream has not finished.
        """
        results = result if isinstance(result, list | tuple) else [result]
        return [(t, t.clone()) for t in results if isinstance(t, torch.Tensor) and t.is_cuda]

    def _busy_elsewhere(self) -> bool:
        """Whether other GPU streams are still busy when the current one is done."""
        if self._device.type != "cuda":
            return False
        torch.cuda.current_stream().synchronize()
        start = perf_counter_ns()
        synchronize()
        return perf_counter_ns() - start > _MAX_OTHER_STREAMS_NS

    def _describe(self, value: Any, input_aliases: InputAliases | None = None) -> Any:
        match value:
            case torch.Tensor():
                return self._tensor(value, input_aliases)
            case list() | tuple():
                return [self._describe(v, input_aliases) for v in value]
            case None | bool() | int() | float():
                return value
            case complex():
                return {"complex": [value.real, value.imag]}
            case torch.dtype() if value in SHORT_DTYPES:
                return {"dtype": SHORT_DTYPES[value]}
            case _:
                return {"junk": f"{type(value).__module__}.{type(value).__qualname__}"}

    def _tensor(self, tensor: torch.Tensor, input_aliases: InputAliases | None = None) -> dict[str, Any]:
        if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
            return {"junk": f"a tensor of layout {tensor.layout} on {tensor.device}"}
        if tensor.dtype not in SHORT_DTYPES:
            return {"junk": f"a tensor of dtype {tensor.dtype}"}
        flat = flat_bytes(tensor)
        offset = self._next_offset
        nbytes = flat.numel()
        if offset + nbytes > len(self._arena):
            left = len(self._arena) - offset
            return {"junk": f"a tensor of {nbytes} bytes, more than the {left} that are left for results"}
        if nbytes:
            target = torch.frombuffer(self._arena, dtype=torch.uint8, count=nbytes, offset=offset)
            if self._pending is not None and flat.is_cuda and nbytes <= MAX_CLONED_BYTES:
                self._pending.add(target, flat, is_private=not _same_memory(flat, tensor))
            else:
                target.copy_(flat)
        self._next_offset = offset + nbytes + (-nbytes % ARENA_ALIGNMENT)
        row = [
            offset,
            nbytes,
            SHORT_DTYPES[tensor.dtype],
            list(tensor.shape),
            list(tensor.stride()),
            0,
            str(tensor.device),
        ]
        described: dict[str, Any] = {"T": row}
        if input_aliases is not None and (same := input_aliases.identical(tensor)):
            described["same"] = same
        if input_aliases is not None and nbytes and (alias := input_aliases.sharing_memory(tensor)):
            described["alias"] = alias
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            described["class"] = type(tensor).__name__
        return described

    def _gradient(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the gradients through the operator, with the kernel installed."""
        args, kwargs, inputs = self._copy_arguments(request["case"])
        self._next_offset = self._results_offset
        try:
            op, key = request["op"], dispatch_key(self._device.type)
            function = self._function(op)
            if self._native is not None and self._native.serves(op, args, kwargs):
                grads = gradients(function, args, kwargs, inputs)
            else:
                with override_aten(function, op, key) if self._path else contextlib.nullcontext():
                    grads = gradients(aten_function(op), args, kwargs, inputs)
            self._wait()
            return {"results": [{"returned": self._describe(grads)}]}
        except BaseException as error:  # noqa: BLE001  # a kernel may raise anything; it becomes the verdict
            return {"results": [{"raised": [type(error).__name__, describe_exception(error, self._path)]}]}

    def _allocate_timed_calls(self, request: dict[str, Any]) -> dict[str, Any]:
        """Allocate the calls to be timed."""
        if "timed" in request:
            self._timed_calls = None  # frees its memory first
            op, case, device = (
                request["timed"]["op"],
                request["timed"]["case"],
                torch.device(request["timed"]["device"]),
            )
            function = self._function(op)
            self._timed_calls = (
                HostTimedCalls(function, case, self._arena, self._results_offset)
                if device.type == "cpu"
                else TimedCalls(function, case, self._arena, device)
            )
            if self._native is not None:
                self._call_operator(self._native, op, self._timed_calls)
            self._state_before_timing = GlobalState.now()
        timed_calls = self._require_timed_calls()

        def allocate() -> dict[str, Any]:
            if isinstance(timed_calls, HostTimedCalls):
                return timed_calls.allocate(request["sets"], request["parts"])
            return timed_calls.allocate(
                request["calls"], request["sets"], graph=request["graph"], flush_bytes=request["flush_bytes"]
            )

        return self._catching_kernel_errors(allocate)

    @staticmethod
    def _call_operator(native: NativeRuntime, op: str, timed_calls: TimedCalls | HostTimedCalls) -> None:
        """Have the operator itself called, if its slot runs the kernel."""
        args, kwargs, _tensors = timed_calls.new_set()
        if native.serves(op, args, kwargs):
            native.learn(op, args, kwargs)
            timed_calls.call_instead(aten_function(op), native.serving)

    def _on_gpu(self, step: Callable[[TimedCalls], dict[str, Any]]) -> dict[str, Any]:
        """Run a step that only races on a GPU have."""
        timed_calls = self._require_timed_calls()
        if isinstance(timed_calls, HostTimedCalls):
            raise TypeError("unknown step of host timing")
        return self._catching_kernel_errors(functools.partial(step, timed_calls))

    def _run_timed_calls(self, request: dict[str, Any]) -> dict[str, Any]:
        """Run a block of timed calls. The reply goes out at once: the judge's clock is running."""
        timed_calls = self._require_timed_calls()

        def run_block() -> dict[str, Any]:
            if isinstance(timed_calls, HostTimedCalls):
                timed_calls.run(dry=request["dry"])
                return {}
            return timed_calls.run(request)

        return self._catching_kernel_errors(run_block)

    def _timed_result(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the result of one of the calls timed last."""
        self._next_offset = self._results_offset
        result, inputs = self._require_timed_calls().result(request["call"])
        reply: dict[str, Any] = {"returned": self._describe(result, InputAliases(inputs))}
        if request["with_inputs"]:
            reply["inputs"] = [self._tensor(t).get("T") for t in inputs]
        if changes := GlobalState.now().changes_since(self._state_before_timing or GlobalState.now(), rng=False):
            reply["state"] = changes
        bypass = self._forbidden_calls(inputs)
        return {
            "result": self._with_escape_attempts({**reply, **bypass}),
            **(self._tampering(thorough=request["thorough"]) if request["check_integrity"] else {}),
        }

    def _clear(self) -> dict[str, Any]:
        """Release the timed calls: others need the memory."""
        self._timed_calls = None
        self._release_cached_memory()
        return {}

    def _release_cached_memory(self) -> None:
        if self._device.type == "cuda" and memory_reserved() > _MAX_CACHED_MEMORY_SHARE * mem_get_info()[1]:
            empty_cache()

    def _require_timed_calls(self) -> TimedCalls | HostTimedCalls:
        if self._timed_calls is None:
            raise RuntimeError("no calls are prepared for timing")
        return self._timed_calls

    def _catching_kernel_errors(self, timed: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the result of a timing step, or the exception that the kernel raised."""
        try:
            return timed()
        except BaseException as error:  # noqa: BLE001  # a kernel may raise anything; it becomes the verdict
            self._exit_if_forked()
            return {"raised": [type(error).__name__, describe_exception(error, self._path)]}

    def _copy(self, tensor: torch.Tensor, row: list[Any]) -> torch.Tensor:
        return owned_copy(tensor, torch.device(row[6]) if row[6] else self._device, ahead=True)

    def _copy_arguments(self, case: dict[str, Any]) -> tuple[list[Any], dict[str, Any], list[torch.Tensor]]:
        """Return the arguments of a case in newly allocated memory."""
        inputs: list[torch.Tensor] = []

        def tensor(row: list[Any]) -> torch.Tensor:
            inputs.append(self._copy(tensor_from_row(self._arena, row), row))
            return inputs[-1]

        return decode(case["args"], tensor), {n: decode(v, tensor) for n, v in case["kwargs"].items()}, inputs

    def _wait(self) -> None:
        if self._device.type == "cuda":
            synchronize()


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr())


def _same_storage(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(torch.equal(flat_storage(one).cpu(), flat_storage(other).cpu()))


def _is_random(op: str) -> bool:
    facts = find_operator(op)
    return facts is not None and facts.is_random


def _describe_unusable(result: Any, inputs: list[torch.Tensor], situation: str) -> str:
    """Describe how results or inputs are less usable than after ATen; empty if they are not."""
    results = [t for t in result_parts(result) if isinstance(t, torch.Tensor) and t.layout == torch.strided]
    if situation != INFERENCE_MODE and any(t.is_inference() for t in results):
        return "its result is an inference tensor: autograd cannot use it"
    if situation != REQUIRES_GRAD and any(t.requires_grad for t in (*results, *inputs)):
        return "its result, or an input after the call, requires gradients"
    if not situation and not all(_can_be_written(t.untyped_storage()) for t in results if t.device.type == "cpu"):
        return "its result is in read-only memory"
    return ""


def _can_be_written(storage: torch.UntypedStorage) -> bool:
    """Whether the first and last byte of a storage are writable.

    The operating system writes them: it returns an error where our own write would crash.
    """
    begin, nbytes = storage.data_ptr(), storage.nbytes()
    source, target = os.pipe()
    try:
        for address in {begin, begin + nbytes - 1} if nbytes else ():
            byte = (ctypes.c_char * 1).from_address(address)
            os.write(target, byte)
            os.readv(source, [byte])
    except OSError:
        return False
    finally:
        os.close(source)
        os.close(target)
    return True
