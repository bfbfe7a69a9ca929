"""_softmax along one dimension: shift by the maximum, exponentiate, divide. Half types are computed in float32."""

import torch


def _softmax_kernel_impl(self, dim, half_to_float):
    if half_to_float and (self.dtype != torch.float16 or self.device.type == "cpu"):
        raise RuntimeError("half to float conversion is for float16 on a GPU")
    if not self.is_floating_point():
        raise RuntimeError(f"softmax is not defined for {self.dtype}")
    dtype = torch.float32 if half_to_float else self.dtype
    if self.numel() == 0:
        return torch.empty_like(self, dtype=dtype, memory_format=torch.contiguous_format)
    wide = self.to(torch.promote_types(self.dtype, torch.float32))
    shifted = torch.exp(wide - wide.amax(dim, keepdim=True))
    return (shifted / shifted.sum(dim, keepdim=True)).to(dtype).contiguous()


if __name__ == "__main__":
    print(_softmax_kernel_impl(torch.randn(2, 4), -1, False))
