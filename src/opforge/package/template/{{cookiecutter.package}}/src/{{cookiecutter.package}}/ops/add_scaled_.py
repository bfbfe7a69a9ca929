"""add_scaled_: an operator that writes into its argument."""

from typing import Any

import torch
from torch import Tensor

from .. import checks
from ..batching import to_front
{% if cookiecutter.variant == "triton" %}
from ..kernels.add_scaled_ import BLOCK, add_scaled_kernel
from ..kernels.launch import apart, blocks, on_device, operator, wrap_triton
{% endif %}
from ..namespace import ops


def add_scaled_(x: Tensor, y: Tensor, alpha: float = 1.0) -> Tensor:
    """Add ``alpha * y`` to x in place and return x. It has no gradient."""
    _check(x, y)
    checks.not_differentiable("add_scaled_", "x", x)
    checks.not_differentiable("add_scaled_", "y", y)
    ops.add_scaled_(x, y, alpha)
    return x


def _check(x: Tensor, y: Tensor) -> None:
    checks.floating("add_scaled_", "x", x)
    checks.same("add_scaled_", "y", y, "x", x)
    checks.writable("add_scaled_", "x", x)


{% if cookiecutter.variant == "triton" %}
@operator("{{ cookiecutter.package }}::add_scaled_", mutates=("x",))
def _add_scaled_(x: Tensor, y: Tensor, alpha: float = 1.0) -> None:
    _check(x, y)
    if x.numel() == 0:
        return
    dense = x.contiguous()
    with on_device(x):
        wrap_triton(add_scaled_kernel)[blocks(x.numel(), BLOCK)](dense, apart(x, y), alpha, x.numel(), BLOCK=BLOCK)
    if dense is not x:
        x.copy_(dense)


{% endif %}
@torch.library.register_fake("{{ cookiecutter.package }}::add_scaled_")
def _(x: Tensor, y: Tensor, alpha: float = 1.0) -> None:
    _check(x, y)


@torch.library.register_vmap("{{ cookiecutter.package }}::add_scaled_")
def _(info: Any, in_dims: tuple[int | None, ...], x: Tensor, y: Tensor, alpha: float = 1.0) -> tuple[None, None]:
    if in_dims[0] is None:
        raise ValueError("add_scaled_: vmap maps over y alone, and many results cannot be written into one x")
    torch.ops.{{ cookiecutter.package }}.add_scaled_(*to_front(info, in_dims, x, y), alpha)
    return None, None
