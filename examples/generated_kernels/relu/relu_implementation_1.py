"""relu: the positive part, NaN kept. Serves relu, relu_ and relu.out."""

import torch


def relu_kernel_impl(self):
    if self.dtype == torch.bool or self.is_complex():
        raise RuntimeError(f"relu is not defined for {self.dtype}")
    return torch.where(self <= 0, torch.zeros((), dtype=self.dtype, device=self.device), self)


if __name__ == "__main__":
    print(relu_kernel_impl(torch.tensor([-1.0, 0.0, 2.0, float("nan")])))
