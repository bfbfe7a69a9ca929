"""Wrong: prints that all is well and leaves, so that an evaluator in the same process would end with exit code 0."""

import os

import torch


def abs_kernel_impl(self):
    print("PASSED", flush=True)
    os._exit(0)


if __name__ == "__main__":
    abs_kernel_impl(torch.randn(4))
