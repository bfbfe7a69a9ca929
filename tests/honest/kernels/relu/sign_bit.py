"""relu by bits: the sign, spread over the word, masks it; a NaN keeps its bits."""

import torch

OP = "relu.default"
WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def relu_kernel_impl(self):
    if self.dtype == torch.bool or self.is_complex():
        raise RuntimeError(f"relu is not defined for {self.dtype}")
    if self.dtype == torch.uint8:
        return self.clone()
    source = self.contiguous()
    word = source.view(WORDS[self.element_size()])
    masked = word & ~(word >> (8 * self.element_size() - 1))
    if self.is_floating_point():
        masked = torch.where(torch.isnan(source), word, masked)
    return masked.view(self.dtype).reshape(self.shape)
