"""The torchbench suite: operator calls of popular architectures, recorded with `opforge trace` and shipped as one file."""

from __future__ import annotations

from pathlib import Path

from opforge.errors import OpforgeError
from opforge.suites.base import LoadedSuite, Progress, SuiteOptions, silent
from opforge.suites.trace import TraceSuite

DATA = Path(__file__).parent / "torchbench.parquet"
"""Made by ``benchmarks/record_torchbench.py``."""


class TorchBenchSuite:
    """Operators of popular models, with the shapes, strides and dtypes that they have there."""

    name = "torchbench"
    weighted = True

    def load(self, options: SuiteOptions, progress: Progress = silent) -> LoadedSuite:
        if not DATA.is_file():
            raise OpforgeError(
                f"the suite torchbench has no data here ({DATA} is missing); record it with `python benchmarks/record_torchbench.py {DATA}`"
            )
        return TraceSuite(DATA, self.name).load(options, progress)
