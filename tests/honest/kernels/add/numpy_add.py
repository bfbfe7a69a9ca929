"""add.Tensor through numpy: torch says the dtype, numpy broadcasts and adds; half types are added in float32."""

import numpy as np
import torch

OP = "add.Tensor"


def add_kernel_impl(self, other, *, alpha=1):
    if not isinstance(other, torch.Tensor):
        raise NotImplementedError("only tensors are added here")
    dtype = torch.result_type(self, other)
    if (
        isinstance(alpha, complex)
        and not dtype.is_complex
        or isinstance(alpha, float)
        and not (dtype.is_floating_point or dtype.is_complex)
    ):
        raise RuntimeError(f"alpha {alpha} does not fit a result of {dtype}")
    if isinstance(alpha, bool) and dtype != torch.bool:
        raise RuntimeError("a boolean alpha is for booleans")
    inner = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    left, right = (t.resolve_conj().resolve_neg().to(inner).numpy() for t in (self, other))
    with np.errstate(all="ignore"):
        scaled = right if alpha == 1 else np.multiply(right, right.dtype.type(alpha))
        total = np.asarray(np.add(left, scaled))
    return torch.from_numpy(total).to(dtype)
