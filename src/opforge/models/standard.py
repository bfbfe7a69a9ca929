"""The baseline of a model's results: ATen's run, and a float64 run of the same weights and inputs.

Each runs in a clean process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from opforge.models.compare import Compared, Size, compare, error_of, misleads
from opforge.models.process import ModelError, ModelProcess

_MOVES = range(1, 9)
"""Seeds of the perturbations of weights and inputs, to measure ATen's own error several times."""

Say = Callable[[str], None]


@dataclass
class Standard:
    """The processes of ATen and of float64, which have run the model."""

    plain: ModelProcess
    exact: ModelProcess | None
    """None if the model does not run in float64, or takes another path there."""
    notes: list[str] = field(default_factory=list)
    _own: dict[str, Size] | None = None

    def drop_if_misleading(self) -> None:
        """Drop the float64 run if its outputs are not those of the same model."""
        if self.exact is None:
            return
        for name, aten, exact in self._pairs():
            if name.startswith("output") and exact is not None and misleads(aten, exact):
                self.notes.append(
                    f"float64 gives another {name} than ATen does, so kernels are held against ATen alone"
                )
                self.exact.close()
                self.exact = None
                return

    def compare(self, run: ModelProcess, say: Say) -> list[Compared]:
        """Compare all results of a run with kernels to this baseline, in order."""
        compared = [self._compared(name, kernel, aten, exact) for name, kernel, aten, exact in self._triples(run)]
        if self._own is None and not all(c.right or c.fault for c in compared):
            say("looking at ATen's own error several times")
            self._own = self._measure_aten_errors()
            compared = [self._compared(name, kernel, aten, exact) for name, kernel, aten, exact in self._triples(run)]
        missing = [name for name in self.plain.results if name not in run.results]
        added = [name for name in run.results if name not in self.plain.results]
        faults = [(name, "is missing") for name in missing] + [(name, "is there, and ATen has none") for name in added]
        return compared + [Compared(name, Size(), Size(), Size(), fault) for name, fault in faults]

    def _compared(self, name: str, kernel: torch.Tensor, aten: torch.Tensor, exact: torch.Tensor | None) -> Compared:
        return compare(name, kernel, aten, exact, (self._own or {}).get(name))

    def _triples(self, run: ModelProcess) -> Iterator[tuple[str, torch.Tensor, torch.Tensor, torch.Tensor | None]]:
        names = [name for name in self.plain.results if name in run.results]
        yield from zip(names, run.tensors(names), self.plain.tensors(names), self._exact_tensors(names), strict=True)

    def _pairs(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor | None]]:
        names = list(self.plain.results)
        yield from zip(names, self.plain.tensors(names), self._exact_tensors(names), strict=True)

    def _exact_tensors(self, names: list[str]) -> Iterator[torch.Tensor | None]:
        """Yield the float64 results by name; None if there is none of the same shape."""
        exact = self.exact
        shapes = {} if exact is None else {n: r.shape for n, r in exact.results.items()}
        usable = {n: None for n in names if shapes.get(n) == self.plain.results[n].shape}
        tensors = iter(()) if exact is None else exact.tensors(list(usable))
        for name in names:
            yield next(tensors) if name in usable else None

    def _measure_aten_errors(self) -> dict[str, Size]:
        """Return ATen's largest error by name, over runs from perturbed weights and inputs.

        Afterwards, all processes have run from the original ones again.
        """
        errors: dict[str, Size] = {}
        unperturbed = {} if self.exact is not None else {name: aten.clone() for name, aten, _ in self._pairs()}
        for move in _MOVES:
            self._run(move)
            for name, aten, exact in self._pairs():
                if exact is not None or name in unperturbed:
                    error = error_of(aten, aten, exact if exact is not None else unperturbed[name])
                    errors[name] = errors.get(name, Size()).most(error)
        self._run(0)
        return errors

    def _run(self, move: int) -> None:
        self.plain.run(move)
        if self.exact is not None:
            self.exact.run(move)

    def close(self) -> None:
        for process in (self.plain, self.exact):
            if process is not None:
                process.close()


def standard(plain: ModelProcess, exact: ModelProcess | None) -> Standard:
    """Run both and return the baseline; raises ModelError if ATen's run fails."""
    plain.run()
    baseline = Standard(plain, exact)
    if exact is not None:
        try:
            exact.run()
        except ModelError as error:
            baseline.notes.append(f"the model does not run in float64, so kernels are held against ATen alone: {error}")
            exact.close()
            baseline.exact = None
    baseline.drop_if_misleading()
    return baseline
