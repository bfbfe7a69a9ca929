"""tanh: by expm1 of twice the absolute value, with the sign put back."""

import torch


def tanh_kernel_impl(self):
    if not self.is_floating_point():
        raise NotImplementedError("only floats")
    small = torch.expm1(-2 * self.abs())
    return torch.copysign(-small / (2 + small), self)


if __name__ == "__main__":
    print(tanh_kernel_impl(torch.randn(5)))
