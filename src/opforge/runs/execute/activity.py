"""How the judges of a run spend their time, and how busy the GPUs are meanwhile."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from enum import Enum

from opforge.judge.timing import nvml
from opforge.judge.timing.nvml import Gpu
from opforge.runs.manifest import Activity

_SAMPLE_INTERVAL_S = 0.5


class TimeUse(Enum):
    """What a judge does."""

    JUDGING = "judging_s"
    TIMING = "timing_s"
    WAITING = "waiting_s"


class ActivityRecorder:
    """Adds up what judges do between one call of ``advance`` and the next."""

    def __init__(self, gpus: Sequence[Gpu] = (), clock: Callable[[], float] = time.monotonic) -> None:
        """Create a recorder that also asks some GPUs how busy they are."""
        self._gpus = gpus
        self._clock = clock
        self._last_s = clock()
        self._next_sample_s = self._last_s
        self._seconds = dict.fromkeys(TimeUse, 0.0)
        self._busy_percents: list[int] = []

    def advance(self, uses: Iterable[TimeUse]) -> None:
        """Count the time since the last call for judges that have spent it like this."""
        now = self._clock()
        for use in uses:
            self._seconds[use] += now - self._last_s
        self._last_s = now
        if self._gpus and now >= self._next_sample_s:
            self._next_sample_s = now + _SAMPLE_INTERVAL_S
            self._busy_percents += [percent for gpu in self._gpus if (percent := gpu.busy_percent()) is not None]

    def activity(self) -> Activity:
        """Return what was recorded so far."""
        seconds = {use.value: round(total, 3) for use, total in self._seconds.items()}
        percents = self._busy_percents
        return Activity(**seconds, gpu_busy=sum(percents) / len(percents) / 100 if percents else None)


def gpus_of(device: str, shared_out: Sequence[str]) -> list[Gpu]:
    """Return the GPUs of a run: those shared out among judges, else its device; none without NVML."""
    kind, _, index = device.partition(":")
    if kind != "cuda" or (library := nvml.load_library()) is None:
        return []
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    names = [*shared_out] or [visible[int(index or 0)] if int(index or 0) < len(visible) else index or "0"]
    found = (Gpu.at(library, name.strip()) for name in names)
    return [gpu for gpu in found if gpu is not None]
