"""Operators with one fault each, in what they register or return."""

import random

import torch
from torch import Tensor

NAMESPACE = "defect"


def operator(name, function, fake, *, mutates=(), backward=lambda ctx, grad: 2 * grad, schema="(Tensor x) -> Tensor"):
    """Register an operator; it doubles, unless something is wrong with it."""
    made = torch.library.custom_op(f"{NAMESPACE}::{name}", function, mutates_args=mutates, schema=schema)
    if fake is not None:
        made.register_fake(fake)
    if backward is not None:
        made.register_autograd(backward)
    return made


def double(x):
    return 2 * x.contiguous()


def like(x):
    return x.new_empty(x.shape)


def need_matrix(x):
    if x.dim() != 2:
        raise ValueError("x must be a matrix")


def transposed(x):
    need_matrix(x)
    return 2 * x.contiguous()


operator("fake_shape", transposed, lambda x: x.new_empty(x.shape[::-1]))
operator("fake_dtype", double, lambda x: x.new_empty(x.shape, dtype=torch.float16))
operator("fake_stride", transposed, lambda x: x.new_empty(x.shape[::-1]).t())
operator("fake_keeps_strides", double, torch.empty_like)
operator("fake_missing", double, None)
operator("fake_of_two", double, lambda x: (like(x), like(x)))
operator("fake_fixed_size", double, lambda x: x.new_empty([int(n) for n in x.shape]))


def number_in_fake(x):
    return x.new_empty((x.shape[0], 16)) if x.shape[1] == 16 else x.new_empty((x.shape[0], 99))


operator("fake_with_number", transposed, number_in_fake)


def looks_at_contents(x):
    if x.sum().item() > 0:
        return x.new_empty(x.shape)
    return x.new_empty(x.shape)


operator("fake_of_contents", double, looks_at_contents)


def writes(x):
    y = 2 * x.contiguous()
    x.mul_(0.5)
    return y


operator("undeclared_write", writes, like)
operator("alias_of_python", lambda x: x, like)

_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_library.define("alias_of_library(Tensor x) -> Tensor")


def _below_autograd(function):
    def called(*args):
        with torch._C._AutoDispatchBelowAutograd():
            return function(*args)

    return called


_library.impl("alias_of_library", _below_autograd(lambda x: x.reshape(-1)), "CPU")
torch.library.register_fake(f"{NAMESPACE}::alias_of_library", lambda x: x.new_empty(x.numel()), lib=_library)
torch.library.register_autograd(
    f"{NAMESPACE}::alias_of_library", lambda ctx, grad: grad.reshape(ctx.shape), lib=_library,
    setup_context=lambda ctx, inputs, output: setattr(ctx, "shape", inputs[0].shape),
)  # fmt: skip


def save(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def square(x):
    return (x * x).contiguous()


made = operator("gradient_wrong", square, like, backward=None)
made.register_autograd(lambda ctx, grad: grad * ctx.saved_tensors[0], setup_context=save)  # without the 2
made = operator(
    "gradient_of_second", lambda x, y: (x * y).contiguous(), lambda x, y: x.new_empty(torch.broadcast_shapes(x.shape, y.shape)),
    backward=None, schema="(Tensor x, Tensor y) -> Tensor",
)  # fmt: skip
made.register_autograd(
    lambda ctx, grad: (grad * ctx.saved_tensors[1], -grad * ctx.saved_tensors[0]), setup_context=save
)
operator("gradient_missing", double, like, backward=None)


def backward_of_contiguous(ctx, grad):
    return (
        2 * grad.as_strided(grad.shape, torch.empty(grad.shape).stride())
        if all(grad.stride())
        else torch.zeros(grad.shape, dtype=grad.dtype)
    )


operator("gradient_of_expanded", double, like, backward=backward_of_contiguous)

operator("breaks_graph", double, like)


def breaks_graph(x: Tensor) -> Tensor:
    """The public function, which looks at contents."""
    if x.abs().sum().item() < 0:
        raise ValueError("negative")
    return torch.ops.defect.breaks_graph(x)


def flat_memory(x):
    """Doubles the elements in the order in which they lie in memory."""
    return 2 * x.as_strided(x.shape, torch.empty(x.shape).stride(), x.storage_offset())


operator("not_contiguous", flat_memory, like)
operator("not_deterministic", lambda x: x.contiguous() + random.random(), like, backward=lambda ctx, grad: grad.clone())
operator(
    "untagged_random",
    lambda x: x.contiguous() + torch.rand(x.shape, dtype=x.dtype),
    like,
    backward=lambda ctx, grad: grad.clone(),
)

made = operator("vmap_wrong", double, like)
made.register_vmap(lambda info, in_dims, x: (torch.ops.defect.vmap_wrong(x) + 1, in_dims[0]))


def add(x, y):
    return x.contiguous() + y


def add_batched(info, in_dims, x, y):
    """Move the batches to the front; a second argument without one is forgotten."""
    x = x.movedim(in_dims[0], 0)
    y = torch.zeros_like(x) if in_dims[1] is None else y.movedim(in_dims[1], 0)
    return torch.ops.defect.vmap_of_first(x, y), 0


made = operator(
    "vmap_of_first",
    add,
    lambda x, y: x.new_empty(x.shape),
    backward=lambda ctx, grad: (grad.clone(), grad.clone()),
    schema="(Tensor x, Tensor y) -> Tensor",
)
made.register_vmap(add_batched)
