"""A kernel's process in which Triton compiles as for a GPU, and a stand-in for its driver runs the blocks on the CPU."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

from opforge.runtime.learning import DEVICE_TYPES
from opforge.runtime.native import binding
from opforge.sandbox.guest import worker
from opforge.sandbox.guest.worker import serve

__all__ = ["prepare", "serve"]

LIBRARY = os.environ["OPFORGE_TEST_STANDIN"]


class _StandinWorker(worker.Worker):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        del os.environ["TRITON_INTERPRET"]
        from triton.runtime import driver

        from tests.runtime import standin

        DEVICE_TYPES.add("cpu")
        binding.load().load_driver(LIBRARY)
        driver.set_active(standin.Driver(Path(LIBRARY)))


def prepare() -> None:
    """Load the stand-in before processes are confined."""
    ctypes.CDLL(LIBRARY)
    worker.Worker = _StandinWorker
    worker.prepare()
