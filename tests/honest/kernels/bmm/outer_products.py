"""bmm by adding outer products, one for each inner index; half types in float32."""

import torch

OP = "bmm.default"


def bmm_kernel_impl(self, mat2):
    if self.dim() != 3 or mat2.dim() != 3 or self.shape[0] != mat2.shape[0] or self.shape[2] != mat2.shape[1]:
        raise RuntimeError(f"bmm cannot multiply {list(self.shape)} by {list(mat2.shape)}")
    if self.dtype != mat2.dtype:
        raise RuntimeError(f"bmm takes matrices of one dtype, not {self.dtype} and {mat2.dtype}")
    inner = torch.promote_types(self.dtype, torch.float32) if self.is_floating_point() else self.dtype
    left, right = self.to(inner), mat2.to(inner)
    total = torch.zeros(self.shape[0], self.shape[1], mat2.shape[2], dtype=inner)
    for k in range(self.shape[2]):
        total += left[:, :, k, None] * right[:, k, None, :]
    return total.to(self.dtype)
