"""Operators that end their process or never come back."""

import ctypes
import os
import time

import torch

NAMESPACE = "ends"


def operator(name, trouble, when):
    def function(x):
        if when(x):
            trouble()
        return 2 * x.contiguous()

    made = torch.library.custom_op(f"{NAMESPACE}::{name}", function, mutates_args=(), schema="(Tensor x) -> Tensor")
    made.register_fake(lambda x: x.new_empty(x.shape))
    made.register_autograd(lambda ctx, grad: 2 * grad)


def segfault():
    ctypes.string_at(0)


def not_contiguous(x):
    return not x.is_contiguous()


operator("segfault_on_strides", segfault, not_contiguous)
operator("segfault_always", segfault, lambda x: True)
operator("hangs_at_33", lambda: time.sleep(3600), lambda x: 33 in x.shape)
operator("exits_on_empty", lambda: os._exit(0), lambda x: x.numel() == 0)
operator("right", segfault, lambda x: False)
