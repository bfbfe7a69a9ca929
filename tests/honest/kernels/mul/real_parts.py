"""mul.Tensor: complex numbers by four real products, booleans by `and`, the rest by dividing the work over rows in numpy."""

import numpy as np
import torch

OP = "mul.Tensor"


def _complex(left, right):
    a, b = torch.view_as_real(left.resolve_conj()).unbind(-1)
    c, d = torch.view_as_real(right.resolve_conj()).unbind(-1)
    ac, bd, ad, bc = (
        torch.from_numpy(np.asarray(np.multiply(x.numpy(), y.numpy()))) for x, y in ((a, c), (b, d), (a, d), (b, c))
    )
    return torch.complex(ac - bd, ad + bc)


def mul_kernel_impl(self, other):
    if not isinstance(other, torch.Tensor):
        raise NotImplementedError("only tensors are multiplied here")
    dtype = torch.result_type(self, other)
    inner = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    left, right = self.to(inner), other.to(inner)
    if dtype.is_complex:
        return _complex(left, right)
    if dtype == torch.bool:
        return torch.logical_and(left, right)
    with np.errstate(all="ignore"):
        return torch.from_numpy(np.asarray(np.multiply(left.numpy(), right.numpy()))).to(dtype)
