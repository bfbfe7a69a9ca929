"""_log_softmax: shift by the maximum, subtract the logarithm of the sum."""


def _log_softmax_kernel_impl(self, dim, half_to_float):
    if half_to_float or self.numel() == 0:
        raise NotImplementedError("neither half to float nor empty tensors")
    shifted = self - self.amax(dim, keepdim=True)
    return (shifted - shifted.exp().sum(dim, keepdim=True).log()).contiguous()
