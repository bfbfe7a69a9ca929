"""The process that runs a model, with or without kernels. It judges nothing and returns bytes.

Results are addressed by number.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import perf_counter_ns  # bound before any kernel is loaded
from typing import Any

import torch

from opforge.cases.tensors import flat_bytes
from opforge.cases.wire import SHORT_DTYPES, TORCH_DTYPES
from opforge.install import Installation, RefusedError
from opforge.install.install_kernel import install_kernel
from opforge.models.call_recorder import CallRecorder
from opforge.models.execution import Execution, ExecutionSettings
from opforge.models.job import ModelKernel, ModelSpec
from opforge.models.model import UnusableModelError, load_model
from opforge.procs.channel import Channel
from opforge.sandbox.guard import readable_paths
from opforge.sandbox.guard.audit import AuditHook
from opforge.sandbox.guard.confinement import confinement_from_wire
from opforge.sandbox.guest.global_state import seed_generator
from opforge.sandbox.guest.loader import KernelLoadError, describe_exception
from opforge.sandbox.guest.worker import ARENA_ALIGNMENT, CASE_COUNTER, function_snapshot


def serve(config: dict[str, Any], fds: list[int]) -> None:
    """Answer requests until the judge closes the channel."""
    channel_fd, arena_fd = fds
    arena = mmap.mmap(arena_fd, config["arena_bytes"])
    os.close(arena_fd)
    confinement = config.get("confinement")
    audit = AuditHook(confinement_from_wire(confinement), readable_paths.home_folders()) if confinement else None
    ModelWorker(Channel.from_fd(channel_fd), arena, config["device"], config["results_offset"], audit).serve()


class _RunningKernelMarker:
    """Writes the number of the running kernel where the judge can read it if this process dies."""

    def __init__(self, arena: mmap.mmap, names: list[str]) -> None:
        self._arena = arena
        self._numbers = {name: number for number, name in enumerate(names, 1)}

    def before(self, kernel: str, op: str) -> None:
        del op
        CASE_COUNTER.pack_into(self._arena, 0, self._numbers[kernel])

    def after(self, kernel: str, op: str) -> None:
        del kernel, op
        CASE_COUNTER.pack_into(self._arena, 0, 0)


class _KernelTimer:
    """Adds up the time of calls by kernel; on a GPU it synchronizes around each call."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._began = 0
        self.ns: dict[str, int] = {}

    def before(self, kernel: str, op: str) -> None:
        del kernel, op
        if self._cuda:
            torch.cuda.synchronize()
        self._began = perf_counter_ns()

    def after(self, kernel: str, op: str) -> None:
        del op
        if self._cuda:
            torch.cuda.synchronize()
        self.ns[kernel] = self.ns.get(kernel, 0) + perf_counter_ns() - self._began


