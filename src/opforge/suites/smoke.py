"""The smoke suite: relu with one small case for correctness and one for performance."""

from __future__ import annotations

from opforge.cases import Case, Phase
from opforge.suites.base import LoadedSuite, Progress, SuiteOptions, no_progress


class SmokeSuite:
    """relu: one small case for correctness, one for performance. Runs anywhere in seconds."""

    name = "smoke"

    def load(self, options: SuiteOptions, progress: Progress = no_progress) -> LoadedSuite:
        progress("smoke", 1, 1)
        op = "relu.default"
        if options.ops is not None and op not in options.ops:
            return LoadedSuite(self.name, {})
        dtype = next((d for d in options.dtypes if d in ("f32", "f16", "bf16", "f64")), "f32")
        cases = [
            Case.make(op, f"((T([16, 33], {dtype}),), {{}})", source="smoke"),
            Case.make(op, f"((T([1024, 1024], {dtype}),), {{}})", source="smoke", phase=Phase.PERFORMANCE),
        ]
        return LoadedSuite(self.name, {op: cases})
