"""Wrong: right numbers, but computed in the caller's own tensor."""

import torch


def relu_kernel_impl(self):
    return self.clamp_(min=0).clone()


if __name__ == "__main__":
    print(relu_kernel_impl(torch.randn(4)))
