"""The tests of a random operator's draws against ATen's."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from opforge.judge.random.distribution import DRAWS_PER_GROUP, JointTestResult, PairedTest, Sample, paired_test

_ALLOWED_ROUNDING_STEPS = 8.0
"""Values within this many rounding steps count as equal: kernels may round in another order."""
_QUANTILES = (0.0001, 0.001, 0.005, *(i / 40 for i in range(1, 40)), 0.995, 0.999, 0.9999)
_LAGS = (1, 2, 3, 4, 8, 16, 32)
_MAX_FINE_STEP = 1e-5
"""Dtypes with a smaller rounding step have enough values for draws without repeats."""
_MAX_REPEAT_RATIO = 4.0
"""Allowed ratio of repeated values to ATen's: generators differ in how many bits they draw."""
_INFINITY_SUBSTITUTE = 1e300
_QUANTILE_SAMPLE_SIZE = 50_000


@dataclass
class DrawTests:
    """All tests of one result's draws."""

    sample: Sample
    label: str

    def tests(self) -> Iterator[PairedTest]:
        """Yield the tests, those with the clearest messages first; none for an empty result."""
        if not self.sample.kernel.numel():
            return
        yield from self._repeats()
        yield self.ks_test
        yield from self._profile()
        yield from self._positions()
        yield from self._neighbours()
        yield from self._residues()
        yield from self._totals()
        yield from self._within_a_draw()
        yield from self._between_draws()

    def figures(self, result: JointTestResult) -> dict[str, Any]:
        """Return the sample size, and the Kolmogorov-Smirnov distance with its limit."""
        sizes = {"draws": self._draw_count, "elements": self.sample.kernel.numel()}
        if not self.sample.kernel.numel():
            return sizes
        test = self.ks_test
        worst = int(test.excess.argmax())
        limit = result.figures["z_limit"] * float(test.spread[worst]) / self._draw_count
        return {**sizes, "ks": round(float(test.excess[worst]) / self._draw_count, 6), "ks_limit": round(limit, 6)}

    @cached_property
    def _draw_count(self) -> int:
        return len(self.sample.kernel)

    @cached_property
    def _pool(self) -> torch.Tensor:
        """All draws as float64, the kernel's first; NaN is larger than anything."""
        pool = torch.cat([self.sample.kernel, self.sample.aten]).double()
        return torch.nan_to_num(
            pool, nan=2 * _INFINITY_SUBSTITUTE, posinf=_INFINITY_SUBSTITUTE, neginf=-_INFINITY_SUBSTITUTE
        )

    @cached_property
    def _tolerance(self) -> torch.Tensor:
        """Distance up to which values count as equal."""
        return self._tolerance_of(self._pool)

    def _tolerance_of(self, values: torch.Tensor) -> torch.Tensor:
        return _ALLOWED_ROUNDING_STEPS * self.sample.rounding_step * (values.abs() + self._median_magnitude)

    @cached_property
    def _median_magnitude(self) -> torch.Tensor:
        return self._pool.abs().median()

    @cached_property
    def ks_test(self) -> PairedTest:
        """A Kolmogorov-Smirnov test at quantiles of all draws that allows for rounding."""
        thresholds = self._quantiles(*_QUANTILES)
        # Above the value: elements that equal it count as at most the threshold, however rounded.
        thresholds = (thresholds + 2 * self._tolerance_of(thresholds)).unique()
        left, right = self._split(self._pool)
        lower, upper = left - self._split(self._tolerance)[0], left + self._split(self._tolerance)[0]
        mid, low, high = (_shares_below(values, thresholds) for values in (left, lower, upper))
        aten = _shares_below(right, thresholds)
        excess = torch.maximum((high - aten).sum(0), (aten - low).sum(0)).clamp(min=0)
        spread = torch.stack([(f - aten).square().sum(0) for f in (mid, low, high)]).amax(0).sqrt()

        def say(index: int) -> str:
            share, expected = float(mid.mean(0)[index]), float(aten.mean(0)[index])
            distance = float(excess[index]) / self._draw_count
            return (
                f"{self.label}: Kolmogorov-Smirnov distance {distance:.3g} from ATen's samples:"
                f" {share:.3%} of the elements are at most {float(thresholds[index]):.4g}, ATen has {expected:.3%}"
            )

        return PairedTest(excess, spread, say)

    @cached_property
    def _ranks(self) -> torch.Tensor:
        """Rank of each value among all draws of its element, from -1 to 1; near values tie."""
        columns = self._pool.T.contiguous()
        tolerance = self._tolerance.T
        ordered = columns.sort(dim=1).values
        below = torch.searchsorted(ordered, (columns - tolerance).contiguous())
        upto = torch.searchsorted(ordered, (columns + tolerance).contiguous(), right=True)
        return ((below + upto).double() / len(self._pool) - 1).T.contiguous()

    def _positions(self) -> Iterator[PairedTest]:
        left, right = self._split(self._ranks)
        slack = 2 * _ALLOWED_ROUNDING_STEPS * self.sample.rounding_step

        def level(index: int) -> str:
            side = "larger" if float(left[:, index].mean()) > float(right[:, index].mean()) else "smaller"
            return (
                f"{self.label}: the element at flat position {self._flat_position(index)} is {side} than ATen's on "
                "average"
            )

        def width(index: int) -> str:
            side = "wider" if float(left[:, index].abs().mean()) > float(right[:, index].abs().mean()) else "narrower"
            return (
                f"{self.label}: the element at flat position {self._flat_position(index)} is spread {side} than ATen's"
            )

        yield paired_test(left, right, level, slack)
        yield paired_test(left.square(), right.square(), width, 2 * slack)

    def _profile(self) -> Iterator[PairedTest]:
        """Test whether draws follow ATen's levels and widths along the elements.

        Parameters in another order show here.
        """
        low, high = self._range
        scale = 2 / (high - low)
        slack = float((self._tolerance.clamp(max=high - low)).mean()) * scale

        def scaled(values: torch.Tensor) -> torch.Tensor:
            return (values.clamp(low, high) - low) * scale - 1

        pilot = scaled(
            torch.nan_to_num(
                self.sample.pilot.double(),
                nan=2 * _INFINITY_SUBSTITUTE,
                posinf=_INFINITY_SUBSTITUTE,
                neginf=-_INFINITY_SUBSTITUTE,
            )
        )
        levels, values = pilot.mean(0), scaled(self._pool)
        widths = (pilot - levels).square().mean(0)
        levels_differ = f"{self.label}: the means of the elements do not follow those of ATen's"
        widths_differ = f"{self.label}: the variances of the elements do not follow those of ATen's"
        yield paired_test(*self._split(values @ _weights(levels)), lambda _: levels_differ, slack)
        squares = (values - levels).square()
        yield paired_test(*self._split(squares @ _weights(widths)), lambda _: widths_differ, 4 * slack)

    def _within_a_draw(self) -> Iterator[PairedTest]:
        """Test whether the elements of a draw are independent.

        Each may be right, and all of them together too even or too uneven.
        """
        ranks = self._ranks
        ends = torch.stack([ranks.amin(1), ranks.amax(1)], 1)
        slack = 2 * _ALLOWED_ROUNDING_STEPS * self.sample.rounding_step
        left, right = (float(part.mean()) for part in self._split(ranks.mean(1).abs()))
        uneven_mean = (
            f"{self.label}: the elements of a sample are not independent: its mean varies "
            f"{left / max(right, 1e-9):.3g} times as much as ATen's"
        )
        yield paired_test(*self._split(ranks.mean(1).abs()), lambda _: uneven_mean, slack)
        end = f"{self.label}: the {{}} element of a sample has another distribution than ATen's"
        yield paired_test(*self._split(ends), lambda index: end.format(("smallest", "largest")[index]), slack)

    def _neighbours(self) -> Iterator[PairedTest]:
        ranks, positions = self._ranks, self.sample.positions
        for lag in sorted({*_LAGS, self.sample.row_length}):
            if lag >= len(positions) or not (near := positions[lag:] - positions[:-lag] == lag).any():
                continue
            products = (ranks[:, lag:] * ranks[:, :-lag])[:, near].mean(1)
            message = f"{self.label}: elements {lag} apart are correlated differently from ATen's"
            yield paired_test(*self._split(products), lambda _, message=message: message)  # type: ignore[misc]

    def _totals(self) -> Iterator[PairedTest]:
        """Test the means of whole draws, including elements that are not sampled."""
        totals = torch.nan_to_num(torch.cat([self.sample.kernel_means, self.sample.aten_means]).double())
        deviations = (totals - totals.median()).abs()
        wrong_mean = f"{self.label}: the mean of a whole sample is not ATen's"
        left, right = (float(part.mean()) for part in self._split(deviations))
        ratio = f"{left / right:.3g} times" if right else "more than"
        wrong_variation = (
            f"{self.label}: the elements of a sample are not independent: its mean varies {ratio} as much as ATen's"
        )
        slack = float(self._tolerance.mean())
        yield paired_test(*self._split(totals), lambda _: wrong_mean, slack)
        yield paired_test(*self._split(deviations), lambda _: wrong_variation, slack)

    def _between_draws(self) -> Iterator[PairedTest]:
        """Test whether draws of one group depend on one another."""
        for pair_label, left, right in self._draw_pairs(self._ranks):
            related = f"{self.label}: {pair_label} give samples that are correlated differently from ATen's"
            shifts = [(left * right).mean((-1, -2))]
            if left.shape[-1] > 1:
                shifts.append((left[..., 1:] * right[..., :-1]).mean((-1, -2)))
                shifts.append((left[..., :-1] * right[..., 1:]).mean((-1, -2)))
            links = torch.stack(shifts, -1)
            yield paired_test(links[0], links[1], lambda _, text=related: text)  # type: ignore[misc]

    def _draw_pairs(self, values: torch.Tensor) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Yield pairs of draws of each group that may be related: side, group, pair, element."""
        groups = values.reshape(2, -1, DRAWS_PER_GROUP, values.shape[1])
        yield "two calls in a row under one seed", groups[:, :, (0, 2)], groups[:, :, (1, 3)]
        yield "a seed and the next one", groups[:, :, (0, 1)], groups[:, :, (2, 3)]

    def _repeats(self) -> Iterator[PairedTest]:
        """Test whether values or whole draws repeat too often."""
        different = [len({row.tobytes() for row in side.view(torch.uint8).numpy()}) for side in self._kernel_and_aten]
        # One draw more or less changes the count by one at most.
        # So McDiarmid's inequality bounds the difference.
        distance = torch.tensor([abs(float(different[0] - different[1]))])
        too_few = (
            f"{self.label}: {different[0]} different samples from {self._draw_count} seeds and calls, ATen has "
            f"{different[1]}"
        )
        stuck = f"{self.label}: the same sample for every seed"
        count = PairedTest(
            distance, torch.tensor([math.sqrt(self._draw_count / 2)]), lambda _: stuck if different[0] == 1 else too_few
        )
        if different[0] == 1:
            yield count
        for pair_label, left, right in self._draw_pairs(torch.cat(self._kernel_and_aten)):
            same = (left == right).all(-1).double().mean(-1)
            shares = [f"{float(side.mean()):.0%}" for side in same]
            text = f"{self.label}: {pair_label} give the same sample {shares[0]} of the time, ATen's {shares[1]}"
            yield paired_test(same[0], same[1], lambda _, text=text: text)  # type: ignore[misc]
        if different[0] > 1:
            yield count
        if self.sample.rounding_step > _MAX_FINE_STEP:
            return
        kernel, aten = (_count_repeats(side) for side in self._kernel_and_aten)
        excess = (kernel.sum() - _MAX_REPEAT_RATIO * aten.sum()).clamp(min=0).reshape(1)
        within = (
            f"{self.label}: a sample has {float(kernel.mean()):.3g} repeated values, ATen's {float(aten.mean()):.3g}"
        )
        yield PairedTest(excess, (kernel - aten).square().sum().sqrt().reshape(1), lambda _: within)

    def _residues(self) -> Iterator[PairedTest]:
        """Test remainders (how often values are odd, and so on), if all are whole numbers."""
        all_integers = (
            all(bool((side == side.round()).all()) for side in self._kernel_and_aten)
            if self.sample.rounding_step
            else True
        )
        if not all_integers or self.sample.rounding_step > _MAX_FINE_STEP or self.sample.kernel.dtype == torch.bool:
            return
        kernel, aten = (
            torch.stack([(side.remainder(m) == m - 1).double().mean(1) for m in (2, 3, 4, 5, 8)], 1)
            for side in self._kernel_and_aten
        )
        message = f"{self.label}: whole numbers with remainder {{0}} modulo {{1}} have another frequency than ATen's"
        yield paired_test(kernel, aten, lambda i: message.format((2, 3, 4, 5, 8)[i] - 1, (2, 3, 4, 5, 8)[i]))

    @property
    def _kernel_and_aten(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.sample.kernel.contiguous(), self.sample.aten.contiguous()

    @cached_property
    def _ordered(self) -> torch.Tensor:
        """Sorted values for quantiles, subsampled by element so that both sides weigh the same."""
        step = max(1, self._pool.numel() // _QUANTILE_SAMPLE_SIZE)
        return self._pool[:, ::step].reshape(-1).sort().values

    def _quantiles(self, *shares: float) -> torch.Tensor:
        last = len(self._ordered) - 1
        return self._ordered[[round(share * last) for share in shares]]

    @cached_property
    def _range(self) -> tuple[float, float]:
        """The range that holds nearly all values."""
        low, high = (float(v) for v in self._quantiles(0.01, 0.99))
        if low == high:
            low, high = float(self._pool.min()), float(self._pool.max())
        return (low, high) if high > low else (low - 1, low + 1)

    def _split(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return values[: self._draw_count], values[self._draw_count :]

    def _flat_position(self, index: int) -> int:
        return int(self.sample.positions[index])


def _shares_below(values: torch.Tensor, thresholds: torch.Tensor) -> torch.Tensor:
    """Return, for each row, the share of values at or below each threshold."""
    slots = torch.searchsorted(thresholds, values.contiguous())
    counts = torch.zeros(len(values), len(thresholds) + 1, dtype=torch.float64)
    counts.scatter_add_(1, slots, torch.ones_like(values))
    return counts.cumsum(1)[:, :-1] / max(1, values.shape[1])


def _weights(profile: torch.Tensor) -> torch.Tensor:
    centred = profile - profile.mean()
    return centred / centred.abs().sum().clamp(min=1e-300)


def _count_repeats(rows: torch.Tensor) -> torch.Tensor:
    """Return how many values of each row repeat another."""
    if rows.shape[1] < 2:
        return torch.zeros(len(rows), dtype=torch.float64)
    return (rows.sort(dim=1).values.diff(dim=1) == 0).sum(1).double()
