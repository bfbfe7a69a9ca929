"""abs of floats by clearing the sign bit, of integers by a mask and a subtraction, of complex numbers by hypot."""

import torch

OP = "abs.default"
WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def abs_kernel_impl(self):
    if self.dtype == torch.bool:
        raise RuntimeError("abs is not defined for booleans")
    if self.is_complex():
        pair = torch.view_as_real(self.resolve_conj())
        return torch.hypot(pair[..., 0], pair[..., 1])
    if self.dtype == torch.uint8:
        return self.clone()
    if self.is_floating_point():
        word = self.contiguous().view(WORDS[self.element_size()])
        return (word & torch.iinfo(word.dtype).max).view(self.dtype).reshape(self.shape)
    mask = self >> (8 * self.element_size() - 1)
    return (self ^ mask) - mask
