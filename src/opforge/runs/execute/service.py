"""Judging service within one process: threads submit kernels and wait for their verdicts."""

from __future__ import annotations

import contextlib
import functools
import queue
import socket
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from opforge.cases import Phase
from opforge.errors import InternalError
from opforge.kernels.native.builder import unconfined
from opforge.runs.config import RunConfig
from opforge.runs.execute.build_native import with_libraries
from opforge.runs.execute.judge_pool import JudgePool
from opforge.runs.plan import Job
from opforge.runs.rows import ResultRow
from opforge.runs.score import OperatorTally
from opforge.sandbox.guard.confined_command import confined_command
from opforge.sandbox.host.client import ForkServerHandle
from opforge.suites import LoadedSuite
from opforge.suites.base import no_progress

_FIRST_CASES = 24
"""Approximate number of an operator's cases that are judged first."""
_Submission = tuple[Job, Phase, "Future[list[ResultRow]]"]


class JudgingService:
    """Judges kernels as they are submitted.

    Correctness is judged in parallel; timing has exclusive use of the machine. One thread talks to
    the fork server and feeds the judges; callers wait in their own threads.
    """

    def __init__(
        self,
        config: RunConfig,
        server: ForkServerHandle,
        suite: LoadedSuite,
        confine: dict[str, Any] | None = None,
        peaks: dict[str, Any] | None = None,
        *,
        limit_judges: bool = False,
    ) -> None:
        """Start judging. ``limit_judges``: cases come from strangers, and may need more memory than there is."""
        self._within = confined_command if confine is not None else unconfined
        self._executor = JudgePool(config, server, lambda _rows: None, confine, peaks, limit_judges=limit_judges)
        self._executor.use_suite(suite)
        self._submissions: queue.SimpleQueue[_Submission] = queue.SimpleQueue()
        self._open: set[Future[list[ResultRow]]] = set()
        self._ours, self._theirs = socket.socketpair()
        self._theirs.setblocking(False)
        self._executor.watch_socket(self._theirs, self._drain)
        self._closing = False
        self._failure: BaseException | None = None
        self._lock = threading.Lock()
        self.busy_s = 0.0
        """Total busy time of all judges in seconds."""
        self._thread = threading.Thread(target=self._run_judges, name="judging", daemon=True)
        self._thread.start()

    def judge(self, job: Job) -> list[ResultRow]:
        """Judge a kernel and return its verdicts. C++ and CUDA are built first.

        If an operator has many cases, some are judged first and the rest only if those are correct:
        whoever fixes a kernel need not wait for a thousand cases that fail in the same way. A
        kernel that is correct on all cases is timed.
        """
        (job,) = with_libraries([job], 1, no_progress, self._within)
        first_cases, later_cases = split_for_screening(job)
        rows = self._ask(first_cases, Phase.CORRECTNESS)
        if later_cases.operators and is_correct(job, rows):
            rows += self._ask(later_cases, Phase.CORRECTNESS)
        if is_correct(job, rows):
            rows += self._ask(job, Phase.PERFORMANCE)
        return rows

    @property
    def has_ended(self) -> bool:
        """Whether nothing is judged any more: it was closed, or its judges could not go on."""
        return self._closing or not self._thread.is_alive()

    def close(self) -> None:
        """End the judges; callers that still wait get an error."""
        self._closing = True
        self._wake()
        self._thread.join()
        self._ours.close()
        self._theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ask(self, job: Job, phase: Phase) -> list[ResultRow]:
        future: Future[list[ResultRow]] = Future()
        with self._lock:
            if self._failure is not None or self._closing:
                raise InternalError("judging has ended") from self._failure
            self._open.add(future)
        self._submissions.put((job, phase, future))
        self._wake()
        return future.result()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # closed meanwhile; waiting callers get an error
            self._ours.send(b"!")

    def _drain(self) -> None:
        """Queue the submitted jobs."""
        self._theirs.recv(4096)
        while not self._submissions.empty():
            job, phase, future = self._submissions.get()
            rows: list[ResultRow] = []
            self._executor.add(job, phase, rows.extend, functools.partial(self._answer, future, rows))

    def _answer(self, future: Future[list[ResultRow]], rows: list[ResultRow]) -> None:
        with self._lock:
            self._open.discard(future)
        future.set_result(rows)

    def _run_judges(self) -> None:
        failure: BaseException = InternalError("judging ended before the kernel had its verdicts")
        try:
            while not self._closing:
                before, judges = time.monotonic(), self._executor.judge_count
                self._executor.step()
                self.busy_s += (time.monotonic() - before) * max(judges, self._executor.judge_count)
            self._executor.stop()
        except Exception as error:  # noqa: BLE001  # waiting callers must get any error
            failure = error
        with self._lock:
            self._failure = failure
            unanswered, self._open = self._open, set()
        for future in unanswered:
            future.set_exception(failure)


def split_for_screening(job: Job) -> tuple[Job, Job]:
    """Return the cases judged first, spread over each operator's cases, and the rest."""
    first, later = [], []
    for part in job.in_phase(Phase.CORRECTNESS).operators:
        step = max(1, len(part.cases) // _FIRST_CASES)
        first.append(replace(part, cases=part.cases[::step]))
        later.append(replace(part, cases=[case for number, case in enumerate(part.cases) if number % step]))
    return replace(job, operators=tuple(first)), replace(job, operators=tuple(part for part in later if part.cases))


def is_correct(job: Job, rows: Iterable[ResultRow]) -> bool:
    """Whether a kernel passed all its cases.

    Optional overloads may be declined, but not everything.
    """
    tallies = tally_by_op(rows).values()
    optional = {part.op for part in job.operators if not part.required}
    served = [t for t in tallies if not (t.op in optional and t.declined)]
    return all(t.is_correct for t in served) and bool(served or not tallies)


def tally_by_op(rows: Iterable[ResultRow]) -> dict[str, OperatorTally]:
    """Return the verdicts by operator."""
    tallies: dict[str, OperatorTally] = {}
    for row in rows:
        tally = tallies.setdefault(row.op, OperatorTally(row.op, row.kernel))
        tally.verdicts[row.verdict] += 1
        tally.raised += row.raised
    return tallies
