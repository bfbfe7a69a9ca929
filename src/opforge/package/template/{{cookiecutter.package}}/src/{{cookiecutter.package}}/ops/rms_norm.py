"""rms_norm: an operator with an optional argument, autotuned."""

from typing import Any

import torch
from torch import Tensor

from .. import checks
{% if cookiecutter.variant == "triton" %}
from ..kernels.launch import blocks, on_device, operator, wrap_triton
from ..kernels.rms_norm import rms_norm_kernel
{% endif %}
from ..namespace import ops


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """Return ``x / sqrt(mean(x * x) + eps) * weight`` along the last dimension; without weight, it is not multiplied."""
    _check(x, weight)
    return ops.rms_norm(x, weight, eps)


def _check(x: Tensor, weight: Tensor | None) -> None:
    checks.rows("rms_norm", "x", x)
    if weight is None:
        return
    checks.same_kind("rms_norm", "weight", weight, "x", x)
    if weight.shape != x.shape[-1:]:
        size = f"it must be ({x.shape[-1]},), as the last dimension of x"
        raise ValueError(f"rms_norm: weight has shape {tuple(weight.shape)}; {size}")


def _empty(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


{% if cookiecutter.variant == "triton" %}
@operator("{{ cookiecutter.package }}::rms_norm")
def _rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    _check(x, weight)
    out = _empty(x)
    if out.numel() > 0:
        dense = x.contiguous()
        scale = dense if weight is None else weight.contiguous()  # any pointer will do where none is read
        rows, size = x.numel() // x.shape[-1], x.shape[-1]
        with on_device(x):
            wrap_triton(rms_norm_kernel)[lambda config: blocks(rows, config["ROWS"])](
                dense, scale, out, rows, size, eps, WEIGHTED=weight is not None
            )
    return out


{% endif %}
@torch.library.register_fake("{{ cookiecutter.package }}::rms_norm")
def _(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    _check(x, weight)
    return _empty(x)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor | None, float], output: Tensor) -> None:
    x, weight, ctx.eps = inputs
    ctx.save_for_backward(x, weight)


def _gradient(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
    x, weight = ctx.saved_tensors
    wide = torch.promote_types(x.dtype, torch.float32)
    scale = torch.rsqrt(x.to(wide).square().mean(-1, keepdim=True) + ctx.eps)
    normed, grad = x.to(wide) * scale, grad.to(wide)
    to_normed = grad if weight is None else grad * weight.to(wide)
    to_x = (to_normed - normed * (to_normed * normed).mean(-1, keepdim=True)) * scale
    to_weight = None if weight is None else (grad * normed).sum_to_size(weight.shape).to(x.dtype)
    return to_x.to(x.dtype), to_weight, None


torch.library.register_autograd("{{ cookiecutter.package }}::rms_norm", _gradient, setup_context=_save)


@torch.library.register_vmap("{{ cookiecutter.package }}::rms_norm")
def _(
    info: Any, in_dims: tuple[int | None, ...], x: Tensor, weight: Tensor | None = None, eps: float = 1e-6
) -> tuple[Tensor, int]:
    x = x.expand(info.batch_size, *x.shape) if in_dims[0] is None else x.movedim(in_dims[0], 0)
    if weight is None or in_dims[1] is None:
        return ops.rms_norm(x, weight, eps), 0
    # each has a weight of its own: multiply afterwards, in a wider dtype so as to round once
    wide = torch.promote_types(x.dtype, torch.float32)
    weights = weight.movedim(in_dims[1], 0).to(wide).unflatten(0, (info.batch_size, *[1] * (x.dim() - 2)))
    return (ops.rms_norm(x.to(wide), None, eps) * weights).to(x.dtype), 0
