"""A judge that dies of every kernel: what a kernel would do that has found a way to kill its judge."""

from __future__ import annotations

import os
import signal
from typing import Any

from opforge.judge.process import Judge, serve

__all__ = ["serve"]

_job = Judge.judge_job


def _die_of_kernels(judge: Judge, job: dict[str, Any]) -> None:
    if job["kernel"]["file"] is not None and not job["aten_alone"]:
        os.kill(os.getpid(), signal.SIGBUS)
    _job(judge, job)


Judge.judge_job = _die_of_kernels
