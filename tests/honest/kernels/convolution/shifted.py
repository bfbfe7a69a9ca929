"""convolution, direct: for each tap the shifted input times that tap, added up in float64; transposed ones scatter instead."""

import itertools

import torch

OP = "convolution.default"


def _window(tap, size, out, stride, dilation):
    return tuple(
        slice(t * d, t * d + s * (o - 1) + 1, s) for t, o, s, d in zip(tap, out, stride, dilation, strict=True)
    )


def convolution_kernel_impl(input, weight, bias, stride, padding, dilation, transposed, output_padding, groups):
    dims = input.dim() - 2
    stride, padding, dilation = (list(v) * dims if len(v) == 1 else list(v) for v in (stride, padding, dilation))
    wide = torch.complex128 if input.is_complex() else torch.float64 if input.is_floating_point() else input.dtype
    taps, batch = weight.shape[2:], input.shape[0]
    span = [d * (k - 1) + 1 for d, k in zip(dilation, taps, strict=True)]
    x, w = input.to(wide).reshape(batch, groups, input.shape[1] // groups, *input.shape[2:]), weight.to(wide)
    if transposed:
        extra = list(output_padding) * dims if len(output_padding) == 1 else list(output_padding)
        size = [(n - 1) * s + k + e for n, s, k, e in zip(input.shape[2:], stride, span, extra, strict=True)]
        w = w.reshape(groups, -1, weight.shape[1], *taps)
        total = torch.zeros(batch, groups, weight.shape[1], *size, dtype=wide)
        for tap in itertools.product(*map(range, taps)):
            part = (x.unsqueeze(3) * w[(..., *tap)].reshape(1, groups, -1, weight.shape[1], *[1] * dims)).sum(2)
            total[(..., *_window(tap, size, input.shape[2:], stride, dilation))] += part
        cut = tuple(slice(p, n - p) for p, n in zip(padding, size, strict=True))
        total = total[(..., *cut)]
    else:
        padded = [n + 2 * p for n, p in zip(input.shape[2:], padding, strict=True)]
        out = [(n - k) // s + 1 for n, k, s in zip(padded, span, stride, strict=True)]
        padded_input = torch.zeros(*x.shape[:3], *padded, dtype=wide)
        padded_input[(..., *(slice(p, p + n) for p, n in zip(padding, input.shape[2:], strict=True)))] = x
        w = w.reshape(groups, -1, *weight.shape[1:])
        total = torch.zeros(batch, groups, w.shape[1], *out, dtype=wide)
        for tap in itertools.product(*map(range, taps)):
            shifted = padded_input[(..., *_window(tap, padded, out, stride, dilation))]
            total += (shifted.unsqueeze(2) * w[(..., *tap)].reshape(1, groups, w.shape[1], -1, *[1] * dims)).sum(3)
    result = total.reshape(batch, groups * total.shape[2], *total.shape[3:])
    if bias is not None:
        result = result + bias.to(wide).reshape(1, -1, *[1] * dims)
    return result.to(input.dtype).contiguous()
