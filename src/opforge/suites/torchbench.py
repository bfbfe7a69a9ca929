"""Suite of operator calls of popular models, recorded on a GPU by `benchmarks/record_zoo.py`."""

from __future__ import annotations

from pathlib import Path

from opforge.suites.trace import TraceSuite

DATA = Path(__file__).with_name("torchbench.parquet")


class TorchbenchSuite(TraceSuite):
    """Operator calls of popular models, inference and training: each judged and timed on its real shapes."""

    def __init__(self) -> None:
        super().__init__(DATA, name="torchbench")
