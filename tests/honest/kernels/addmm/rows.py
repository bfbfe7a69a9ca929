"""addmm by rows: each row of the product is a sum of scaled rows of the second factor. With beta 0 what is added is not read."""

import torch

OP = "addmm.default"


def addmm_kernel_impl(self, mat1, mat2, *, beta=1, alpha=1):
    if mat1.dim() != 2 or mat2.dim() != 2 or mat1.shape[1] != mat2.shape[0]:
        raise RuntimeError(f"addmm cannot multiply {list(mat1.shape)} by {list(mat2.shape)}")
    if not self.dtype == mat1.dtype == mat2.dtype:
        raise RuntimeError(f"addmm takes one dtype, not {self.dtype}, {mat1.dtype} and {mat2.dtype}")
    inner = torch.promote_types(self.dtype, torch.float64) if self.is_floating_point() else self.dtype
    inner = torch.complex128 if self.is_complex() else inner
    left, right = mat1.to(inner), mat2.to(inner)
    rows = [(row.unsqueeze(-1) * right).sum(0, dtype=inner) for row in left]
    product = torch.stack(rows) if rows else right.new_zeros(0, right.shape[1])
    product = product * alpha
    if beta != 0:
        product = self.to(inner).expand(product.shape) * beta + product
    return product.to(self.dtype).contiguous()
