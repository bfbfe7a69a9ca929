"""Advice for each fault that a check can find."""

from __future__ import annotations

CRASH = (
    "check arguments before touching memory (TORCH_CHECK or STD_TORCH_CHECK on dtype, sizes, device; `if` and raise "
    "in Python), "
    "keep indices in range, and let an empty tensor return at once"
)
INPUTS = "give valid calls with --inputs FILE, or let the operator refuse invalid arguments as its fake does"
HANG = (
    "look for a loop that does not end for some size or layout, for a lock, or for waiting on another process; "
    "if it is merely slow, give more time with --timeout"
)
CRASH_BY_CHECK = {
    "layouts": f"if it is caused by another layout: x = x.contiguous() first; {CRASH}",
    "mask": f"mask loads and stores (offsets < n); {CRASH}",
}
"""More specific advice for a dead process, by check."""

ACCEPT_LAYOUTS = "call x.contiguous() where the kernel needs it, so that callers need not"
NON_CONTIGUOUS = (
    "the kernel assumes contiguous memory: begin with x = x.contiguous() (and y, …), or pass x.stride(…) to the kernel "
    "and compute addresses from it; x.data_ptr() already includes x.storage_offset()"
)

OUT_OF_BOUNDS_READ = (
    "load with a mask: tl.load(x_ptr + offsets, mask=offsets < n, other=…) in Triton, with the neutral value of what "
    "follows as other= "
    "(0 for a sum, -inf for a maximum); in C++ and CUDA, `if (i < n)` around the access"
)
OUT_OF_BOUNDS_WRITE = (
    "store with a mask: tl.store(y_ptr + offsets, value, mask=offsets < n) in Triton; in C++ and "
    "CUDA, `if (i < n)` around the store"
)
UNWRITTEN_ELEMENTS = (
    "let the programs cover all elements: a grid of triton.cdiv(n, BLOCK), not n // BLOCK (CUDA: (n + block - 1) / "
    "block), "
    "a mask of offsets < n with the real n, and a loop over the whole row where the row is longer than a block"
)
UNINITIALISED_READ = f"memory is read before it is written: {UNWRITTEN_ELEMENTS}"
WRONG_VALUES = f"if other sizes are right, look at the mask: {OUT_OF_BOUNDS_READ}"
WRONG_PARTS = f"{UNWRITTEN_ELEMENTS}; {OUT_OF_BOUNDS_READ}"

FAKE_RAISES = (
    "the fake must accept every call that the operator accepts: compute shapes and dtypes only, and check "
    "no more than the operator checks; if the call is invalid, let the operator refuse it too"
)
FAKE_CONTENTS = (
    "compute shapes from x.shape, x.dtype and non-tensor arguments; .item(), bool(x), x.tolist() and `if` on a "
    "tensor need contents. "
    "If the size does depend on contents, ask torch for one: size = torch.library.get_ctx().new_dynamic_size(); "
    "return x.new_empty(size)"
)
FAKE_SIZES = (
    "do not turn sizes into numbers: int(x.shape[0]), `x.shape[0] == 16`, math.ceil(…) and use as a list index or a "
    "dict key do; "
    "use them as they are, // and torch.sym_max instead"
)
FAKE_SHAPE = "compute the shape from the sizes of the arguments, with no fixed numbers in it"
FAKE_DEVICE = "make the result of the fake with x.new_empty(…), which keeps the device"
FAKE_CONTIGUOUS = (
    "the operator's result is contiguous: in the fake, x.new_empty(x.shape), or torch.empty_like(x, "
    "memory_format=torch.contiguous_format); "
    "torch.empty_like(x) alone keeps the strides of x"
)
REAL_CONTIGUOUS = (
    "let the operator return contiguous results (allocate with torch.empty_like(x, "
    "memory_format=torch.contiguous_format)), "
    "or allocate in the fake as the operator does, with the same call"
)

GRAPH_BREAK = (
    "keep what the compiler cannot follow out of the function around the operator (print, .item(), numpy, file or "
    "environment access, "
    "`if` on a tensor): move it into the operator itself, or check shapes and dtypes only"
)
COMPILED_DIFFERS = (
    "the operator must depend on its arguments only, and its schema must list the arguments that it "
    "writes to (mutates_args)"
)
SEE_FAKE = "see the finding of `fake`, from which this follows; if there is none, see the operators that it calls"
RECOMPILES = "sizes are turned into numbers: look for int(x.shape[…]), x.shape[…] == number, or a fake that does so"

GRADIENT = (
    "correct the gradient: for each floating-point argument the incoming gradient times the derivative of the result "
    "by it, "
    "None for non-tensor arguments, in the order of the arguments; look at what setup_context saves, "
    "and at sums over dimensions that were broadcast"
)
GRADIENT_EXPANDED = "begin backward with grad = grad.contiguous(), or pass its strides to the kernel"

SEEDED = "tags=torch.Tag.nondeterministic_seeded where the operator is defined"
LAST_BITS = "if sums depend on the order of atomics, say so in the documentation, or sum in two steps"
NONDETERMINISTIC = (
    "look for memory that is read before it is written, for state kept between calls, "
    "and for programs that write to the same element without atomics"
)
NONDETERMINISTIC_UNSEEDED = (
    "if it is meant to be random, use torch's generator, which torch.manual_seed sets, and say so: "
    f"{SEEDED}; else {NONDETERMINISTIC}"
)

SMALL_BLOCKS = (
    "larger blocks: try 1024, or triton.autotune over 256, 512, 1024; where rows are short, several of "
    "them for each program"
)
LARGE_BLOCKS = "blocks of 1024 to 8192, and a loop over the rest inside the kernel"

OPCHECK = {
    "test_schema": "make the schema say what the operator does: Tensor(a!) for what it writes to, nothing that "
    "shares memory with an argument",
    "test_autograd_registration": "register gradients with torch.library.register_autograd (C++: at the key "
    "Autograd), not by calling "
    "differentiable operators in a kernel for CPU or CUDA; where the kernel calls torch's operators, work below "
    "autograd",
    "test_faketensor": "let the fake return what the operator returns: shape, dtype, strides, device",
    "test_aot_dispatch_static": "the operator behaves differently when traced: see fake, schema and autograd formula",
    "test_aot_dispatch_dynamic": "the operator behaves differently when traced with symbolic sizes: see fake and "
    "autograd formula",
}
"""Advice by test of torch.library.opcheck."""
