"""Write kernels for many operators in parallel, and keep the best attempt for each.

Each operator has one or more workers. Model requests and judging overlap.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from opforge.cache import write_atomically
from opforge.errors import OpforgeError
from opforge.generate.attempts import Contest, Means, Worker, earlier
from opforge.generate.custom import Task
from opforge.generate.prompting import shorten
from opforge.suites.base import Progress

_PATIENCE = 3
"""Abort the run after this many requests failed despite retries, if none was answered."""

_MOST_WORDS = 400
"""Maximum length of a reason in a report, in characters."""


class NoAnswerError(OpforgeError):
    """The model does not answer at all."""


@dataclass(frozen=True, slots=True)
class Kept:
    """Result for one operator."""

    name: str
    file: str | None
    """File in a kernel directory; None if no attempt produced a kernel."""
    right: bool
    attempts: int
    words: str
    """Which attempt was kept, or why there is none."""

    def as_json(self) -> dict[str, Any]:
        return {"file": self.file, "right": self.right, "attempts": self.attempts, "words": self.words}

    @classmethod
    def from_json(cls, name: str, row: dict[str, Any]) -> Kept:
        return cls(name, row["file"], row["right"], row["attempts"], row["words"])


class Board:
    """Results so far, shared by all threads, with progress messages."""

    def __init__(self, total: int, progress: Progress) -> None:
        self._total = total
        self._progress = progress
        self._lock = threading.Lock()
        self.kept: dict[str, Kept] = {}
        self.cost: Callable[[], float] = lambda: 0.0
        self.attempts: Callable[[], int] = lambda: 0

    def tell(self, what: str, op: str) -> None:
        right = sum(1 for kept in list(self.kept.values()) if kept.right)
        with self._lock:
            self._progress(
                f"{self.attempts()} attempts, {right} right, ${self.cost():.2f}; {op}: {what}",
                len(self.kept),
                self._total,
            )

    def keep(self, kept: Kept) -> None:
        self.kept[kept.name] = kept
        self.tell("right" if kept.right else "not right", kept.name)


class Agent:
    """Makes a kernel for each assignment."""

    def __init__(self, means: Means, board: Board, right: Path, rejected: Path) -> None:
        self._means = means
        self._board = board
        self._folders = {True: right, False: rejected}
        self._lock = threading.Lock()

    def make(self, tasks: Iterable[Task]) -> list[Kept]:
        """Return the result for each operator; results from before an interruption are reused."""
        options = self._means.options
        contests: list[Contest] = []
        units: list[Callable[[], None]] = []
        for task in tasks:
            if (row := self._means.journal.winner(task.name)) is not None:
                self._board.keep(self._placed(task, row))
                continue
            contest = Contest(task, options.target)
            for attempt in earlier(self._means.journal, options, task):
                contest.add(attempt)
            contests.append(contest)
            team = _OperatorWorkers(contest, options.workers, self._end)
            units += [partial(team.run, Worker(self._means, contest, k)) for k in range(1, options.workers + 1)]
        self._board.attempts = lambda: sum(len(contest.attempts) for contest in contests)
        run_all(units, options.parallel)
        return [self._board.kept[name] for name in sorted(self._board.kept)]

    def _end(self, contest: Contest) -> None:
        """Keep the best attempt; it is final unless a worker stopped early."""
        name, best = contest.task.name, contest.best
        self._give_up(contest)
        if best is None or best.file is None:
            reasons = [*contest.failures, *(a.reason for a in contest.attempts.values())]
            explanation = shorten(reasons[0], _MOST_WORDS) if reasons else "nothing was asked"
            kept = Kept(name, None, False, len(contest.attempts), explanation)
            self._board.keep(kept)
            return
        source = best.file.read_text(encoding="utf-8")
        explanation = best.words if best.right else f"{best.words}; {shorten(best.reason, _MOST_WORDS)}"
        with self._lock:
            file = contest.task.next_file(self._folders[best.right], best.file.suffix)
            row = {**Kept(name, str(file), best.right, len(contest.attempts), explanation).as_json(), "source": source}
            if not contest.failures:
                self._means.journal.write_winner(name, row)
            self._board.keep(self._placed(contest.task, row))

    def _give_up(self, contest: Contest) -> None:
        """Abort the run if the model has never answered, so that it can be resumed later."""
        if not contest.failures or self._means.budget.reason:
            return
        rows = list(self._means.journal.requests())
        if len(rows) >= _PATIENCE and all("failed" in row for row in rows):
            raise NoAnswerError(
                f"{len(rows)} requests failed and none was answered; the last one: {contest.failures[-1]}"
            )

    def _placed(self, task: Task, row: dict[str, Any]) -> Kept:
        """Write a kernel and the files it is judged with into its directory, unless present."""
        kept = Kept.from_json(task.name, row)
        file = Path(kept.file or "")
        task.lay_out(file.parent.parent)
        if not file.is_file() or file.read_text(encoding="utf-8") != row["source"]:
            write_atomically(file, row["source"])
        return kept


class _OperatorWorkers:
    """The workers of one operator; the last one to finish ends the contest."""

    def __init__(self, contest: Contest, size: int, end: Callable[[Contest], None]) -> None:
        self.contest = contest
        self._left = size
        self._end = end

    def run(self, worker: Worker) -> None:
        worker.work()
        with self.contest.lock:
            self._left -= 1
            last = not self._left
        if last:
            self._end(self.contest)


def run_all(units: list[Callable[[], None]], threads: int) -> None:
    """Run all units on up to ``threads`` threads and raise the first error.

    The threads are daemons: after an interrupt, one that waits for a server does not block exit.
    """
    pending: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    outcomes: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
    stop = threading.Event()
    for unit in units:
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

    for number in range(min(threads, len(units))):
        threading.Thread(target=serve, name=f"worker {number + 1}", daemon=True).start()
    try:
        for _ in units:
            if (error := outcomes.get()) is not None:
                raise error
    finally:
        stop.set()
