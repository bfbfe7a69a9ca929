"""maximum by comparing and selecting; a NaN on either side wins."""

import torch

OP = "maximum.default"


def maximum_kernel_impl(self, other):
    dtype = torch.result_type(self, other)
    if dtype.is_complex:
        raise RuntimeError("complex numbers have no order")
    left, right = self.to(dtype), other.to(dtype)
    if dtype == torch.bool:
        return left | right
    chosen = torch.where(left > right, left, right)
    return torch.where(left != left, left, chosen) if dtype.is_floating_point else chosen
