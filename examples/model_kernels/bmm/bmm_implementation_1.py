"""bmm: products elementwise, summed over the inner dimension."""

import torch


def bmm_kernel_impl(self, mat2):
    return (self.unsqueeze(-1) * mat2.unsqueeze(1)).sum(2)


if __name__ == "__main__":
    print(bmm_kernel_impl(torch.randn(2, 2, 3), torch.randn(2, 3, 2)))
