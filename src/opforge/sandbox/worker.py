"""The process of one kernel: receives cases as data, calls the kernel, hands back what came out. It judges nothing."""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Callable
from pathlib import Path
from time import perf_counter_ns  # bound before any kernel is loaded
from typing import Any

import torch

from opforge.cases.encoding import SHORT_DTYPES, decode
from opforge.cases.materialise import flat_bytes, owned_copy, tensor_over
from opforge.sandbox import reach
from opforge.sandbox.confinement import room_from
from opforge.sandbox.loader import KernelLoadError, LoadedKernel, describe_exception, operator
from opforge.sandbox.state import GlobalState
from opforge.sandbox.watch import Watch
from opforge.sandbox.wire import Channel

COUNTER = struct.Struct("<Q")
"""At the start of the arena: the index of the case being run, so that a death can be laid to the right one."""
ALIGN = 64


def serve(config: dict[str, Any], fds: list[int]) -> None:
    """Answer requests until the judge hangs up."""
    channel_fd, arena_fd = fds
    arena = mmap.mmap(arena_fd, config["arena_bytes"])
    os.close(arena_fd)
    watch = Watch(room_from(config["room"]), reach.homes()) if config.get("room") else None
    Worker(Channel.from_fd(channel_fd), arena, torch.device(config["device"]), config["out_at"], watch).run()


