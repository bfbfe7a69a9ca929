"""mm: a matrix product by rank-one updates. Half types accumulate in float32, as ATen does."""

import torch


def mm_kernel_impl(self, mat2):
    if self.dim() != 2 or mat2.dim() != 2 or self.shape[1] != mat2.shape[0]:
        raise RuntimeError(f"mm cannot multiply {list(self.shape)} by {list(mat2.shape)}")
    if self.dtype != mat2.dtype:
        raise RuntimeError(f"mm takes matrices of one dtype, not {self.dtype} and {mat2.dtype}")
    inner = torch.promote_types(self.dtype, torch.float32) if self.is_floating_point() else self.dtype
    left, right = self.to(inner), mat2.to(inner)
    total = torch.zeros(self.shape[0], mat2.shape[1], dtype=inner, device=self.device)
    for k in range(self.shape[1]):
        total += left[:, k : k + 1] * right[k : k + 1, :]
    return total.to(self.dtype)


if __name__ == "__main__":
    a, b = torch.randn(5, 7), torch.randn(7, 3)
    print((mm_kernel_impl(a, b) - a @ b).abs().max())
