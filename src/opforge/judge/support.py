"""Rules for every single draw of a random operator: ranges, and relations between its results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from opforge.ops import Operator

_STEPS = 8.0
"""Rounding steps by which a product may be off."""


@dataclass(frozen=True, slots=True)
class Look:
    """Draws of a case: arguments, and results with the draws stacked along the first dimension."""

    given: dict[str, Any]
    """Arguments by their names in the schema."""
    drawn: list[torch.Tensor]
    """Results in order, then other inputs that the operator writes."""

    def number(self, name: str, default: float) -> float:
        value = self.given.get(name, default)
        return float(value) if isinstance(value, int | float) else default


Support = Callable[[Look], str | None]


def broken(op: Operator, look: Look) -> str | None:
    """Return which rule of the operator a draw breaks, or None."""
    check = _RULES.get(op.packet)
    return check(look) if check is not None and look.drawn and look.drawn[0].numel() else None


def _why_not_integers(values: torch.Tensor, low: float, high: float) -> str | None:
    """Return why values are not whole numbers from ``low`` to ``high``, or None."""
    wide = values.double() if values.is_floating_point() else values
    if values.is_floating_point() and bool((wide != wide.round()).any()):
        return f"draws hold {float(wide[wide != wide.round()][0]):.6g}, expected whole numbers"
    return _between(wide, low, high)


def _between(values: torch.Tensor, low: float, high: float) -> str | None:
    outside = (values < low) | (values > high)
    if bool(outside.any()):
        return f"draws hold {values[outside][0].item():.6g}, outside of {low:.6g} to {high:.6g}"
    return None


def _bernoulli(look: Look) -> str | None:
    return _why_not_integers(look.drawn[0], 0, 1)


def _randint(look: Look) -> str | None:
    arguments = look.given
    high = arguments.get("high", arguments.get("to"))
    if isinstance(high, torch.Tensor) or high is None:
        return None
    low = int(arguments.get("low", arguments.get("from", 0)))
    # A float result may not hold the largest whole number exactly, and rounds it up.
    top = high - 1 if not look.drawn[0].is_floating_point() else float(torch.tensor(high - 1).to(look.drawn[0].dtype))
    return _why_not_integers(look.drawn[0], low, top)


def _uniform(look: Look) -> str | None:
    real = torch.view_as_real(look.drawn[0]) if look.drawn[0].is_complex() else look.drawn[0]
    low, high = (torch.tensor(look.number(n, d)).to(real.dtype) for n, d in (("from", 0.0), ("to", 1.0)))
    return _between(real, float(low), float(high))


def _positive(look: Look) -> str | None:
    return _between(look.drawn[0], 0.0, float("inf"))


def _counts(look: Look) -> str | None:
    return _why_not_integers(look.drawn[0], 0, float("inf"))


def _geometric(look: Look) -> str | None:
    return _why_not_integers(look.drawn[0], 1, float("inf"))


def _randperm(look: Look) -> str | None:
    drawn = look.drawn[0]
    if torch.equal(drawn.sort(dim=-1).values, torch.arange(drawn.shape[-1]).to(drawn.dtype).expand(drawn.shape)):
        return None
    return f"a draw is no permutation of 0 to {drawn.shape[-1] - 1}"


def _multinomial(look: Look) -> str | None:
    weights, drawn = look.given["self"].detach().cpu(), look.drawn[0].long()
    if reason := _between(drawn, 0, weights.shape[-1] - 1):
        return reason
    if not look.given.get("replacement", False) and bool((drawn.sort(dim=-1).values.diff(dim=-1) == 0).any()):
        return "a draw without replacement holds one category twice"
    rows = weights.expand(*drawn.shape[:-1], weights.shape[-1])
    return "a draw holds a category of weight zero" if bool((rows.gather(-1, drawn) == 0).any()) else None


def _native_dropout(look: Look) -> str | None:
    source = look.given["input" if "input" in look.given else "self"].detach().cpu()
    result, mask = look.drawn[0], look.drawn[1].bool()
    # _fused_dropout's p is the probability to keep
    keep_probability = 1 - look.number("p", 0.5) if "input" in look.given else look.number("p", 0.5)
    if bool((result[~mask.expand(result.shape)] != 0).any()):
        return "result[0] is not zero where the mask in result[1] drops"
    expected = torch.where(mask, source * (1 / keep_probability if keep_probability else 0.0), 0)
    return "result[0] is not the input times the mask in result[1], scaled" if _differs(result, expected) else None


def _dropout(look: Look) -> str | None:
    source, result = look.given["input"].detach().cpu(), look.drawn[0]
    keep_probability = 1 - look.number("p", 0.5)
    expected = torch.where(result == 0, 0, source * (1 / keep_probability if keep_probability else 0.0))
    return "elements are neither zero nor the input, scaled" if _differs(result, expected) else None


def _rrelu(look: Look) -> str | None:
    source, (result, noise) = look.given["self"].detach().cpu(), look.drawn[:2]
    low, high = look.number("lower", 0.125), look.number("upper", 1 / 3)
    negative = (source <= 0).expand(noise.shape)
    if bool((noise[~negative] != 1).any()):
        return "`noise` is not 1 where the input is positive"
    bounds = [float(torch.tensor(bound).to(noise.dtype)) for bound in (low, high)]
    if reason := _between(noise[negative], bounds[0], bounds[1]):
        return f"`noise`: {reason}"
    return "the result is not the input times `noise`" if _differs(result, source * noise) else None


def _binomial(look: Look) -> str | None:
    count, drawn = look.given["count"].detach().cpu(), look.drawn[0]
    if bool((drawn > count).any()):
        return "draws exceed the number of trials"
    return _why_not_integers(drawn, 0, float("inf"))


def _dirichlet(look: Look) -> str | None:
    sums = look.drawn[0].double().sum(-1)
    allowed = _STEPS * torch.finfo(look.drawn[0].dtype).eps * look.drawn[0].shape[-1]
    return "a draw does not sum to 1" if bool(((sums - 1).abs() > allowed).any()) else _positive(look)


def _differs(result: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether a product is off by more than a few rounding steps."""
    if not (result.is_floating_point() or result.is_complex()):
        return not torch.equal(result, expected.to(result.dtype).expand(result.shape))
    wide = torch.complex128 if result.is_complex() else torch.float64
    left, right = result.to(wide), expected.to(wide)
    info = torch.finfo(result.dtype)
    close = (left - right).abs() <= _STEPS * info.eps * right.abs() + info.tiny
    return not bool((close | (left == right) | (left.isnan() & right.isnan())).all())


_RULES: dict[str, Support] = {
    "bernoulli": _bernoulli, "randint": _randint, "randint_like": _randint, "random": _randint, "rand": _uniform,
    "rand_like": _uniform, "uniform": _uniform, "exponential": _positive, "log_normal": _positive,
    "_standard_gamma": _positive, "geometric": _geometric, "poisson": _counts, "randperm": _randperm,
    "multinomial": _multinomial, "native_dropout": _native_dropout, "_fused_dropout": _native_dropout,
    "dropout": _dropout, "rrelu_with_noise": _rrelu, "rrelu_with_noise_functional": _rrelu, "binomial": _binomial,
    "_sample_dirichlet": _dirichlet,
}  # fmt: skip
