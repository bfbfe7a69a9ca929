import torch


def swish_kernel_impl(x):
    return x * torch.sigmoid(x)
