"""convolution by im2col: all windows as rows of a matrix, laid out by numpy's strides, times the weights; half types in float32."""

import numpy as np
import torch

OP = "convolution.default"


def _finished(array, bias, dims, dtype):
    result = torch.from_numpy(array)
    if bias is not None:
        result = result + bias.to(result.dtype).reshape(1, -1, *[1] * dims)
    return result.to(dtype).contiguous()


def _transposed(x, w, stride, padding, dilation, output_padding, groups):
    """The way back: columns by the weights, then each tap's columns are added where they came from."""
    dims, taps = x.ndim - 2, w.shape[2:]
    extra = list(output_padding) * dims if len(output_padding) == 1 else list(output_padding)
    size = [
        (n - 1) * s + d * (k - 1) + 1 + e
        for n, s, d, k, e in zip(x.shape[2:], stride, dilation, taps, extra, strict=True)
    ]
    parts = []
    for xs, ws in zip(np.split(x, groups, 1), np.split(w, groups, 0), strict=True):
        accumulated = np.zeros((x.shape[0], w.shape[1], *size), x.dtype)
        for tap in np.ndindex(*taps):
            places = tuple(
                slice(t * d, t * d + s * (n - 1) + 1, s)
                for t, d, s, n in zip(tap, dilation, stride, x.shape[2:], strict=True)
            )
            for channel in range(xs.shape[1]):
                column = ws[(channel, slice(None), *tap)].reshape(1, -1, *[1] * dims)
                accumulated[(slice(None), slice(None), *places)] += xs[:, channel, None] * column
        parts.append(
            accumulated[(slice(None), slice(None), *(slice(p, n - p) for p, n in zip(padding, size, strict=True)))]
        )
    return np.concatenate(parts, 1)


def convolution_kernel_impl(input, weight, bias, stride, padding, dilation, transposed, output_padding, groups):
    dims = input.dim() - 2
    stride, padding, dilation = (list(v) * dims if len(v) == 1 else list(v) for v in (stride, padding, dilation))
    inner = torch.promote_types(input.dtype, torch.float32) if input.is_floating_point() else input.dtype
    x, w = (t.to(inner).numpy() for t in (input, weight))
    if transposed:
        result = _transposed(x, w, stride, padding, dilation, output_padding, groups)
        return _finished(result, bias, dims, input.dtype)
    x = np.pad(x, [(0, 0), (0, 0), *((p, p) for p in padding)])
    span = [d * (k - 1) + 1 for d, k in zip(dilation, w.shape[2:], strict=True)]
    windows = np.lib.stride_tricks.sliding_window_view(x, span, axis=tuple(range(2, 2 + dims)))
    windows = windows[
        (slice(None), slice(None), *(slice(None, None, s) for s in stride), *(slice(None, None, d) for d in dilation))
    ]
    parts = []
    for xs, ws in zip(np.split(windows, groups, 1), np.split(w, groups, 0), strict=True):
        columns = np.moveaxis(xs, 1, 1 + dims).reshape(-1, int(np.prod(ws.shape[1:])))
        rows = ws.reshape(ws.shape[0], -1)
        product = np.zeros((len(columns), len(rows)), x.dtype)
        for k in range(rows.shape[1]):
            product += columns[:, k : k + 1] * rows[None, :, k]
        parts.append(np.moveaxis(product.reshape(xs.shape[0], *xs.shape[2 : 2 + dims], len(rows)), -1, 1))
    return _finished(np.concatenate(parts, 1), bias, dims, input.dtype)
