"""Record many runs in parallel, each in a fork of this process, which has the libraries imported.

A run that fails, dies or takes too long affects only itself. A run that is out of memory is
repeated alone at the end.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from opforge.procs.child import child_environment
from opforge.procs.forks import Send, end_session, run_fork, start_fork
from opforge.procs.linux import describe_returncode
from opforge.traces.record import CHILD_COMMAND
from opforge.traces.recordings import Parts, RunEnd, TracedRun
from opforge.traces.targets import LIBRARIES

_OUT_OF_MEMORY = re.compile(r"out of memory|OutOfMemoryError|ALLOC_FAILED|MemoryError|SIGKILL", re.IGNORECASE)
_POLL_INTERVAL_S = 0.02
_DEVICE_LIMIT_S = 300.0

OnEnd = Callable[[TracedRun, RunEnd], None]


@dataclass(frozen=True, slots=True)
class Limits:
    """Number of parallel runs, and their time limits."""

    workers: int = 1
    run_s: float = 300.0
    """Seconds after which a run is ended; calls recorded until then are kept."""
    until: float = float("inf")
    """Deadline for all runs, on `time.monotonic`; unfinished runs count as never started."""


@dataclass
class _ActiveRun:
    run: TracedRun
    start_s: float
    was_concurrent: bool
    """Whether other runs were active at the same time."""


def preload(kinds: Iterable[str]) -> None:
    """Import the libraries that runs need, so that forks have them.

    A missing library is an error of each run that needs it.
    """
    import opforge.ops
    import opforge.traces.architectures
    import opforge.traces.child
    import opforge.traces.recorder

    opforge.ops.table()
    for kind in sorted(set(kinds) & set(LIBRARIES)):
        with contextlib.suppress(ImportError):
            importlib.import_module(LIBRARIES[kind])
    if "transformers" in sys.modules:
        importlib.import_module("transformers.modeling_utils")  # otherwise loaded with a class; takes longest


@dataclass
class Recording:
    """Many runs, and their progress."""

    parts: Parts
    limits: Limits
    on_end: OnEnd = lambda _run, _ended: None
    fork: bool = True
    """Whether to fork processes; if False, fresh ones import everything themselves."""
    _active: dict[int, _ActiveRun] = field(default_factory=dict)
    _retry_alone: deque[TracedRun] = field(default_factory=deque)
    """Runs that were out of memory while others were active."""

    def record(self, runs: Iterable[TracedRun]) -> None:
        """Record runs that have not succeeded: those never run first, then those that failed."""
        known = [(run, self.parts.read_end(run)) for run in runs]
        waiting = deque(run for run, ended in known if ended is None)
        waiting.extend(run for run, ended in known if ended is not None and ended.error)
        try:
            while (waiting or self._active or self._retry_alone) and time.monotonic() < self.limits.until:
                self._start_waiting_runs(waiting)
                if not self._collect_ended():
                    time.sleep(_POLL_INTERVAL_S)
        finally:
            for pid, active in list(self._active.items()):
                end_session(pid)
                self.parts.delete(active.run)
            self._active.clear()

    def _start_waiting_runs(self, waiting: deque[TracedRun]) -> None:
        while waiting and len(self._active) < self.limits.workers:
            self._start(waiting.popleft())
        if self._retry_alone and not waiting and not self._active:
            self._start(self._retry_alone.popleft())

    def _start(self, run: TracedRun) -> None:
        self.parts.delete(run)
        sys.stdout.flush()
        sys.stderr.flush()
        pid = _start_fork(self.parts, run, self.limits.workers) if self.fork else _start_process(self.parts, run)
        for other in self._active.values():
            other.was_concurrent = True
        self._active[pid] = _ActiveRun(run, time.monotonic(), was_concurrent=bool(self._active))

    def _collect_ended(self) -> bool:
        """Record which runs have ended, and end those over their limit; return whether any did."""
        any_ended = False
        for pid, active in list(self._active.items()):
            seconds = time.monotonic() - active.start_s
            ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
            if not ended and seconds <= self.limits.run_s:
                continue
            any_ended = True
            del self._active[pid]
            code = end_session(pid)
            if not ended:
                self._record_end(active, f"took more than {self.limits.run_s:g} s")
            else:
                error = self.parts.reported_error(active.run)
                self._record_end(active, error or (f"its process {describe_returncode(code)}" if code else ""))
        return any_ended

    def _record_end(self, active: _ActiveRun, error: str) -> None:
        if active.was_concurrent and _OUT_OF_MEMORY.search(error):
            self._retry_alone.append(active.run)
            return
        ended = RunEnd(round(time.monotonic() - active.start_s, 1), error)
        self.parts.write_end(active.run, ended)
        self.on_end(active.run, ended)


def _start_fork(parts: Parts, run: TracedRun, workers: int) -> int:
    """Run in a fork of this process, and return its PID."""

    def record_run() -> None:
        import torch

        from opforge.traces.child import record_target

        torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))
        with parts.messages_file(run).open("wb") as messages:
            record_target(run.target, run.settings, messages)

    with parts.output_file(run).open("wb") as output:
        return start_fork(record_run, output.fileno())


def _start_process(parts: Parts, run: TracedRun) -> int:
    """Run in a fresh process, and return its PID."""
    with parts.messages_file(run).open("wb") as messages, parts.output_file(run).open("wb") as output:
        os.set_inheritable(messages.fileno(), True)
        return os.posix_spawn(
            CHILD_COMMAND[0],
            [*CHILD_COMMAND, json.dumps(run.as_json()), str(messages.fileno())],
            child_environment(),
            setsid=True,
            file_actions=[(os.POSIX_SPAWN_DUP2, output.fileno(), 1), (os.POSIX_SPAWN_DUP2, output.fileno(), 2)],
        )


def forks_reach(device: str) -> bool:
    """Whether a fork of this process can use a device; CUDA fails if asked for before the fork."""

    def use_device(_send: Send) -> None:
        import torch

        torch.zeros(1, device=device).sum().item()

    return run_fork(use_device, _DEVICE_LIMIT_S).code == 0
