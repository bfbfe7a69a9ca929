"""Rules for every single draw of a random operator: ranges, and relations between its results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from opforge.cases.tensors import to_float64

_MAX_ROUNDING_STEPS = 8.0
"""Rounding steps by which a product may be off."""


@dataclass(frozen=True, slots=True)
class Draws:
    """Draws of a case: arguments, and results with the draws stacked along the first dimension."""

    arguments: dict[str, Any]
    """Arguments by their names in the schema."""
    results: list[torch.Tensor]
    """Results in order, then other inputs that the operator writes."""

    def number_argument(self, name: str, default: float) -> float:
        value = self.arguments.get(name, default)
        return float(value) if isinstance(value, int | float) else default


Rule = Callable[[Draws], str | None]


def broken_rule(rule: Rule | None, draws: Draws) -> str | None:
    """Return how a draw breaks the operator's rule, or None."""
    return rule(draws) if rule is not None and draws.results and draws.results[0].numel() else None


def _why_not_integers(values: torch.Tensor, low: float, high: float) -> str | None:
    """Return why values are not whole numbers from ``low`` to ``high``, or None."""
    wide = values.double() if values.is_floating_point() else values
    if values.is_floating_point() and bool((wide != wide.round()).any()):
        return f"samples hold {float(wide[wide != wide.round()][0]):.6g}, expected whole numbers"
    return _between(wide, low, high)


def _between(values: torch.Tensor, low: float, high: float) -> str | None:
    outside = (values < low) | (values > high)
    if bool(outside.any()):
        return f"samples hold {values[outside][0].item():.6g}, outside {low:.6g} to {high:.6g}"
    return None


def bernoulli(draws: Draws) -> str | None:
    return _why_not_integers(draws.results[0], 0, 1)


def randint(draws: Draws) -> str | None:
    arguments = draws.arguments
    high = arguments.get("high", arguments.get("to"))
    if isinstance(high, torch.Tensor) or high is None:
        return None
    low = int(arguments.get("low", arguments.get("from", 0)))
    # A float result may not hold the largest whole number exactly, and rounds it up.
    top = (
        high - 1
        if not draws.results[0].is_floating_point()
        else float(torch.tensor(high - 1).to(draws.results[0].dtype))
    )
    return _why_not_integers(draws.results[0], low, top)


def uniform(draws: Draws) -> str | None:
    real = torch.view_as_real(draws.results[0]) if draws.results[0].is_complex() else draws.results[0]
    low, high = (torch.tensor(draws.number_argument(n, d)).to(real.dtype) for n, d in (("from", 0.0), ("to", 1.0)))
    return _between(real, float(low), float(high))


def positive(draws: Draws) -> str | None:
    return _between(draws.results[0], 0.0, float("inf"))


def counts(draws: Draws) -> str | None:
    return _why_not_integers(draws.results[0], 0, float("inf"))


def geometric(draws: Draws) -> str | None:
    return _why_not_integers(draws.results[0], 1, float("inf"))


def randperm(draws: Draws) -> str | None:
    drawn = draws.results[0]
    if torch.equal(drawn.sort(dim=-1).values, torch.arange(drawn.shape[-1]).to(drawn.dtype).expand(drawn.shape)):
        return None
    return f"a sample is not a permutation of 0 to {drawn.shape[-1] - 1}"


def multinomial(draws: Draws) -> str | None:
    weights, drawn = draws.arguments["self"].detach().cpu(), draws.results[0].long()
    if reason := _between(drawn, 0, weights.shape[-1] - 1):
        return reason
    if not draws.arguments.get("replacement", False) and bool((drawn.sort(dim=-1).values.diff(dim=-1) == 0).any()):
        return "a sample without replacement holds one category twice"
    rows = weights.expand(*drawn.shape[:-1], weights.shape[-1])
    return "a sample holds a category of weight zero" if bool((rows.gather(-1, drawn) == 0).any()) else None


def native_dropout(draws: Draws) -> str | None:
    source = draws.arguments["input" if "input" in draws.arguments else "self"].detach().cpu()
    result, mask = draws.results[0], draws.results[1].bool()
    # _fused_dropout's p is the probability to keep
    keep_probability = (
        1 - draws.number_argument("p", 0.5) if "input" in draws.arguments else draws.number_argument("p", 0.5)
    )
    if bool((result[~mask.expand(result.shape)] != 0).any()):
        return "result[0] is not zero where the mask in result[1] drops"
    expected = torch.where(mask, source * (1 / keep_probability if keep_probability else 0.0), 0)
    return "result[0] is not the input times the mask in result[1], scaled" if _differs(result, expected) else None


def dropout(draws: Draws) -> str | None:
    source, result = draws.arguments["input"].detach().cpu(), draws.results[0]
    keep_probability = 1 - draws.number_argument("p", 0.5)
    expected = torch.where(result == 0, 0, source * (1 / keep_probability if keep_probability else 0.0))
    return "elements are neither zero nor the input, scaled" if _differs(result, expected) else None


def rrelu(draws: Draws) -> str | None:
    source, (result, noise) = draws.arguments["self"].detach().cpu(), draws.results[:2]
    low, high = draws.number_argument("lower", 0.125), draws.number_argument("upper", 1 / 3)
    negative = (source <= 0).expand(noise.shape)
    if bool((noise[~negative] != 1).any()):
        return "`noise` is not 1 where the input is positive"
    bounds = [float(torch.tensor(bound).to(noise.dtype)) for bound in (low, high)]
    if reason := _between(noise[negative], bounds[0], bounds[1]):
        return f"`noise`: {reason}"
    return "the result is not the input times `noise`" if _differs(result, source * noise) else None


def binomial(draws: Draws) -> str | None:
    count, drawn = draws.arguments["count"].detach().cpu(), draws.results[0]
    if bool((drawn > count).any()):
        return "samples exceed the number of trials"
    return _why_not_integers(drawn, 0, float("inf"))


def dirichlet(draws: Draws) -> str | None:
    sums = draws.results[0].double().sum(-1)
    allowed = _MAX_ROUNDING_STEPS * torch.finfo(draws.results[0].dtype).eps * draws.results[0].shape[-1]
    return "a sample does not sum to 1" if bool(((sums - 1).abs() > allowed).any()) else positive(draws)


def _differs(result: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether a product is off by more than a few rounding steps."""
    if not (result.is_floating_point() or result.is_complex()):
        return not torch.equal(result, expected.to(result.dtype).expand(result.shape))
    left = to_float64(result)
    right = expected.to(left.dtype)
    info = torch.finfo(result.dtype)
    close = (left - right).abs() <= _MAX_ROUNDING_STEPS * info.eps * right.abs() + info.tiny
    return not bool((close | (left == right) | (left.isnan() & right.isnan())).all())
