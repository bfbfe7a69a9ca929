"""mm by products of rows and columns over pieces of the inner dimension that are added at the end; half types in float32."""

import torch

OP = "mm.default"
PIECE = 8


def mm_kernel_impl(self, mat2):
    if self.dim() != 2 or mat2.dim() != 2 or self.shape[1] != mat2.shape[0]:
        raise RuntimeError(f"mm cannot multiply {list(self.shape)} by {list(mat2.shape)}")
    if self.dtype != mat2.dtype:
        raise RuntimeError(f"mm takes matrices of one dtype, not {self.dtype} and {mat2.dtype}")
    inner = torch.promote_types(self.dtype, torch.float32) if self.is_floating_point() else self.dtype
    total = torch.zeros(self.shape[0], mat2.shape[1], dtype=inner)
    for left, right in zip(self.to(inner).split(PIECE, 1), mat2.to(inner).split(PIECE, 0), strict=True):
        total += (left.unsqueeze(-1) * right.unsqueeze(0)).sum(1, dtype=inner)
    return total.to(self.dtype)
