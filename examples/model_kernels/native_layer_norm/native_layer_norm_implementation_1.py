"""native_layer_norm: in two passes."""

import torch


def native_layer_norm_kernel_impl(input, normalized_shape, weight, bias, eps):
    dims = list(range(input.dim() - len(normalized_shape), input.dim()))
    mean = input.mean(dims, keepdim=True)
    centred = input - mean
    rstd = torch.rsqrt(centred.square().mean(dims, keepdim=True) + eps)
    result = centred * rstd
    result = result if weight is None else result * weight
    return result if bias is None else result + bias, mean, rstd


if __name__ == "__main__":
    print(native_layer_norm_kernel_impl(torch.randn(2, 5), [5], None, None, 1e-5))
