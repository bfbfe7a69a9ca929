"""Five operators that double, each with one of the usual faults: `opforge check examples/broken_ops.py` names them."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def double_kernel(x_ptr, y_ptr, count, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = places < count
    x = tl.load(x_ptr + places, mask=inside)
    if MASKED:
        tl.store(y_ptr + places, 2 * x, mask=inside)
    else:
        tl.store(y_ptr + places, 2 * x)


def doubled(x: Tensor, *, masked: bool = True, block: int = 256) -> Tensor:
    if x.dtype != torch.float32:
        raise TypeError(f"x has dtype {x.dtype}; allowed: float32")
    y = torch.empty(x.shape, device=x.device)
    if x.numel() > 0:
        double_kernel[(triton.cdiv(x.numel(), block),)](x, y, x.numel(), MASKED=masked, BLOCK=block)
    return y


@torch.library.custom_op("broken::mask", mutates_args=())
def mask(x: Tensor) -> Tensor:
    return doubled(x.contiguous(), masked=False)


@torch.library.custom_op("broken::layout", mutates_args=())
def layout(x: Tensor) -> Tensor:
    return doubled(x)


@torch.library.custom_op("broken::fake", mutates_args=())
def fake(x: Tensor) -> Tensor:
    return doubled(x.contiguous())


@torch.library.custom_op("broken::graph_break", mutates_args=())
def _graph_break(x: Tensor) -> Tensor:
    return doubled(x.contiguous())


@torch.library.custom_op("broken::block", mutates_args=())
def block(x: Tensor) -> Tensor:
    return doubled(x.contiguous(), block=8)


for operator in (mask, layout, _graph_break, block):
    operator.register_fake(lambda x: x.new_empty(x.shape))
fake.register_fake(torch.empty_like)  # keeps the strides of x, which the kernel does not
for operator in (mask, layout, fake, _graph_break, block):
    operator.register_autograd(lambda ctx, grad: 2 * grad)


def graph_break(x: Tensor) -> Tensor:
    """Return 2 * x. Users call this function, and not the operator."""
    print("doubling", tuple(x.shape))
    return torch.ops.broken.graph_break(x)
