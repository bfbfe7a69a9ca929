"""row_moments: an operator with several results."""

from typing import Any

import torch
from torch import Tensor

from .. import checks
{% if cookiecutter.variant == "triton" %}
from ..kernels.launch import blocks, on_device, operator, wrap_triton
from ..kernels.row_moments import row_moments_kernel, tile
{% endif %}
from ..namespace import ops


def row_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and variance (of the population) along the last dimension, without which the results have x's shape."""
    checks.rows("row_moments", "x", x)
    return ops.row_moments(x)


def _empty(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape[:-1]), x.new_empty(x.shape[:-1])


{% if cookiecutter.variant == "triton" %}
@operator("{{ cookiecutter.package }}::row_moments")
def _row_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    checks.rows("row_moments", "x", x)
    mean, variance = _empty(x)
    if mean.numel() > 0:
        rows, block = tile(x.shape[-1])
        with on_device(x):
            wrap_triton(row_moments_kernel)[blocks(mean.numel(), rows)](
                x.contiguous(), mean, variance, mean.numel(), x.shape[-1], ROWS=rows, BLOCK=block
            )
    return mean, variance


{% endif %}
@torch.library.register_fake("{{ cookiecutter.package }}::row_moments")
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    checks.rows("row_moments", "x", x)
    return _empty(x)


def _save(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs)


def _gradient(ctx: Any, to_mean: Tensor, to_variance: Tensor) -> Tensor:
    (x,) = ctx.saved_tensors
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    apart = wide - wide.mean(-1, keepdim=True)
    grad = (to_mean.unsqueeze(-1) + 2 * apart * to_variance.unsqueeze(-1)) / x.shape[-1]
    return grad.to(x.dtype)


torch.library.register_autograd("{{ cookiecutter.package }}::row_moments", _gradient, setup_context=_save)


@torch.library.register_vmap("{{ cookiecutter.package }}::row_moments")
def _(info: Any, in_dims: tuple[int], x: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    batched = x.movedim(in_dims[0], 0)
    if batched.dim() == 1:
        raise ValueError("row_moments: x has no dimensions under vmap; it needs at least one")
    return ops.row_moments(batched), (0, 0)
