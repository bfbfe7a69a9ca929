"""What the operators ask of their arguments. Each error says what is wrong, which value it is and what is allowed."""

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def floating(op: str, name: str, tensor: Tensor) -> None:
    """Refuse what is not a dense tensor of floating point numbers."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{op}: {name} must be a Tensor, not {type(tensor).__name__}")
    if tensor.dtype not in FLOATS:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOATS)
        raise TypeError(f"{op}: {name} has dtype {tensor.dtype}; allowed: {allowed}")
    if tensor.layout != torch.strided:
        raise TypeError(f"{op}: {name} has layout {tensor.layout}; only dense tensors are allowed")


def same_kind(op: str, name: str, tensor: Tensor, other: str, model: Tensor) -> None:
    """Refuse a tensor of another dtype or device than the model has."""
    floating(op, name, tensor)
    if tensor.dtype != model.dtype:
        raise TypeError(f"{op}: {name} has dtype {tensor.dtype}, and {other} has {model.dtype}; they must be the same")
    if tensor.device != model.device:
        raise ValueError(f"{op}: {name} is on {tensor.device}, and {other} on {model.device}; they must be together")


def same(op: str, name: str, tensor: Tensor, other: str, model: Tensor) -> None:
    """Refuse a tensor of another shape, dtype or device than the model has."""
    same_kind(op, name, tensor, other, model)
    if tensor.shape != model.shape:
        shapes = f"{tuple(tensor.shape)}, and {other} has {tuple(model.shape)}"
        raise ValueError(f"{op}: {name} has shape {shapes}; they must be the same")


def rows(op: str, name: str, tensor: Tensor) -> None:
    """Refuse a tensor that has no last dimension to work along."""
    floating(op, name, tensor)
    if tensor.dim() == 0:
        raise ValueError(f"{op}: {name} has no dimensions; it needs at least one, of which the last is worked along")


def writable(op: str, name: str, tensor: Tensor) -> None:
    """Refuse a tensor whose elements share memory, so that they cannot be written one by one."""
    if any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        strides = tuple(tensor.stride())
        raise ValueError(f"{op}: elements of {name} share memory (strides {strides}); pass {name}.clone()")


def not_differentiable(op: str, name: str, tensor: Tensor | None) -> None:
    """Refuse a tensor that requires a gradient while gradients are recorded: an operator that writes has no formula for it."""
    if tensor is not None and tensor.requires_grad and torch.is_grad_enabled():
        mend = f"call it under torch.no_grad(), or pass {name}.detach()"
        raise RuntimeError(f"{op} is not differentiable, and {name} requires a gradient; {mend}")
