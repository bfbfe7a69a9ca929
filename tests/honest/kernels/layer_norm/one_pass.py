"""native_layer_norm from the sums of the elements and of their squares about the first one, in float64 inside."""

import torch

OP = "native_layer_norm.default"


def native_layer_norm_kernel_impl(input, normalized_shape, weight, bias, eps):
    count = len(normalized_shape)
    if count < 1 or list(input.shape[input.dim() - count :]) != list(normalized_shape):
        raise RuntimeError(f"normalized_shape {list(normalized_shape)} does not fit input of shape {list(input.shape)}")
    lead = input.shape[: input.dim() - count]
    size = 1
    for n in normalized_shape:
        size *= n
    x = input.double().reshape(*lead, size)
    origin = x[..., :1] if size else x.new_zeros(*lead, 1)
    shifted = x - origin
    first = shifted.sum(-1, keepdim=True) / size
    variance = (shifted.square().sum(-1, keepdim=True) / size - first.square()).clamp(min=0)
    rstd = torch.rsqrt(variance + eps)
    result = ((shifted - first) * rstd).reshape(input.shape)
    for given, join in ((weight, torch.mul), (bias, torch.add)):
        if given is not None:
            result = join(result, given)
    given = weight if weight is not None else bias
    statistics = (input if given is None else given).dtype
    shape = [*lead, *[1] * count]
    return (
        result.to(input.dtype).contiguous(),
        (x.sum(-1, keepdim=True) / size).reshape(shape).to(statistics),
        rstd.reshape(shape).to(statistics),
    )
