"""What each of many runs recorded, kept on disk until they are put together: what was broken off is run again, the rest stays."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from opforge.traces.collect import Collector
from opforge.traces.file import Trace, drafted
from opforge.traces.stream import messages
from opforge.traces.targets import Settings, Target


@dataclass(frozen=True, slots=True)
class Run:
    """One target, run in one way."""

    target: Target
    way: str
    """``inference`` or ``training``."""
    settings: Settings

    @property
    def name(self) -> str:
        return f"{self.target.kind}:{self.target.name} {self.way}"

    def words(self) -> dict[str, Any]:
        """Return all that its recording depends on."""
        words: dict[str, Any] = json.loads(json.dumps({**asdict(self.target), "settings": self.settings.as_json()}))
        return words


@dataclass(frozen=True, slots=True)
class Ended:
    """How a run came to its end."""

    seconds: float
    error: str = ""
    """What went wrong, in words; empty when nothing did."""


class Parts:
    """A folder with two files for each run: what it sends, and, when it has ended, how."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def calls(self, run: Run) -> Path:
        """Return the file to which a run sends its messages."""
        return self._file(run, "calls")

    def output(self, run: Run) -> Path:
        """Return the file for what a run prints."""
        return self._file(run, "out")

    def keep(self, run: Run, ended: Ended) -> None:
        """Note that a run has ended."""
        with drafted(self._file(run, "json")) as draft:
            draft.write_text(json.dumps({"run": run.words(), **asdict(ended)}))

    def ended(self, run: Run) -> Ended | None:
        """Return how a run ended; None where it has not, or was another run under the same name."""
        file = self._file(run, "json")
        if not file.is_file():
            return None
        kept = json.loads(file.read_text())
        return Ended(kept["seconds"], kept["error"]) if kept["run"] == run.words() else None

    def forget(self, run: Run) -> None:
        """Take a run's files away."""
        for kind in ("json", "calls", "out"):
            self._file(run, kind).unlink(missing_ok=True)

    def error(self, run: Run) -> str:
        """Return what a run itself said of its end; empty where it said nothing."""
        said = [row["error"] for row, _ in self._messages(run) if "error" in row]
        return str(said[-1]) if said else ""

    def gather(self, runs: Iterable[Run], about: dict[str, Any]) -> Trace:
        """Return the calls of all runs that have ended, in one trace; runs that failed give what they made until then."""
        collector = Collector()
        failed: dict[str, str] = {}
        for run in runs:
            if (ended := self.ended(run)) is None:
                failed[run.name] = "not run"
                continue
            if ended.error:
                failed[run.name] = ended.error
            collector.begin(run.target.model)
            for row, contents in self._messages(run):
                collector.take(row, contents)
        made = collector.trace({**about, "failed": failed})
        made.about["models"] = sorted({seen.model for call in made.calls for seen in call.seen})
        return made

    def _messages(self, run: Run) -> Iterator[tuple[dict[str, Any], bytes]]:
        path = self.calls(run)
        if path.is_file():
            with path.open("rb") as stream:
                yield from messages(stream)

    def _file(self, run: Run, kind: str) -> Path:
        name = run.name.replace(":", ".").replace(" ", ".").replace("/", ".")
        return self._folder / f"{name}.{kind}"
