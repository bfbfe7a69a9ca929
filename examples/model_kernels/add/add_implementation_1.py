"""add: self + alpha * other, as a difference of the negated."""

import torch


def add_kernel_impl(self, other, *, alpha=1):
    if not (torch.is_tensor(self) and torch.is_tensor(other)) or not self.is_floating_point():
        raise NotImplementedError("only tensors of floats")
    return self - (-other if alpha == 1 else other * -alpha)


if __name__ == "__main__":
    print(add_kernel_impl(torch.ones(3), torch.arange(3.0), alpha=2))
