"""The baseline of a model's results: ATen's run, and a float64 run of the same weights and inputs.

Each runs in a clean process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from opforge.models.model_process import ModelProcess, ModelProcessError
from opforge.models.tensor_comparison import (
    MeasuredAnswers,
    TensorComparison,
    compare,
    elementwise_error,
    float64_disagrees,
)

_PERTURBATION_SEEDS = range(1, 9)
"""Seeds of the perturbations of weights and inputs, to measure ATen's own error several times."""

StatusCallback = Callable[[str], None]


@dataclass
class Baseline:
    """The processes of ATen and of float64, which have run the model."""

    aten: ModelProcess
    exact: ModelProcess | None
    """None if the model does not run in float64, or takes another path there."""
    notes: list[str] = field(default_factory=list)
    _aten_errors: dict[str, torch.Tensor] | None = None

    def drop_disagreeing_float64(self) -> None:
        """Drop the float64 run if its outputs are not those of the same model."""
        if self.exact is None:
            return
        for name, aten, exact in self._pairs():
            if name.startswith("output") and exact is not None and float64_disagrees(aten, exact):
                self.notes.append(
                    f"float64 gives another {name} than ATen does, so kernels are compared with ATen only"
                )
                self.exact.close()
                self.exact = None
                return

    def compare(self, process: ModelProcess, on_status: StatusCallback) -> list[TensorComparison]:
        """Compare all results of a run with kernels to this baseline, in order."""
        compared = [self._compared(name, kernel, aten, exact) for name, kernel, aten, exact in self._triples(process)]
        if self._aten_errors is None and not all(c.passed for c in compared):
            on_status("measuring ATen's own error several times")
            self._aten_errors = self._measure_aten_errors()
            compared = [
                self._compared(name, kernel, aten, exact) for name, kernel, aten, exact in self._triples(process)
            ]
        missing = [name for name in self.aten.results if name not in process.results]
        added = [name for name in process.results if name not in self.aten.results]
        faults = [(name, "is missing") for name in missing] + [(name, "is there, and ATen has none") for name in added]
        return compared + [TensorComparison(name, f"{name} {fault}") for name, fault in faults]

    def _compared(
        self, name: str, kernel: torch.Tensor, aten: torch.Tensor, exact: torch.Tensor | None
    ) -> TensorComparison:
        answers = MeasuredAnswers(aten, exact, (self._aten_errors or {}).get(name))
        return compare(name, kernel, aten, answers, may_differ=answers.may_differ)

    def _triples(self, process: ModelProcess) -> Iterator[tuple[str, torch.Tensor, torch.Tensor, torch.Tensor | None]]:
        names = [name for name in self.aten.results if name in process.results]
        yield from zip(names, process.tensors(names), self.aten.tensors(names), self._exact_tensors(names), strict=True)

    def _pairs(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor | None]]:
        names = list(self.aten.results)
        yield from zip(names, self.aten.tensors(names), self._exact_tensors(names), strict=True)

    def _exact_tensors(self, names: list[str]) -> Iterator[torch.Tensor | None]:
        """Yield the float64 results by name; None if there is none of the same shape."""
        exact = self.exact
        shapes = {} if exact is None else {n: r.shape for n, r in exact.results.items()}
        usable = {n: None for n in names if shapes.get(n) == self.aten.results[n].shape}
        tensors = iter(()) if exact is None else exact.tensors(list(usable))
        for name in names:
            yield next(tensors) if name in usable else None

    def _measure_aten_errors(self) -> dict[str, torch.Tensor]:
        """Return ATen's largest error in each element by name, over runs from perturbed weights and inputs.

        Afterwards, all processes have run from the original ones again.
        """
        errors: dict[str, torch.Tensor] = {}
        unperturbed = {} if self.exact is not None else {name: aten.clone() for name, aten, _ in self._pairs()}
        for move in _PERTURBATION_SEEDS:
            self._run(move)
            for name, aten, exact in self._pairs():
                if exact is not None or name in unperturbed:
                    error = elementwise_error(aten, exact if exact is not None else unperturbed[name])
                    errors[name] = torch.maximum(errors[name], error) if name in errors else error
        self._run(0)
        return errors

    def _run(self, perturbation_seed: int) -> None:
        self.aten.run(perturbation_seed)
        if self.exact is not None:
            self.exact.run(perturbation_seed)

    def close(self) -> None:
        for process in (self.aten, self.exact):
            if process is not None:
                process.close()


def run_baseline(aten: ModelProcess, exact: ModelProcess | None) -> Baseline:
    """Run both and return the baseline; raises ModelError if ATen's run fails."""
    aten.run()
    baseline = Baseline(aten, exact)
    if exact is not None:
        try:
            exact.run()
        except ModelProcessError as error:
            baseline.notes.append(f"the model does not run in float64, so kernels are compared with ATen only: {error}")
            exact.close()
            baseline.exact = None
    baseline.drop_disagreeing_float64()
    return baseline
