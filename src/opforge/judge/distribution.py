"""Random operators are judged by their distribution: a two-sample Kolmogorov-Smirnov test with a stated false-alarm rate."""

from __future__ import annotations

import math

import torch

from opforge.judge.numerics import same_bytes

FALSE_ALARM = 1e-6
"""How often an honest kernel is turned down, per tensor."""
DRAWS = 64
ENOUGH = 20_000
"""Elements after which no more draws are asked for."""


def identical(kernel: torch.Tensor, aten: torch.Tensor) -> bool:
    """Whether a draw is ATen's own, to the bit."""
    return kernel.shape == aten.shape and same_bytes(kernel, aten.detach().cpu().resolve_conj().resolve_neg())


def stuck(kernel: list[torch.Tensor], aten: list[torch.Tensor]) -> bool:
    """Whether a kernel gives one and the same draw for every seed where ATen does not."""
    moves = any(not torch.equal(aten[0], draw) for draw in aten[1:])
    return moves and all(torch.equal(kernel[0], draw) for draw in kernel[1:])


def differs(kernel: torch.Tensor, aten: torch.Tensor) -> str | None:
    """Say how two samples differ, or None when they may come from one distribution."""
    if kernel.isnan().any() and not aten.isnan().any():
        return "NaN among the draws, where ATen has none"
    left, right = _sample(kernel), _sample(aten)
    if not len(left) or not len(right):
        return None if len(left) == len(right) else "one of them is empty"
    grid = torch.cat([left, right]).sort().values
    below = [torch.searchsorted(s, grid, right=True).double() / len(s) for s in (left, right)]
    distance = float((below[0] - below[1]).abs().max())
    limit = math.sqrt(-math.log(FALSE_ALARM / 2) / 2 * (len(left) + len(right)) / (len(left) * len(right)))
    if distance <= limit:
        return None
    return f"Kolmogorov-Smirnov distance {distance:.3f} from ATen's draws, allowed {limit:.3f} (n = {len(left)} and {len(right)})"


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    wide = torch.view_as_real(tensor.to(torch.complex128)) if tensor.is_complex() else tensor.double()
    return torch.nan_to_num(wide.reshape(-1)).sort().values
