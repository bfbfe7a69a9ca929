"""Wrong: reads the storage in order and ignores strides. Right on contiguous input, wrong on everything else."""

import torch


def neg_kernel_impl(self):
    flat = torch.as_strided(self, (self.numel(),), (1,))
    return (0 - flat).reshape(self.shape)


if __name__ == "__main__":
    print(neg_kernel_impl(torch.randn(4)))
