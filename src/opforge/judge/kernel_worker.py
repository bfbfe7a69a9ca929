"""The judge's side of a kernel's process: start it, ask it, notice its death."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import select
import signal
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from opforge.cases.tensors import Bytes
from opforge.judge.loaded_libraries import LoadedLibraries
from opforge.judge.verdict import VerdictKind
from opforge.judge.worker_folders import QuotaGuard
from opforge.procs import linux
from opforge.procs.channel import Channel, ChannelClosedError
from opforge.procs.linux import describe_status, run_queue_wait_ns
from opforge.sandbox.guard import blocked_functions
from opforge.sandbox.guard.confinement import Confinement
from opforge.sandbox.guest.worker import CASE_COUNTER
from opforge.sandbox.host.client import Spawner
from opforge.sandbox.host.reply import CallReply, results_end
from opforge.sandbox.host.request import WorkerRequest

_FIXED_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
MAX_TIMEOUTS = 3
"""Number of times that a kernel may hit its time limit.

A request may take this many limits too, or `_MIN_REQUEST_LIMIT_S` if that is longer.
"""
_MIN_REQUEST_LIMIT_S = 180.0
_MIN_PREPARATION_LIMIT_S = 120.0
_HALT_LIMIT_S = 5.0
_MAX_KEPT_OUTPUT_BYTES = 4096
_POLL_INTERVAL_S = 0.1
_MAX_ADDRESS = 1 << 62
_DISPATCHER_BYPASSED = (
    "calls ATen's own code for what it replaces, past the dispatcher (at::cpu::…, a shim, or the static runtime)"
)
_TORCH_ADVICE_PREFIXES = (
    "CUDA kernel errors might be",
    "For debugging consider passing",
    "Compile with `TORCH_USE_CUDA_DSA`",
    "Search for `cuda",
)
"""Beginnings of the lines that torch adds to every error of a GPU."""


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """Settings of every worker of a run."""

    device: str
    timeout_s: float
    memory_bytes: int | None
    arena_bytes: int = 2 << 30
    input_bytes: int = 1 << 30
    """The part of the arena for inputs; the rest is for results."""
    race_s: float = 1.0
    """Seconds of a race between kernel and ATen."""

    @property
    def preparation_timeout_s(self) -> float:
        """Return the time limit of steps that are not calls of a kernel: imports, a look at all that is registered."""
        return max(_MIN_PREPARATION_LIMIT_S, self.timeout_s)

    @property
    def results_region(self) -> range:
        """Return the part of the arena for results."""
        return range(self.input_bytes, self.arena_bytes)


class WorkerDiedError(Exception):
    """A worker ended, or had to be ended, while it ran the case with this index."""

    def __init__(self, kind: VerdictKind, case_index: int, reason: str, timeouts: int = 0) -> None:
        super().__init__(reason)
        self.kind = kind
        self.case_index = case_index
        self.timeouts = timeouts
        """Number of time limits that passed before it was noticed."""


class KernelWorker:
    """One process that runs one kernel, or another role."""

    def __init__(
        self, spawner: Spawner, config: WorkerConfig, confinement: Confinement | None = None, *, role: str = "worker"
    ) -> None:
        self._spawner = spawner
        self._config = config
        arena_fd = os.memfd_create("opforge-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(arena_fd, config.arena_bytes)
        fcntl.fcntl(
            arena_fd, fcntl.F_ADD_SEALS, _FIXED_SIZE_SEALS
        )  # else a kernel could truncate it, and the judge would die reading it
        self.arena = mmap.mmap(arena_fd, config.arena_bytes)
        self.arena_view: Bytes = np.frombuffer(self.arena, np.uint8)
        self._channel, theirs = Channel.pair()
        self._output, output = os.pipe()
        os.set_blocking(self._output, False)
        self._tail = b""
        self._status = 0
        limits = {} if config.memory_bytes is None else {"memory_bytes": config.memory_bytes + config.arena_bytes}
        settings = {
            "device": config.device,
            "arena_bytes": config.arena_bytes,
            "results_offset": config.input_bytes,
            "confinement": None if confinement is None else asdict(confinement),
            "memory": role == "worker",
        }
        fds = [theirs.fileno(), arena_fd, output]
        self._pid = spawner.spawn(role, settings, fds, limits=limits, output=True)
        self._pidfd = os.pidfd_open(self._pid)
        self._guard = None if confinement is None else QuotaGuard(self._pid, confinement.folder)
        self._memory: int | None = None
        """The worker's memory as a file, from its first message, before any kernel is loaded."""
        self._greeted = role != "worker"
        self._descendants: list[int] = []
        """Processes that descend from the worker's, as last looked for."""
        self._libraries = LoadedLibraries(
            self._pid, () if confinement is None else (confinement.folder, *confinement.reads)
        )
        for fd in (arena_fd, output):
            os.close(fd)
        theirs.close()

    def ask(self, request: WorkerRequest | dict[str, Any], *, timeout_s: float | None = None, cases: int = 1) -> Any:
        """Send a request about ``cases`` cases and wait for its answer."""
        self.begin(request)
        return self.answer(timeout_s=timeout_s, cases=cases)

    def begin(self, request: WorkerRequest | dict[str, Any]) -> None:
        """Send a request; a dead worker is noticed when its answer is awaited."""
        CASE_COUNTER.pack_into(self.arena, 0, 0)
        try:
            wire = request.wire() if isinstance(request, WorkerRequest) else request
            self._channel.send(wire, timeout_s=self._config.timeout_s)
        except ChannelClosedError:
            return
        except TimeoutError:
            self.close()
            reason = f"the kernel's process did not accept its next cases within {self._config.timeout_s:g} s"
            raise WorkerDiedError(VerdictKind.TIMED_OUT, 0, reason, 1) from None

    def answer(self, *, timeout_s: float | None = None, cases: int = 1) -> Any:
        """Wait for the answer to the last request; each finished case restarts the time limit."""
        limit_s = timeout_s or self._config.timeout_s
        index, since = self._case_index(), time.monotonic()
        began = since
        # Independent of the counter, which a kernel can write to:
        deadline = began + min(limit_s * (cases + 1), max(limit_s * MAX_TIMEOUTS, _MIN_REQUEST_LIMIT_S))
        poll = select.poll()
        for fd in (self._channel.fileno(), self._output, self._pidfd):
            poll.register(fd, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poll.poll(_POLL_INTERVAL_S * 1000)}
            if self._output in ready and not self._drain():
                poll.unregister(self._output)
            self.check_limits(index)
            if self._channel.fileno() in ready:
                try:
                    if self._greeted:
                        return self._channel.receive(limit_s)
                    self._receive_greeting(limit_s)
                    continue
                except (ChannelClosedError, ValueError, TimeoutError, RecursionError):
                    raise self._died() from None
            if self._pidfd in ready:
                raise self._died()
            now = time.monotonic()
            if self._case_index() != index:
                index, since = self._case_index(), now
            if now - since > limit_s or now > deadline:
                reason = f"no answer within {limit_s:g} s"
                self.close()
                raise WorkerDiedError(VerdictKind.TIMED_OUT, index, reason, max(1, round((now - began) / limit_s)))

    def check_limits(self, case_index: int, *, force: bool = False) -> None:
        """End a kernel that exceeds its quotas or runs a program with its own torch."""
        if self._guard is None or not self._guard.is_due(force=force):
            return
        if (excess := self._guard.exceeded_quota()) is not None:
            self.close()
            raise WorkerDiedError(VerdictKind.CRASHED, case_index, f"the kernel's process was ended: {excess}")
        if any(self._libraries.has_separate_torch(child) for child in self._guard.sample_children()):
            self.close()
            raise WorkerDiedError(VerdictKind.CHEATED, case_index, "runs another program with a torch of its own")

    def rejection_reason(self, forbidden_operators: Iterable[str]) -> str | None:
        """Describe forbidden uses of ATen in a loaded library, inspected from this process."""
        return self._libraries.rejection_reason(forbidden_operators)

    def kill_orphans(self) -> int:
        """End and count the processes that the kernel has detached."""
        return self._spawner.kill_orphans(self._pid)

    def _receive_greeting(self, limit_s: float) -> None:
        self._greeted = True
        _message, fds = self._channel.receive_with_fds(limit_s)
        self._memory = fds[0] if fds else None

    def read_memory(self, address: int, nbytes: int) -> bytearray:
        """Return bytes of the worker's memory; raises OSError where it has none."""
        if not 0 <= address < _MAX_ADDRESS:
            raise OSError(errno.EFAULT, "no address")
        contents = bytearray(nbytes)
        view = memoryview(contents)
        while view and self._memory is not None:
            count = os.preadv(self._memory, [view], address + nbytes - len(view))
            if not count:
                raise OSError(errno.EFAULT, "no memory there")
            view = view[count:]
        return contents

    def write_memory(self, address: int, contents: Bytes) -> None:
        """Write to the worker's memory; raises OSError where it has none."""
        view = memoryview(contents.data)
        while view and self._memory is not None:
            count = os.pwrite(self._memory, view, address)
            address, view = address + count, view[count:]

    @property
    def memory_is_readable(self) -> bool:
        return self._memory is not None

    @property
    def descendants(self) -> list[int]:
        """Return the processes that descend from the worker's, as last looked for."""
        return self._descendants

    @property
    def config(self) -> WorkerConfig:
        return self._config

    @property
    def results(self) -> Bytes:
        """Return the part of the arena for results."""
        return self.arena_view[self._config.input_bytes :]

    def copy_results(self, replies: Iterable[CallReply]) -> Bytes:
        """Return a private copy of the results that replies report."""
        region = self._config.results_region
        return self.arena_view[region.start : results_end(replies, region)].copy()

    def pause(self) -> None:
        """Stop the worker and its processes, so that they cannot disturb the timing of others."""
        self._signal(signal.SIGSTOP)

    def pause_and_wait(self) -> None:
        """Stop the worker and its processes, and wait; raises WorkerDiedError if that takes too long."""
        self._signal(signal.SIGSTOP)
        until = time.monotonic() + _HALT_LIMIT_S
        for pid in (self._pid, *self._descendants):
            while not linux.is_stopped(pid):
                if time.monotonic() > until:
                    self.close()
                    raise WorkerDiedError(
                        VerdictKind.CRASHED, 0, f"the kernel's process was ended: its process {pid} does not stop"
                    )

    def find_descendants(self) -> list[int]:
        """Return the processes that descend from the worker's own, detached or not.

        From now on they are stopped and resumed with it.
        """
        self._descendants = linux.descendants_by_mark(self._pid)
        return self._descendants

    def resume(self) -> None:
        """Let the worker run again."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        if not self._pid:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, number)
        for pid in self._descendants:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def pin_to_cores(self, cores: Iterable[int]) -> None:
        """Let all threads of the worker run on these cores only."""
        allowed = set(cores)
        for thread in self._threads():
            with contextlib.suppress(OSError):
                os.sched_setaffinity(thread, allowed)

    def may_run_outside(self, cores: Iterable[int]) -> bool:
        """Whether a thread of the worker may run on other cores than these."""
        allowed = set(cores)
        for thread in self._threads():
            with contextlib.suppress(OSError):
                if not os.sched_getaffinity(thread) <= allowed:
                    return True
        return False

    def _threads(self) -> list[int]:
        return [thread for pid in (self._pid, *self._descendants) if pid for thread in linux.threads_of(pid)]

    def cpu_ns(self) -> int:
        """Return the CPU time of all threads of the worker's own process."""
        return linux.cpu_ns(self._pid)

    def waited_ns(self) -> int:
        """Return the total time that the worker was ready to run while others had its core."""
        return run_queue_wait_ns(self._pid)

    def release_arena(self, used_bytes: int) -> None:
        """Release the arena's memory if a batch has used much of it."""
        if used_bytes > 64 << 20:
            self.arena.madvise(mmap.MADV_REMOVE)

    def close(self) -> str:
        """End the process; return how it ended if it was already dead."""
        if self._pid == 0:
            return ""
        ended = self._spawner.stop(self._pid)
        self._status = ended.status
        self._drain()
        os.close(self._pidfd)
        os.close(self._output)
        if self._memory is not None:
            os.close(self._memory)
            self._memory = None
        self._channel.close()
        self._pid = 0
        return describe_status(ended.status)

    def _died(self) -> WorkerDiedError:
        index = self._case_index()
        reason = f"the kernel's process {self.close()}"
        if os.WIFEXITED(self._status) and os.WEXITSTATUS(self._status) == blocked_functions.EXIT_STATUS:
            return WorkerDiedError(VerdictKind.CHEATED, index, _DISPATCHER_BYPASSED)
        lines = self._tail.decode(errors="replace").strip().splitlines()
        if last_lines := [line for line in lines if line and not line.startswith(_TORCH_ADVICE_PREFIXES)][-3:]:
            reason += f"; last output: {' / '.join(last_lines)[:500]}"
        return WorkerDiedError(VerdictKind.CRASHED, index, reason)

    def _case_index(self) -> int:
        return int(CASE_COUNTER.unpack_from(self.arena, 0)[0])

    def _drain(self) -> bool:
        """Read the kernel's output, keeping only the end; False if the output is closed."""
        try:
            while data := os.read(self._output, 1 << 16):
                self._tail = (self._tail + data)[-_MAX_KEPT_OUTPUT_BYTES:]
                if len(data) < 1 << 16:
                    return True
        except BlockingIOError:
            return True
        return False
