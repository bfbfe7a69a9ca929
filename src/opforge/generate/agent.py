"""Write kernels for many operators in parallel, and keep the best attempt for each.

Each operator has one or more workers. Model requests and judging overlap.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from opforge.cache import write_atomically
from opforge.errors import OpforgeError
from opforge.generate.attempts import KernelWriter, OperatorAttempts, WriterContext, judged_attempts
from opforge.generate.journal import OperatorResult, Winner
from opforge.generate.prompting import shorten
from opforge.generate.tasks import Task
from opforge.suites.base import Progress

_MAX_UNANSWERED_REQUESTS = 3
"""Abort the run after this many requests failed despite retries, or one of each worker, if none was answered."""

_MAX_REASON_CHARS = 400
"""Maximum length of a reason in a report, in characters."""


class NoAnswerError(OpforgeError):
    """The model does not answer at all."""

    exit_code = 1


class GenerationProgress:
    """Results so far, shared by all threads, with progress messages."""

    def __init__(self, total: int, progress: Progress) -> None:
        self._total = total
        self._progress = progress
        self._lock = threading.Lock()
        self.results: dict[str, OperatorResult] = {}
        self.cost: Callable[[], float] = lambda: 0.0
        self.attempts: Callable[[], int] = lambda: 0

    def report(self, activity: str, op: str) -> None:
        right = sum(1 for kept in list(self.results.values()) if kept.right)
        with self._lock:
            self._progress(
                f"{self.attempts()} attempts, {right} right, ${self.cost():.2f}; {op}: {activity}",
                len(self.results),
                self._total,
            )

    def add_result(self, kept: OperatorResult) -> None:
        self.results[kept.name] = kept
        self.report("right" if kept.right else "not right", kept.name)


class Agent:
    """Makes a kernel for each assignment."""

    def __init__(self, context: WriterContext, progress: GenerationProgress, right: Path, rejected: Path) -> None:
        self._context = context
        self._progress = progress
        self._folders = {True: right, False: rejected}
        self._lock = threading.Lock()
        self._workers = 0

    def write_kernels(self, tasks: Iterable[Task]) -> list[OperatorResult]:
        """Return the result for each operator; results from before an interruption are reused."""
        options = self._context.options
        all_attempts: list[OperatorAttempts] = []
        units: list[Callable[[], None]] = []
        for task in tasks:
            if (winner := self._context.journal.winner(task.name)) is not None:
                self._progress.add_result(_write_kernel(task, winner))
                continue
            attempts = OperatorAttempts(task, options.target)
            for attempt in judged_attempts(self._context.journal, options, task):
                attempts.add(attempt)
            all_attempts.append(attempts)
            team = _OperatorWorkers(attempts, options.workers, self._finish)
            units += [
                partial(team.run, KernelWriter(self._context, attempts, k)) for k in range(1, options.workers + 1)
            ]
        self._workers = len(units)
        self._progress.attempts = lambda: sum(len(attempts.attempts) for attempts in all_attempts)
        run_in_threads(units, options.parallel)
        return [self._progress.results[name] for name in sorted(self._progress.results)]

    def _finish(self, operator_attempts: OperatorAttempts) -> None:
        """Keep the best attempt; it is final unless a worker stopped early."""
        name, best = operator_attempts.task.name, operator_attempts.best
        self._abort_if_never_answered(operator_attempts)
        if best is None or best.file is None:
            reasons = [*operator_attempts.failures, *(a.reason for a in operator_attempts.attempts.values())]
            explanation = shorten(reasons[0], _MAX_REASON_CHARS) if reasons else "no request was sent"
            kept = OperatorResult(name, None, False, len(operator_attempts.attempts), explanation)
            self._progress.add_result(kept)
            return
        source = best.file.read_text(encoding="utf-8")
        explanation = best.summary if best.right else f"{best.summary}; {shorten(best.reason, _MAX_REASON_CHARS)}"
        with self._lock:
            file = operator_attempts.task.next_file(self._folders[best.right], best.file.suffix)
            kept = OperatorResult(name, str(file), best.right, len(operator_attempts.attempts), explanation)
            winner = Winner(kept, source)
            if not operator_attempts.failures:
                self._context.journal.write_winner(winner)
            self._progress.add_result(_write_kernel(operator_attempts.task, winner))

    def _abort_if_never_answered(self, operator_attempts: OperatorAttempts) -> None:
        """Abort the run if the model has never answered, so that it can be resumed later."""
        if not operator_attempts.failures or self._context.budget.stop_reason:
            return
        requests = list(self._context.journal.requests())
        enough = min(_MAX_UNANSWERED_REQUESTS, self._workers)
        if len(requests) >= enough and all(request.failed is not None for request in requests):
            raise NoAnswerError(
                f"no request was answered, and {len(requests)} failed; the last one: {operator_attempts.failures[-1]}; "
                f"then continue with `opforge run --resume {self._context.journal.path.parent}`"
            )


def _write_kernel(task: Task, winner: Winner) -> OperatorResult:
    """Write a kernel and the files it is judged with into its directory, unless present."""
    file = Path(winner.result.file or "")
    task.write_companions(file.parent.parent)
    if not file.is_file() or file.read_text(encoding="utf-8") != winner.source:
        write_atomically(file, winner.source)
    return winner.result


class _OperatorWorkers:
    """The workers of one operator; the last one to finish ends the contest."""

    def __init__(self, operator_attempts: OperatorAttempts, size: int, end: Callable[[OperatorAttempts], None]) -> None:
        self.operator_attempts = operator_attempts
        self._left = size
        self._end = end

    def run(self, worker: KernelWriter) -> None:
        worker.run()
        with self.operator_attempts.lock:
            self._left -= 1
            last = not self._left
        if last:
            self._end(self.operator_attempts)


def run_in_threads(functions: list[Callable[[], None]], threads: int) -> None:
    """Run all units on up to ``threads`` threads and raise the first error.

    The threads are daemons: after an interrupt, one that waits for a server does not block exit.
    """
    pending: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    outcomes: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
    stop = threading.Event()
    for unit in functions:
        pending.put(unit)

    def serve() -> None:
        while not stop.is_set():
            try:
                unit = pending.get_nowait()
            except queue.Empty:
                return
            try:
                unit()
            except BaseException as error:  # noqa: BLE001  # re-raised in the caller
                outcomes.put(error)
                return
            outcomes.put(None)

    for number in range(min(threads, len(functions))):
        threading.Thread(target=serve, name=f"worker {number + 1}", daemon=True).start()
    try:
        for _ in functions:
            if (error := outcomes.get()) is not None:
                raise error
    finally:
        stop.set()
