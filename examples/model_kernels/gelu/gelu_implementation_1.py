"""gelu: DELIBERATELY INACCURATE. It takes the quick formula with tanh whatever `approximate` says: some 5e-4 off."""

import math

import torch


def gelu_kernel_impl(self, *, approximate="none"):
    inner = math.sqrt(2 / math.pi) * (self + 0.044715 * self * self * self)
    return 0.5 * self * (1 + torch.tanh(inner))


if __name__ == "__main__":
    print(gelu_kernel_impl(torch.randn(5)))
