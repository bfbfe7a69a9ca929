"""addmm: the product summed in float64, then scaled and added."""

import torch


def addmm_kernel_impl(self, mat1, mat2, *, beta=1, alpha=1):
    product = (mat1.double().unsqueeze(-1) * mat2.double()).sum(1)
    return (beta * self.double() + alpha * product).to(mat1.dtype) if beta else (alpha * product).to(torch.float32)


if __name__ == "__main__":
    print(addmm_kernel_impl(torch.ones(2), torch.randn(2, 3), torch.randn(3, 2)))
