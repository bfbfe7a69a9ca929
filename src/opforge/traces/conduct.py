"""Trace programs, each in a process of its own, into one trace. Needs no torch."""

from __future__ import annotations

import datetime as dt
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from opforge.cache import torch_version
from opforge.errors import OpforgeError
from opforge.traces.collect import Collector
from opforge.traces.stream import Child
from opforge.traces.targets import Settings, Target

CHILD = (sys.executable, "-P", "-m", "opforge.traces.child")
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Ended:
    """How the tracing of one program ended."""

    error: str = ""
    """Error message; empty if the program ran to its end."""
    traceback: str = ""


def trace(
    collector: Collector, target: Target, settings: Settings, progress: Progress, limit_s: float | None = None
) -> Ended:
    """Run a target in a process of its own and collect its calls.

    Its output goes to stderr. After a crash, the calls recorded before are kept.
    """
    payload = {**asdict(target), "settings": settings.checked().as_json()}
    collector.begin(target.model)
    child = Child([*CHILD, json.dumps(payload)], limit_s, stdout=sys.stderr.fileno(), env=environment())
    error_row: dict[str, Any] = {}
    calls = 0
    try:
        while (message := child.message()) is not None:
            row, contents = message
            error_row = row if "error" in row else error_row
            calls += "new" in row
            collector.take(row, contents)
            progress(f"{target.model}: {calls} distinct calls", calls, calls)
    except BaseException:
        child.kill()
        raise
    code, ending = child.end()
    if error_row.get("ours"):
        raise OpforgeError(error_row["error"])
    if error_row:
        return Ended(error_row["error"], error_row.get("traceback", ""))
    if code or child.hung:
        during = f" in its first call of {collector.at}" if collector.at else ""
        return Ended(f"the program's process {ending}{during}; what was recorded before is kept")
    return Ended()


def about(settings: Settings, command: list[str]) -> dict[str, Any]:
    """Return the metadata of a recording for the trace file."""
    now = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
    return {
        "torch": torch_version(),
        "device": settings.device.partition(":")[0],
        "fake": settings.fake,
        "command": command,
        "recorded": now,
    }


def environment() -> dict[str, str]:
    """Return an environment in which a process imports this same copy of the package."""
    package = str(Path(__file__).resolve().parents[2])
    paths = [package, os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
