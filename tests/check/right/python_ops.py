"""Right operators of several kinds, in Python."""

import torch
from torch import Tensor


@torch.library.custom_op("right::scale", mutates_args=())
def scale_op(x: Tensor, factor: float = 2.0) -> Tensor:
    return x.contiguous() * factor


@scale_op.register_fake
def _(x, factor=2.0):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _setup(ctx, inputs, output):
    ctx.factor = inputs[1]


def _backward(ctx, grad):
    return grad * ctx.factor, None


scale_op.register_autograd(_backward, setup_context=_setup)


@scale_op.register_vmap
def _(info, in_dims, x, factor=2.0):
    return scale_op(x.movedim(in_dims[0], 0), factor), 0


def scale(x: Tensor, factor: float = 2.0) -> Tensor:
    """The public function."""
    if not x.is_floating_point():
        raise TypeError(f"x is {x.dtype}; allowed are floating-point tensors")
    return torch.ops.right.scale(x, factor)


@torch.library.custom_op("right::add_scaled_", mutates_args=("x",))
def add_scaled_(x: Tensor, y: Tensor, alpha: float = 1.0) -> None:
    if x.shape != y.shape or x.dtype != y.dtype:
        raise ValueError(f"x is {x.dtype}{list(x.shape)}, y {y.dtype}{list(y.shape)}; they must be alike")
    x.copy_(x + alpha * y)


@torch.library.custom_op("right::biased", mutates_args=())
def biased(x: Tensor, bias: Tensor | None = None) -> Tensor:
    if bias is not None and (bias.dim() != 1 or x.dim() < 1 or bias.shape[0] != x.shape[-1]):
        raise ValueError("bias must have the size of the last dimension")
    return x.contiguous() + (0 if bias is None else bias)


@biased.register_fake
def _(x, bias=None):
    return x.new_empty(x.shape)


biased.register_autograd(
    lambda ctx, grad: (grad, grad.reshape(-1, grad.shape[-1]).sum(0) if ctx.biased else None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "biased", inputs[1] is not None),
)


@torch.library.custom_op("right::moments", mutates_args=())
def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    if x.dim() < 1:
        raise ValueError("x must have a dimension")
    return x.mean(-1), (x * x).mean(-1)


@moments.register_fake
def _(x):
    return x.new_empty(x.shape[:-1]), x.new_empty(x.shape[:-1])


def _moments_backward(ctx, grad_mean, grad_square):
    (x,) = ctx.saved_tensors
    return (grad_mean[..., None] + 2 * x * grad_square[..., None]) / x.shape[-1]


moments.register_autograd(_moments_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]))


@torch.library.custom_op("right::noise", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def noise(x: Tensor) -> Tensor:
    return x.contiguous() + torch.randn(x.shape, dtype=x.dtype, device=x.device)


@noise.register_fake
def _(x):
    return x.new_empty(x.shape)


noise.register_autograd(lambda ctx, grad: grad.clone())


@torch.library.custom_op("right::count", mutates_args=())
def count(x: Tensor) -> Tensor:
    if x.is_floating_point() or x.dtype == torch.bool:
        raise TypeError("integers only")
    return (x != 0).sum()


@count.register_fake
def _(x):
    return torch.empty((), dtype=torch.int64, device=x.device)
