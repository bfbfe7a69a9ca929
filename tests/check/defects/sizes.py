"""Operators in Python that go by blocks of 32, with one fault each where the elements are no whole number of blocks."""

import ctypes

import torch

NAMESPACE = "sizes"
BLOCK = 32
MANY = "(Tensor x, int dim, float alpha, Tensor? bias=None) -> Tensor"


def operator(name, function, schema="(Tensor x) -> Tensor", **options):
    torch.library.custom_op(f"{NAMESPACE}::{name}", function, mutates_args=(), schema=schema, **options)


def missing(x):
    """Return how many elements the last block lacks."""
    return -x.numel() % BLOCK


def only_whole_blocks(x):
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    whole = x.numel() // BLOCK * BLOCK
    y.view(-1)[:whole] = x.reshape(-1)[:whole] + 1
    return y


def writes_past_the_end(x):
    y = torch.empty_like(x, memory_format=torch.contiguous_format).copy_(x)
    if missing(x):
        ctypes.memset(y.data_ptr() + y.nbytes, 0, missing(x) * y.itemsize)
    return y


def reads_past_the_end(x):
    x = x.contiguous()
    past = (ctypes.c_float * missing(x)).from_address(x.data_ptr() + x.nbytes)
    return x + 0 * sum(past)


def pads_with_ones(x):
    return x.sum() + missing(x)


def halves_the_rest(x):
    y = (x + 1).contiguous()
    y.view(-1)[x.numel() // BLOCK * BLOCK :] /= 2
    return y


def chosen(x, how):
    if how not in (torch.strided, "down"):
        raise ValueError(f"how is {how!r}; allowed: 'down'")
    return x + 1


for function in (only_whole_blocks, writes_past_the_end, reads_past_the_end, pads_with_ones, halves_the_rest):
    operator(function.__name__, function)
operator("made_up", lambda x, dim, alpha, bias=None: (x if bias is None else x + bias).softmax(dim) * alpha, MANY)
operator("right", lambda x: x + 1, device_types="cpu")
operator("not_called_rightly", chosen, "(Tensor x, str how) -> Tensor")
operator("no_call_is_right", chosen, "(Tensor x, str how) -> Tensor")
operator("no_call_can_be_made", chosen, "(Tensor x, Layout how) -> Tensor")
