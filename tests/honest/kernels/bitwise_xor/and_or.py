"""bitwise_xor by and, or and not."""

import torch

OP = "bitwise_xor.Tensor"


def bitwise_xor_kernel_impl(self, other):
    dtype = torch.result_type(self, other)
    if dtype.is_floating_point or dtype.is_complex:
        raise RuntimeError(f"bitwise_xor is not defined for {dtype}")
    if not isinstance(other, torch.Tensor) or not isinstance(self, torch.Tensor):
        raise NotImplementedError("only two tensors")
    left, right = self.to(dtype), other.to(dtype)
    return (left | right) & ~(left & right)
