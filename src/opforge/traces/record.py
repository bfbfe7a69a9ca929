"""Trace programs, each in a process of its own, into one trace. Needs no torch."""

from __future__ import annotations

import datetime as dt
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from opforge.cache import torch_version
from opforge.errors import OpforgeError
from opforge.procs.child import Child, child_environment
from opforge.traces.collect import Collector
from opforge.traces.stream import TargetError
from opforge.traces.targets import Settings, Target

CHILD_COMMAND = (sys.executable, "-P", "-m", "opforge.traces.child")
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class TraceResult:
    """How the tracing of one program ended."""

    error: str = ""
    """Error message; empty if the program ran to its end."""
    traceback: str = ""
    exit_code: int = 0
    """Exit code of the program; as in a shell, 128 and the number of the signal that killed it."""


def record(
    collector: Collector, target: Target, settings: Settings, progress: Progress, max_silence_s: float | None = None
) -> TraceResult:
    """Run a target in a process of its own and collect its calls.

    Its output goes to stderr. After a crash, the calls recorded before are kept.
    """
    payload = {**asdict(target), "settings": settings.checked().as_json()}
    collector.start_model(target.model_name)
    command = [*CHILD_COMMAND, json.dumps(payload)]
    error: TargetError | None = None
    calls = 0
    with Child(command, child_environment(), limit_s=max_silence_s, stdout=sys.stderr.fileno()) as child:
        for row, contents in child.messages():
            error = TargetError.from_wire(row) if "error" in row else error
            calls += "new" in row
            collector.add_message(row, contents)
            progress(f"{target.model_name}: {calls} distinct calls", calls, calls)
        code = child.wait()
    if error is not None and error.ours:
        raise OpforgeError(error.error)
    if error is not None:
        return TraceResult(error.error, error.traceback, error.exit_code)
    if code or child.timed_out:
        during = f" in its first call of {collector.started_op}" if collector.started_op else ""
        message = f"the program's process {child.ending}{during}; what was recorded before is kept"
        return TraceResult(message, exit_code=1 if child.timed_out else code if code > 0 else 128 - code)
    return TraceResult()


def recording_metadata(settings: Settings, command: list[str]) -> dict[str, Any]:
    """Return the metadata of a recording for the trace file."""
    now = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
    return {
        "torch": torch_version(),
        "device": settings.device.partition(":")[0],
        "fake": settings.fake,
        "command": command,
        "recorded": now,
    }
