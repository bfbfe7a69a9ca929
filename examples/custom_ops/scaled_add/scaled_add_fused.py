"""One pass over memory: ATen's add takes the factor along."""

import torch


def scaled_add_kernel_impl(x, y, scale):
    return torch.add(x, y, alpha=scale)
