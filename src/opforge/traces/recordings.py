"""Recordings of many runs, kept on disk until they are merged.

Runs that were interrupted are repeated; the others are kept.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from opforge.procs.child import read_messages
from opforge.traces.collect import Collector
from opforge.traces.targets import Settings, Target
from opforge.traces.trace_file import Trace, atomic_path


@dataclass(frozen=True, slots=True)
class TracedRun:
    """One target, run in one mode."""

    target: Target
    mode: str
    """``inference`` or ``training``."""
    settings: Settings

    @property
    def name(self) -> str:
        return f"{self.target.kind}:{self.target.name} {self.mode}"

    def as_json(self) -> dict[str, Any]:
        """Return everything that its recording depends on."""
        row: dict[str, Any] = json.loads(json.dumps({**asdict(self.target), "settings": self.settings.as_json()}))
        return row


@dataclass(frozen=True, slots=True)
class RunEnd:
    """How a run ended."""

    seconds: float
    error: str = ""
    """Error message; empty if there was none."""


class Parts:
    """A folder with the files of each run: messages, output and, once it has ended, how."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def messages_file(self, run: TracedRun) -> Path:
        """Return the file for a run's messages."""
        return self._file(run, "calls")

    def output_file(self, run: TracedRun) -> Path:
        """Return the file for a run's output."""
        return self._file(run, "out")

    def write_end(self, run: TracedRun, end: RunEnd) -> None:
        """Record that a run has ended."""
        with atomic_path(self._file(run, "json")) as draft:
            draft.write_text(json.dumps({"run": run.as_json(), **asdict(end)}))

    def read_end(self, run: TracedRun) -> RunEnd | None:
        """Return how a run ended; None if it has not, or if another run had the same name."""
        file = self._file(run, "json")
        if not file.is_file():
            return None
        kept = json.loads(file.read_text())
        return RunEnd(kept["seconds"], kept["error"]) if kept["run"] == run.as_json() else None

    def delete(self, run: TracedRun) -> None:
        """Delete a run's files."""
        for kind in ("json", "calls", "out"):
            self._file(run, kind).unlink(missing_ok=True)

    def reported_error(self, run: TracedRun) -> str:
        """Return the error that a run itself reported; empty if none."""
        errors = [row["error"] for row, _ in self._messages(run) if "error" in row]
        return str(errors[-1]) if errors else ""

    def merge(self, runs: Iterable[TracedRun], metadata: Mapping[str, Any]) -> Trace:
        """Return one trace of all ended runs; failed runs add the calls they made."""
        collector = Collector()
        failed: dict[str, str] = {}
        for run in runs:
            if (ended := self.read_end(run)) is None:
                failed[run.name] = "not run"
                continue
            if ended.error:
                failed[run.name] = ended.error
            collector.start_model(run.target.model_name)
            for row, contents in self._messages(run):
                collector.add_message(row, contents)
        merged = collector.merged_trace({**metadata, "failed": failed})
        merged.metadata["models"] = sorted({seen.model for call in merged.calls for seen in call.seen})
        return merged

    def _messages(self, run: TracedRun) -> Iterator[tuple[Mapping[str, Any], bytes]]:
        path = self.messages_file(run)
        if path.is_file():
            with path.open("rb") as stream:
                yield from read_messages(stream)

    def _file(self, run: TracedRun, kind: str) -> Path:
        name = run.name.replace(":", ".").replace(" ", ".").replace("/", ".")
        return self._folder / f"{name}.{kind}"
