"""native_layer_norm: normalised input, mean and reciprocal standard deviation, in two passes over float32."""

import torch


def native_layer_norm_kernel_impl(input, normalized_shape, weight, bias, eps):
    count = len(normalized_shape)
    if count < 1 or list(input.shape[input.dim() - count :]) != list(normalized_shape):
        raise RuntimeError(f"normalized_shape {list(normalized_shape)} does not fit input of shape {list(input.shape)}")
    for name, given in (("weight", weight), ("bias", bias)):
        if given is not None and list(given.shape) != list(normalized_shape):
            raise RuntimeError(f"{name} has shape {list(given.shape)}, not {list(normalized_shape)}")
    wide = input.contiguous().to(torch.promote_types(input.dtype, torch.float32))
    dims = list(range(wide.dim() - count, wide.dim()))
    mean = wide.mean(dims, keepdim=True)
    centred = wide - mean
    rstd = torch.rsqrt(centred.square().mean(dims, keepdim=True) + eps)
    result = centred * rstd
    if weight is not None:
        result = result * weight
    if bias is not None:
        result = result + bias
    given = weight if weight is not None else bias
    statistics = wide.dtype if input.is_cuda else (input if given is None else given).dtype
    return result.to(input.dtype), mean.to(statistics), rstd.to(statistics)


if __name__ == "__main__":
    print(native_layer_norm_kernel_impl(torch.randn(2, 8), [8], None, None, 1e-5)[0])