class Worker:
    """The loop, and how one case is called."""

    def __init__(
        self, channel: Channel, arena: mmap.mmap, device: torch.device, out_at: int, watch: Watch | None = None
    ) -> None:
        self._channel = channel
        self._arena = arena
        self._device = device
        self._out_at = out_at
        self._next = out_at
        self._kernel: LoadedKernel | None = None
        self._path: Path | None = None
        self._watch = watch

    def run(self) -> None:
        torch.set_grad_enabled(False)
        own = os.getpid()
        if self._watch is not None:
            self._watch.start()
        while True:
            request = self._channel.receive()
            match request["do"]:
                case "load":
                    reply = self._load(request["kernel"])
                case "call":
                    reply = self._call_all(request)
                case "time":
                    reply = self._time(request)
                case unknown:
                    raise ValueError(f"unknown request {unknown!r}")
            if os.getpid() != own:
                os._exit(0)  # a process that the kernel forked has come back here; it does not speak for us
            self._channel.send(reply)

    def _with_tried(self, reply: dict[str, Any]) -> dict[str, Any]:
        """Add what the kernel tried that its room does not allow, if anything."""
        tried = self._watch.take() if self._watch is not None else None
        return reply if tried is None else {**reply, "tried": tried}

    def _load(self, description: dict[str, Any]) -> dict[str, Any]:
        self._path = Path(description["file"]) if description["file"] else None
        try:
            self._kernel = LoadedKernel(description)
        except KernelLoadError as error:
            return self._with_tried({"error": str(error)})
        return self._with_tried({})

    def _function(self, op: str) -> Callable[..., Any]:
        if self._kernel is None:
            raise RuntimeError("no kernel is loaded")
        return self._kernel.callable_for(op)

    def _call_all(self, request: dict[str, Any]) -> dict[str, Any]:
        op, cases = request["op"], request["cases"]
        facts = operator(op)
        own = facts is None or facts.mutates or self._device.type != "cpu"
        self._next = self._out_at
        results = []
        try:
            function = self._function(op)
        except NotImplementedError as error:
            return {"results": [{"raised": ["NotImplementedError", str(error)]} for _ in cases]}
        state = GlobalState.now()
        for index, case in enumerate(cases):
            COUNTER.pack_into(self._arena, 0, index)
            result = self._call(function, case, own)
            after = GlobalState.now()
            if changes := after.changes_since(state, rng=not (facts and facts.random)):
                result["state"] = changes
                state.restore()
            elif facts is not None and facts.random:
                state = after
            results.append(self._with_tried(result))
        return {"results": results}

    def _call(self, function: Callable[..., Any], case: dict[str, Any], own: bool) -> dict[str, Any]:
        inputs: list[torch.Tensor] = []

        def tensor(row: list[Any]) -> torch.Tensor:
            made = tensor_over(self._arena, row)
            if own:
                made = owned_copy(made, torch.device(row[6]) if row[6] else self._device)
            inputs.append(made)
            return made

        try:  # making the arguments too: on a GPU an earlier call may have ruined the context
            args, kwargs = decode(case["args"], tensor), {n: decode(v, tensor) for n, v in case["kwargs"].items()}
            geometry = [(t.shape, t.stride(), t.storage_offset()) for t in inputs]
            if "seed" in case:
                torch.manual_seed(case["seed"])
            result = function(*args, **kwargs)
            if self._device.type == "cuda":
                torch.cuda.synchronize()
            reply: dict[str, Any] = {"returned": self._describe(result, inputs)}
        except SystemExit as error:
            return {"exited": repr(error.code)}
        except BaseException as error:  # noqa: BLE001  # the border: whatever a kernel raises is its verdict
            return {"raised": [type(error).__name__, describe_exception(error, self._path)]}
        if own:
            described = [self._tensor(t, inputs) for t in inputs]
            if junk := next((d["junk"] for d in described if "junk" in d), None):
                return {"raised": ["NotImplementedError", f"what it wrote to cannot be brought back: {junk}"]}
            reply["inputs"] = [d["T"] for d in described]
        elif changed := [i for i, t in enumerate(inputs) if (t.shape, t.stride(), t.storage_offset()) != geometry[i]]:
            reply["reshaped"] = changed
        return reply

    def _describe(self, value: Any, inputs: list[torch.Tensor]) -> Any:
        match value:
            case torch.Tensor():
                return self._tensor(value, inputs)
            case list() | tuple():
                return [self._describe(v, inputs) for v in value]
            case None | bool() | int() | float():
                return value
            case complex():
                return {"complex": [value.real, value.imag]}
            case torch.dtype() if value in SHORT_DTYPES:
                return {"dtype": SHORT_DTYPES[value]}
            case _:
                return {"junk": f"{type(value).__module__}.{type(value).__qualname__}"}

    def _tensor(self, tensor: torch.Tensor, inputs: list[torch.Tensor]) -> dict[str, Any]:
        if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
            return {"junk": f"a tensor of layout {tensor.layout} on {tensor.device}"}
        if tensor.dtype not in SHORT_DTYPES:
            return {"junk": f"a tensor of dtype {tensor.dtype}"}
        flat = flat_bytes(tensor)
        at = self._next
        nbytes = flat.numel()
        if at + nbytes > len(self._arena):
            return {
                "junk": f"a tensor of {nbytes} bytes, more than the {len(self._arena) - at} that are left for results"
            }
        if nbytes:
            torch.frombuffer(self._arena, dtype=torch.uint8, count=nbytes, offset=at).copy_(flat)
        self._next = at + nbytes + (-nbytes % ALIGN)
        row = [at, nbytes, SHORT_DTYPES[tensor.dtype], list(tensor.shape), list(tensor.stride()), 0, str(tensor.device)]
        described: dict[str, Any] = {"T": row}
        if same := [i for i, t in enumerate(inputs) if t is tensor]:
            described["same"] = same
        if nbytes and (alias := storage_aliases(tensor, inputs)):
            described["alias"] = alias
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            described["class"] = type(tensor).__name__
        return described

    def _time(self, request: dict[str, Any]) -> dict[str, Any]:
        """Time blocks of calls; inputs are taken anew from the arena before each block, outside the timed part."""
        function = self._function(request["op"])
        case = request["case"]
        readings = []
        for _ in range(request["blocks"]):
            made = [self._fresh(case) for _ in range(request["calls"])]
            self._wait()
            start = perf_counter_ns()
            for args, kwargs in made:
                function(*args, **kwargs)
            self._wait()
            readings.append((perf_counter_ns() - start) / len(made))
        return {"ns": readings}

    def _fresh(self, case: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        def tensor(row: list[Any]) -> torch.Tensor:
            return owned_copy(tensor_over(self._arena, row), torch.device(row[6]) if row[6] else self._device)

        return decode(case["args"], tensor), {n: decode(v, tensor) for n, v in case["kwargs"].items()}

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()


def storage_aliases(tensor: torch.Tensor, inputs: list[torch.Tensor]) -> list[int]:
    pointer = tensor.untyped_storage().data_ptr()
    return [
        i for i, t in enumerate(inputs) if t.untyped_storage().data_ptr() == pointer and t.untyped_storage().nbytes()
    ]
