"""Progress on stderr: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections import deque
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from opforge.reports.escape import escape_controls

_PRINT_INTERVAL_S = 5.0
_PACE_WINDOW_S = 60.0
"""The rate is that of the last minute: some cases take a thousand times as long as others."""
_MIN_PACE_S = 3.0


class Pace:
    """How fast a step goes, and how long the rest of it takes at that rate."""

    def __init__(self) -> None:
        self._total = 0
        self._seen: deque[tuple[float, int]] = deque()

    def note(self, done: int, total: int, now: float) -> str:
        """Note how far the step is; return its rate and the remaining time, empty as long as they are not known."""
        if total != self._total or (self._seen and done < self._seen[-1][1]):  # another step
            self._total = total
            self._seen.clear()
        self._seen.append((now, done))
        while len(self._seen) > 2 and now - self._seen[1][0] > _PACE_WINDOW_S:
            self._seen.popleft()
        since, before = self._seen[0]
        if now - since < _MIN_PACE_S or done <= before or done >= total:
            return ""
        rate = (done - before) / (now - since)
        seconds = round((total - done) / rate)
        left = (
            f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"
            if seconds >= 3600
            else (f"{seconds // 60}:{seconds % 60:02}")
        )
        return f"{rate:.0f}/s, {left} left" if rate >= 10 else f"{rate:.2g}/s, {left} left"


class ProgressLine:
    """A callable that shows what is being done and how far it is."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._bar: Progress | None = None
        self._last = time.monotonic()
        self._pace = Pace()
        if not quiet and sys.stderr.isatty():
            texts = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            columns = (*texts, TextColumn("{task.fields[pace]}"))
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task("starting", total=None, pace="")

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def notice(self, line: str) -> None:
        """Show a line that stays."""
        text = escape_controls(line)
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        elif not self._quiet:
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()

    def __call__(self, label: str, done: int, total: int) -> None:
        now = time.monotonic()
        pace = self._pace.note(done, total, now)
        if self._bar is not None:
            self._bar.update(self._task, description=label[:60], completed=done, total=total, pace=pace)
        elif not self._quiet and now - self._last > _PRINT_INTERVAL_S:
            self._last = now
            sys.stderr.write(f"{done}/{total} {label}{f' ({pace})' if pace else ''}\n")
            sys.stderr.flush()
