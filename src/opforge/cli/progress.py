"""Progress on stderr: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from opforge.reports.escape import escape_controls

_PRINT_INTERVAL_S = 5.0


class ProgressLine:
    """A callable that shows what is being done and how far it is."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._bar: Progress | None = None
        self._last = time.monotonic()
        if not quiet and sys.stderr.isatty():
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task("starting", total=None)

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
        if self._bar is not None:
            self._bar.update(self._task, description=label[:60], completed=done, total=total)
        elif not self._quiet and time.monotonic() - self._last > _PRINT_INTERVAL_S:
            self._last = time.monotonic()
            sys.stderr.write(f"{done}/{total} {label}\n")
            sys.stderr.flush()
