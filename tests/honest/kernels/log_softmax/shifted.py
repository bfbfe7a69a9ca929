"""_log_softmax: shift by the maximum, subtract the logarithm of the sum; half types in float32."""

import torch

OP = "_log_softmax.default"


def _log_softmax_kernel_impl(self, dim, half_to_float):
    if half_to_float:
        raise RuntimeError("half to float conversion is for a GPU")
    if not self.is_floating_point():
        raise RuntimeError(f"log_softmax is not defined for {self.dtype}")
    if self.numel() == 0:
        return torch.empty(self.shape, dtype=self.dtype)
    wide = self.to(torch.promote_types(self.dtype, torch.float32))
    shifted = wide - wide.amax(dim, keepdim=True)
    return (shifted - torch.log(torch.exp(shifted).sum(dim, keepdim=True))).to(self.dtype).contiguous()
