"""_softmax in one pass over blocks: the sum is rescaled whenever the running maximum grows; half types in float32."""

import torch

OP = "_softmax.default"
BLOCK = 4


def _softmax_kernel_impl(self, dim, half_to_float):
    if half_to_float:
        raise RuntimeError("half to float conversion is for a GPU")
    if not self.is_floating_point():
        raise RuntimeError(f"softmax is not defined for {self.dtype}")
    if self.numel() == 0 or self.dim() == 0:
        return torch.where(torch.isfinite(self), torch.ones_like(self), torch.nan).to(self.dtype)
    wide = self.to(torch.promote_types(self.dtype, torch.float32)).movedim(dim, -1)
    largest = torch.full(wide.shape[:-1], -torch.inf, dtype=wide.dtype)
    total = torch.zeros_like(largest)
    for block in wide.split(BLOCK, -1):
        new = torch.maximum(largest, block.amax(-1))
        old = torch.where(largest == -torch.inf, torch.zeros_like(largest), torch.exp(largest - new))
        here = torch.where(block == -torch.inf, torch.zeros_like(block), torch.exp(block - new.unsqueeze(-1)))
        total, largest = total * old + here.sum(-1), new
    result = torch.exp(wide - largest.unsqueeze(-1)) / total.unsqueeze(-1)
    return result.movedim(-1, dim).to(self.dtype).contiguous()
