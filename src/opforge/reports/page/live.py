"""View of a run in progress: new rows are read as they arrive, and no row twice."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from opforge.errors import RunDirectoryError
from opforge.reports.page.case_data import CaseData
from opforge.reports.page.content import FINISHED, INTERRUPTED, RUNNING, run_page_data, run_state
from opforge.reports.page.kernel_sources import Sources
from opforge.runs.manifest import Manifest
from opforge.runs.score import Summary
from opforge.runs.store import MANIFEST, RESULTS, is_locked, read_manifest, read_rows


class LiveRun:
    """One run's folder. Several threads may ask at once; each gets the current state."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._page_data: dict[str, Any] | None = None
        self._reset(read_manifest(path))

    def data(self) -> dict[str, Any]:
        """Return the data that the page shows at once, with its version."""
        with self._lock:
            version = self._catch_up()
            if self._page_data is None or self._page_data["version"] != version:
                state = run_state(self._manifest, self._summary, is_locked=version.endswith("held"))
                page_data = run_page_data(self._path, self._manifest, self._summary, self._columns, state)
                self._page_data = {**page_data, "version": version}
            return self._page_data

    def blob(self, name: str) -> list[str] | None:
        """Return cases, points or a source, packed."""
        with self._lock:
            self._catch_up()
            maker = Sources(self._manifest, self._summary) if name.startswith("kernel:") else self._columns
            return maker.blob(name)

    def _reset(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._summary = Summary.start(manifest)
        self._columns = CaseData()
        self._position = 0
        self._page_data = None

    def _catch_up(self) -> str:
        """Read new rows, and return a text that identifies this state."""
        manifest = read_manifest(self._path)
        written = (self._path / MANIFEST).stat().st_mtime_ns
        results = self._path / RESULTS
        size = results.stat().st_size if results.exists() else 0
        if manifest.started != self._manifest.started or size < self._position:
            self._reset(manifest)  # another run has replaced it
        self._manifest = manifest
        for row in read_rows(self._path, self._position, self._set_position):
            self._summary.add(row)
            self._columns.add(row, self._summary)
        return f"{written}.{self._position}.{'held' if is_locked(self._path) else 'free'}"

    def _set_position(self, place: int) -> None:
        self._position = place


def runs_by_name(folder: Path) -> dict[str, Path]:
    """Return the runs in a folder by name, the newest first."""
    runs = [p for p in folder.iterdir() if (p / MANIFEST).is_file() and p.name.isprintable()]
    return {p.name: p for p in sorted(runs, key=lambda p: ((p / MANIFEST).stat().st_mtime_ns, p.name), reverse=True)}


def list_page_data(folder: Path) -> dict[str, Any]:
    """Return the data of the page that lists a folder's runs."""
    rows = [_row(name, path) for name, path in runs_by_name(folder).items()]
    version = str(hash(str(rows)))
    return {"kind": "list", "title": f"Runs in {folder.resolve().name}", "runs": rows, "version": version}


def _row(name: str, path: Path) -> dict[str, str]:
    """Return the list entry of a run; a run that cannot be read is listed with its error."""
    try:
        manifest = read_manifest(path)
    except RunDirectoryError as error:
        return {"name": name, "state": str(error)}
    scores = manifest.scores or {}
    state = FINISHED if manifest.finished is not None else RUNNING if is_locked(path) else INTERRUPTED
    speed, interval = scores.get("performance"), scores.get("performance_interval")
    return {
        "name": name,
        "backend": manifest.backend,
        "suite": Path(manifest.suite).name,
        "device": manifest.device,
        "started": manifest.started,
        "state": state,
        "cases": str(manifest.plan.cases),
        "correctness": f"{scores['correctness']:.4f}" if "correctness" in scores else "",
        "performance": f"{speed:.3f}× [{interval[0]:.3f}, {interval[1]:.3f}]" if speed is not None and interval else "",
    }
