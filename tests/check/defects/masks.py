"""Triton operators with one fault each, in masks, grids and block sizes."""

import torch
import triton
import triton.language as tl

NAMESPACE = "masks"


@triton.jit
def _shift_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr, MASKED_STORE: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask)
    if MASKED_STORE:
        tl.store(y_ptr + offsets, x + 1, mask=mask)
    else:
        tl.store(y_ptr + offsets, x + 1)


@triton.jit
def _row_sum_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr, MASKED: tl.constexpr, OTHER: tl.constexpr):
    row = tl.program_id(0)
    offsets = tl.arange(0, BLOCK)
    if MASKED:  # for the compiler
        x = tl.load(x_ptr + row * n + offsets, mask=offsets < n, other=OTHER)
    else:
        x = tl.load(x_ptr + row * n + offsets)
    tl.store(y_ptr + row, tl.sum(x, axis=0))


def operator(name, function, fake, backward):
    made = torch.library.custom_op(f"{NAMESPACE}::{name}", function, mutates_args=(), schema="(Tensor x) -> Tensor")
    made.register_fake(fake)
    made.register_autograd(backward, setup_context=lambda ctx, inputs, output: setattr(ctx, "shape", inputs[0].shape))


def shift(grid, block, *, masked=True):
    def function(x):
        if x.dtype != torch.float32:
            raise TypeError("float32 only")
        x = x.contiguous()
        y = torch.empty_like(x)
        programs = grid(x.numel(), block)
        if programs:
            _shift_kernel[(programs,)](x, y, x.numel(), BLOCK=block, MASKED_STORE=masked)
        return y

    return function


def row_sum(*, masked, other):
    def function(x):
        if x.dtype != torch.float32 or x.dim() != 2 or x.shape[1] == 0:
            raise TypeError("a matrix of float32 with columns only")
        x = x.contiguous()
        y = x.new_empty(x.shape[0])
        if len(y):
            _row_sum_kernel[(len(y),)](
                x, y, x.shape[1], BLOCK=triton.next_power_of_2(x.shape[1]), MASKED=masked, OTHER=other
            )
        return y

    return function


def like(x):
    return x.new_empty(x.shape)


def of_rows(x):
    return x.new_empty(x.shape[0])


def spread(ctx, grad):
    return grad[:, None].expand(ctx.shape)


operator("store_too_short", shift(lambda n, block: n // block, 32), like, lambda ctx, grad: grad.clone())
operator("store_without_mask", shift(triton.cdiv, 32, masked=False), like, lambda ctx, grad: grad.clone())
operator("load_without_mask", row_sum(masked=False, other=0.0), of_rows, spread)
operator("load_with_other", row_sum(masked=True, other=1.0), of_rows, spread)
operator("small_blocks", shift(triton.cdiv, 16), like, lambda ctx, grad: grad.clone())
