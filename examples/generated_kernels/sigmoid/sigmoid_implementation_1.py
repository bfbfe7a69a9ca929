"""sigmoid: 1 / (1 + exp(-x)), computed in float32 at least. One kernel for the functional, in-place and out forms."""

import torch


def sigmoid_kernel_impl(self):
    if self.is_complex():
        return torch.reciprocal(1 + torch.exp(-self))
    dtype = self.dtype if self.is_floating_point() else torch.get_default_dtype()
    wide = self.to(torch.promote_types(dtype, torch.float32))
    small = torch.exp(-wide.abs())  # never overflows
    return torch.where(wide < 0, small, torch.ones_like(small)).div(1 + small).to(dtype)


if __name__ == "__main__":
    print(sigmoid_kernel_impl(torch.linspace(-4, 4, 5)))