class ModelWorker:
    """The request loop and its handlers."""

    def __init__(
        self, channel: Channel, arena: mmap.mmap, device: str, results_offset: int, audit: AuditHook | None
    ) -> None:
        self._channel = channel
        self._arena = arena
        self._device = torch.device(device)
        self._results_offset = results_offset
        self._audit = audit
        self._pid = os.getpid()
        self._execution: Execution | None = None
        self._installation = Installation(device)
        self._kernel_names: list[str] = []
        self._results: list[tuple[str, torch.Tensor]] = []
        self._user_file: Path | None = None

    def serve(self) -> None:
        if self._audit is not None:
            self._audit.start()
        with self._installation.active(active=False):
            while True:
                request = self._channel.receive()
                reply = self._catching_kernel_errors(request)
                if os.getpid() != self._pid:
                    os._exit(0)  # forked by a kernel, and returned to our code
                self._channel.send({**reply, **self._breaches()})

    def _catching_kernel_errors(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            return self._answer(request)
        except UnusableModelError as error:
            return {"error": str(error)}
        except BaseException as error:  # noqa: BLE001  # boundary: any error of a model or kernel is its verdict
            return {"raised": describe_exception(error, self._user_file), **self._count_rows()}

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        match request["do"]:
            case "build":
                return self._build(ModelSpec.from_wire(request["spec"]), wide=request["wide"])
            case "install":
                return self._install([ModelKernel.from_wire(row) for row in request["kernels"]])
            case "run":
                return self._run(request["move"])
            case "show":
                return {"rows": self._copy_results(request["results"])}
            case "time":
                return {"ns": self._time(request["calls"])}
            case "profile":
                return self._profile(request["originals"], request["runs"])
            case "record":
                return self._record(request["ops"], request["start"])
            case unknown:
                raise ValueError(f"unknown request {unknown!r}")

    def _breaches(self) -> dict[str, Any]:
        """Return the forbidden things that were done or tried in this process."""
        breaches = [f"replaced {name}" for name in function_snapshot().replaced()]
        if self._audit is not None and (attempt := self._audit.pop_attempts()) is not None:
            breaches.append(attempt)
        return {"breaches": breaches} if breaches else {}

    def _build(self, spec: ModelSpec, *, wide: bool) -> dict[str, Any]:
        self._user_file = Path(spec.target.file) if spec.target.file else None
        dtype = TORCH_DTYPES[spec.dtype] if spec.dtype else None
        settings = ExecutionSettings(self._device, dtype, spec.train, wide, spec.seed)
        seed_generator(spec.seed, torch.device("cpu"))
        self._execution = Execution(load_model(spec.target, train=spec.train), settings)
        self._execution.run_context = self._awake
        return {"dtype": SHORT_DTYPES[self._execution.dtype]}

    @contextmanager
    def _awake(self) -> Iterator[None]:
        with self._installation.active():
            yield

    @property
    def _built_execution(self) -> Execution:
        if self._execution is None:
            raise RuntimeError("no model is built")
        return self._execution

    def _install(self, kernels: list[ModelKernel]) -> dict[str, Any]:
        """Install kernels in place of ATen's; return load errors and refused operators."""
        broken: dict[str, str] = {}
        refused: dict[str, str] = {}
        self._kernel_names = [kernel.name for kernel in kernels]
        for number, kernel in enumerate(kernels, 1):
            CASE_COUNTER.pack_into(self._arena, 0, number)
            try:
                refused |= install_kernel(self._installation, kernel.loading, kernel.ops.items())
            except KernelLoadError as error:
                broken[kernel.name] = str(error)
        self._installation.observer = _RunningKernelMarker(self._arena, self._kernel_names)
        CASE_COUNTER.pack_into(self._arena, 0, 0)
        return {"broken": broken, "refused": refused}

    def _run(self, perturbation_seed: int) -> dict[str, Any]:
        self._results = []
        self._installation.clear_counts()
        self._results = self._built_execution.run(perturbation_seed)
        rows = [[name, SHORT_DTYPES.get(t.dtype, str(t.dtype)), list(t.shape), t.nbytes] for name, t in self._results]
        return {"results": rows, **self._count_rows()}

    def _count_rows(self) -> dict[str, Any]:
        rows = [
            [kernel, op, count.answered, dict(count.fallbacks), count.raised]
            for (kernel, op), count in self._installation.counts.items()
            if count.answered or count.fallbacks or count.raised
        ]
        return {"counts": rows}

    def _copy_results(self, numbers: list[int]) -> list[list[Any]]:
        offset = self._results_offset
        rows: list[list[Any]] = []
        for number in numbers:
            flat = flat_bytes(self._results[number][1])
            if offset + len(flat) > len(self._arena):
                raise UnusableModelError(
                    f"{self._results[number][0]} takes {len(flat)} bytes, more than the {len(self._arena) - offset} "
                    "that can be compared"
                )
            if len(flat):
                torch.frombuffer(self._arena, dtype=torch.uint8, count=len(flat), offset=offset).copy_(flat)
            rows.append([offset, len(flat)])
            offset += len(flat) + (-len(flat) % ARENA_ALIGNMENT)
        return rows

    def _time(self, calls: int) -> float:
        """Return the mean time of some consecutive runs."""
        self._installation.observer = None
        execution = self._built_execution
        execution.restore()
        execution.run_once()
        began = perf_counter_ns()
        for _ in range(calls):
            execution.run_once()
        return (perf_counter_ns() - began) / calls

    def _profile(self, originals: list[list[str]] | None, runs: int) -> dict[str, Any]:
        """Return the time by kernel of some runs; with ``originals``, that of ATen's own kernels.

        ATen's times are listed under the names of the kernels for the same operators.
        """
        execution, installation = self._built_execution, self._installation
        for kernel, op in originals or ():
            installation.install_aten(op, kernel=kernel)
        profiles: list[dict[str, int]] = []
        try:
            execution.restore()
            execution.run_once()
            for _ in range(runs):
                installation.observer = timing = _KernelTimer(self._device)
                execution.run_once()
                profiles.append(timing.ns)
        finally:
            installation.observer = None
            if originals is not None:
                installation.remove()
        return {"profile": profiles}

    def _record(self, ops: list[str], start: int) -> dict[str, Any]:
        """Run with ATen's kernels and record calls of some operators, from ``start`` on.

        Records as many calls as fit.
        """
        recorder = CallRecorder(
            self._arena, self._results_offset, start, self._device, lambda: self._built_execution.in_optimizer_step
        )
        with Installation(self._device.type) as recording:
            for op in ops:
                with suppress(RefusedError):  # then no kernel is installed there either
                    recording.install(op, recorder.wrap(op, recording.aten_kernel(op)), kernel="recorded")
            with recording.active(active=False):
                self._built_execution.run_context = recording.active
                try:
                    self._built_execution.run()
                finally:
                    self._built_execution.run_context = self._awake
        return {
            "calls": [call.wire() for call in recorder.calls],
            "seen": recorder.call_count,
            "used": recorder.used_bytes,
        }
