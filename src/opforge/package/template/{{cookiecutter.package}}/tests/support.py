"""Helpers of the tests: devices, tolerances, layouts, and the fake compared with the real results."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

import {{ cookiecutter.package }}  # noqa: F401  # registers the operators
{% if cookiecutter.variant == "triton" %}
from {{ cookiecutter.package }}.kernels.launch import INTERPRETED

DEVICES = ["cpu"] if INTERPRETED else ["cuda"]
# all steps of torch.compile but the last: Inductor would call interpreted kernels as they are
BACKEND = "aot_eager" if INTERPRETED else "inductor"
{% else %}

_ON_GPU = torch._C._dispatch_has_kernel_for_dispatch_key("{{ cookiecutter.package }}::swiglu", "CUDA")
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() and _ON_GPU else ["cpu"]
BACKEND = "inductor"
{% endif %}

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
STEPS = {torch.float32: 16, torch.float64: 64, torch.float16: 1, torch.bfloat16: 1}
"""How many steps of a dtype a result may be off: half of one for the rounding, the rest for float32 on the way."""
{% if cookiecutter.variant == "triton" %}
if INTERPRETED:
    STEPS[torch.bfloat16] = 2  # the interpreter cuts off where a GPU rounds, which costs a whole step
{% endif %}
SHAPES = [(7,), (1,), (3, 5), (2, 3, 33), (1025,), (0,), (0, 4), (2, 0, 3)]
"""Sizes beside those that fill a block, several dimensions, and nothing at all."""
ROWS = [(7,), (5, 1), (2, 3, 33), (17, 64), (5, 65), (2, 257), (1, 1025), (0, 4), (2, 0), (0, 0)]
"""The same for operators along the last dimension."""


def close(actual: Any, expected: Any) -> None:
    """Hold results against those of PyTorch in float64."""
    if isinstance(expected, tuple):
        for one, other in zip(actual, expected, strict=True):
            close(one, other)
        return
    allowed = STEPS[actual.dtype] * torch.finfo(actual.dtype).eps
    torch.testing.assert_close(actual.double(), expected.double(), rtol=allowed, atol=allowed, equal_nan=True)


def exact(*tensors: Tensor) -> list[Tensor]:
    """Return the tensors in float64, in which the expected results are computed."""
    return [tensor.detach().double() for tensor in tensors]


def layouts(tensor: Tensor) -> Iterator[Tensor]:
    """Return copies in several layouts: as it is, dimensions stored in the opposite order, with gaps, with an offset."""
    yield tensor.clone()
    order = tuple(reversed(range(tensor.dim())))
    yield tensor.permute(order).contiguous().permute(order)
    wide = tensor.new_zeros(*tensor.shape[:-1], 2 * tensor.shape[-1] + 1)
    wide[..., 1::2] = tensor
    yield wide[..., 1::2]
    longer = tensor.new_zeros(tensor.numel() + 3)
    longer[3:] = tensor.flatten()
    yield longer[3:].view(tensor.shape)


def facts(result: Any) -> Any:
    """Return what a fake must know of a result: shape, strides, dtype and device."""
    return tree_map_only(Tensor, lambda t: (tuple(t.shape), t.stride(), t.dtype, t.device), result)


def check_fake(op: Callable[..., Any], *args: Any) -> None:
    """Hold the fake of an operator against what it really does."""
    with FakeTensorMode() as mode:
        pretended = op(*tree_map_only(Tensor, mode.from_tensor, args))
    assert facts(pretended) == facts(op(*args))


def check_compiled(function: Callable[..., Any], *arguments: tuple[Any, ...]) -> None:
    """Compile a function whole, with dynamic shapes, and hold its results and gradients against those without torch.compile."""
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=BACKEND)
    for args in arguments:
        expected, gradients = _with_gradients(function, args)
        actual, others = _with_gradients(compiled, args)
        torch.testing.assert_close(actual, expected)
        torch.testing.assert_close(others, gradients)


def _with_gradients(function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, list[Tensor]]:
    args = tree_map_only(Tensor, lambda t: t.detach().clone().requires_grad_(t.requires_grad), args)
    result = function(*args)
    results = [r for r in (result if isinstance(result, tuple) else (result,)) if r.requires_grad]
    wanted = [a for a in args if isinstance(a, Tensor) and a.requires_grad]
    if not results or not wanted:
        return result, []
    total = sum((r * torch.linspace(0.5, 1.5, r.numel(), device=r.device).view(r.shape)).sum() for r in results)
    return result, list(torch.autograd.grad(total, wanted))
