"""Kernels of swiglu and of its gradient. Each program works on a block of elements."""

import triton
import triton.language as tl

BLOCK = 1024


@triton.jit
def swiglu_kernel(gate_ptr, up_ptr, out_ptr, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    gate = tl.load(gate_ptr + at, mask=inside, other=0.0)
    up = tl.load(up_ptr + at, mask=inside, other=0.0)
    if gate_ptr.dtype.element_ty != tl.float64:
        gate = gate.to(tl.float32)
        up = up.to(tl.float32)
    out = gate / (1 + tl.exp(-gate)) * up
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def swiglu_backward_kernel(  # type: ignore[no-untyped-def]
    grad_ptr, gate_ptr, up_ptr, grad_gate_ptr, grad_up_ptr, count, BLOCK: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    grad = tl.load(grad_ptr + at, mask=inside, other=0.0)
    gate = tl.load(gate_ptr + at, mask=inside, other=0.0)
    up = tl.load(up_ptr + at, mask=inside, other=0.0)
    if gate_ptr.dtype.element_ty != tl.float64:
        grad = grad.to(tl.float32)
        gate = gate.to(tl.float32)
        up = up.to(tl.float32)
    sigmoid = 1 / (1 + tl.exp(-gate))
    grad_gate = grad * up * sigmoid * (1 + gate * (1 - sigmoid))
    grad_up = grad * gate * sigmoid
    tl.store(grad_gate_ptr + at, grad_gate.to(grad_gate_ptr.dtype.element_ty), mask=inside)
    tl.store(grad_up_ptr + at, grad_up.to(grad_up_ptr.dtype.element_ty), mask=inside)
