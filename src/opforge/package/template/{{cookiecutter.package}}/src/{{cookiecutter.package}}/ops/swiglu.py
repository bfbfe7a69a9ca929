"""swiglu: an elementwise operator with an operator of its own for the gradient."""

from typing import Any

import torch
from torch import Tensor

from .. import checks
from ..batching import to_front
{% if cookiecutter.variant == "triton" %}
from ..kernels.launch import blocks, on_device, operator, wrap_triton
from ..kernels.swiglu import BLOCK, swiglu_backward_kernel, swiglu_kernel
{% endif %}
from ..namespace import ops


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return ``silu(gate) * up``, computed in float32 (float64 for float64) and rounded once."""
    _check(gate, up)
    return ops.swiglu(gate, up)


def _check(gate: Tensor, up: Tensor) -> None:
    checks.floating("swiglu", "gate", gate)
    checks.same("swiglu", "up", up, "gate", gate)


def _check_backward(grad: Tensor, gate: Tensor, up: Tensor) -> None:
    checks.floating("swiglu_backward", "gate", gate)
    checks.same("swiglu_backward", "up", up, "gate", gate)
    checks.same("swiglu_backward", "grad", grad, "gate", gate)


def _empty(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


{% if cookiecutter.variant == "triton" %}
@operator("{{ cookiecutter.package }}::swiglu")
def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    _check(gate, up)
    out = _empty(gate)
    if out.numel() > 0:
        with on_device(gate):
            wrap_triton(swiglu_kernel)[blocks(out.numel(), BLOCK)](
                gate.contiguous(), up.contiguous(), out, out.numel(), BLOCK=BLOCK
            )
    return out


@operator("{{ cookiecutter.package }}::swiglu_backward")
def _swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    _check_backward(grad, gate, up)
    grad_gate, grad_up = _empty(gate), _empty(up)
    if gate.numel() > 0:
        with on_device(gate):
            wrap_triton(swiglu_backward_kernel)[blocks(gate.numel(), BLOCK)](
                grad.contiguous(), gate.contiguous(), up.contiguous(), grad_gate, grad_up, gate.numel(), BLOCK=BLOCK
            )
    return grad_gate, grad_up


{% endif %}
@torch.library.register_fake("{{ cookiecutter.package }}::swiglu")
def _(gate: Tensor, up: Tensor) -> Tensor:
    _check(gate, up)
    return _empty(gate)


@torch.library.register_fake("{{ cookiecutter.package }}::swiglu_backward")
def _(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    _check_backward(grad, gate, up)
    return _empty(gate), _empty(up)


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _gradient(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = ctx.saved_tensors
    return ops.swiglu_backward(grad, gate, up)


def _second_gradient(ctx: Any, to_gate: Tensor, to_up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of swiglu_backward. It is rarely asked for, so PyTorch's own operators are fast enough."""
    grad, gate, up = ctx.saved_tensors
    s = torch.sigmoid(gate)
    first = s * (1 + gate * (1 - s))
    second = s * (1 - s) * (2 + gate * (1 - 2 * s))
    to_grad = to_gate * up * first + to_up * gate * s
    return to_grad, (to_gate * up * second + to_up * first) * grad, to_gate * grad * first


torch.library.register_autograd("{{ cookiecutter.package }}::swiglu", _gradient, setup_context=_save)
torch.library.register_autograd("{{ cookiecutter.package }}::swiglu_backward", _second_gradient, setup_context=_save)


@torch.library.register_vmap("{{ cookiecutter.package }}::swiglu")
def _(info: Any, in_dims: tuple[int | None, ...], gate: Tensor, up: Tensor) -> tuple[Tensor, int]:
    return torch.ops.{{ cookiecutter.package }}.swiglu(*to_front(info, in_dims, gate, up)), 0


@torch.library.register_vmap("{{ cookiecutter.package }}::swiglu_backward")
def _(info: Any, in_dims: tuple[int | None, ...], grad: Tensor, gate: Tensor, up: Tensor) -> Any:
    return torch.ops.{{ cookiecutter.package }}.swiglu_backward(*to_front(info, in_dims, grad, gate, up)), (0, 0)
