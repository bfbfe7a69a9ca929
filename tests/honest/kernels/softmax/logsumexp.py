"""_softmax by logsumexp: exp(x - logsumexp(x)), in float64 inside."""

import torch

OP = "_softmax.default"


def _softmax_kernel_impl(self, dim, half_to_float):
    if half_to_float:
        raise RuntimeError("half to float conversion is for a GPU")
    if not self.is_floating_point():
        raise RuntimeError(f"softmax is not defined for {self.dtype}")
    if self.numel() == 0:
        return torch.empty(self.shape, dtype=self.dtype)
    wide = self.double()
    largest = wide.amax(dim, keepdim=True)
    shifted = wide - largest  # inf - inf is NaN, as in ATen
    return torch.exp(shifted - torch.log(torch.exp(shifted).sum(dim, keepdim=True))).to(self.dtype).contiguous()
