"""Wrong: right numbers, but computed in the caller's own tensor."""

import torch


def neg_kernel_impl(self):
    return self.mul_(-1).clone()


if __name__ == "__main__":
    print(neg_kernel_impl(torch.randn(4)))
