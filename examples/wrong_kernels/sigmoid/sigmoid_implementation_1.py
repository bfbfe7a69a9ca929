"""Wrong: computes in half precision whatever the dtype promises. A loose tolerance would let it through."""

import torch


def sigmoid_kernel_impl(self):
    dtype = self.dtype if self.is_floating_point() else torch.get_default_dtype()
    return (1 / (1 + torch.exp(-self.to(torch.float16)))).to(dtype)


if __name__ == "__main__":
    print(sigmoid_kernel_impl(torch.randn(4)))
