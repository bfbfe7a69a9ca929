"""sum of all elements, by halves: the error grows with the logarithm of the length. Half types add in float32."""

import torch


def sum_kernel_impl(self, *, dtype=None):
    result = dtype or (self.dtype if self.is_floating_point() or self.is_complex() else torch.int64)
    inner = torch.promote_types(result, torch.float32) if result.is_floating_point else result
    terms = self.to(inner, copy=True).reshape(-1)  # a single element must not come back as a view
    if terms.numel() == 0:
        return torch.zeros((), dtype=result, device=self.device)
    while terms.numel() > 1:
        half = terms.numel() // 2
        rest = terms[2 * half :]
        terms = torch.cat([terms[:half] + terms[half : 2 * half], rest])
    return terms.reshape(()).to(result)


if __name__ == "__main__":
    x = torch.randn(1001)
    print(sum_kernel_impl(x), x.double().sum())
