"""native_layer_norm_backward: by the formula, from the normalised input."""

import torch


def native_layer_norm_backward_kernel_impl(grad_out, input, normalized_shape, mean, rstd, weight, bias, output_mask):
    first = input.dim() - len(normalized_shape)
    inner, outer = list(range(first, input.dim())), list(range(first))
    normal = (input - mean) * rstd
    flowing = grad_out if weight is None else grad_out * weight
    shared = flowing.mean(inner, keepdim=True) + normal * (flowing * normal).mean(inner, keepdim=True)
    found = ((flowing - shared) * rstd, (grad_out * normal).sum(outer), grad_out.sum(outer))
    return tuple(value if wanted else None for value, wanted in zip(found, output_mask, strict=True))


if __name__ == "__main__":
    x = torch.randn(2, 5)
    mean, rstd = x.mean(-1, keepdim=True), 1 / x.std(-1, keepdim=True, correction=0)
    mask = [True, True, True]
    print(
        native_layer_norm_backward_kernel_impl(
            torch.ones(2, 5), x, [5], mean, rstd, torch.ones(5), torch.zeros(5), mask
        )
    )
