"""relu through numpy; bfloat16, which numpy lacks, by way of float32, which holds all of it."""

import numpy as np
import torch

OP = "relu.default"


def relu_kernel_impl(self):
    if self.dtype == torch.bool or self.is_complex():
        raise RuntimeError(f"relu is not defined for {self.dtype}")
    array = (self.float() if self.dtype == torch.bfloat16 else self).numpy()
    kept = np.where(array <= 0, np.zeros((), array.dtype), array)
    return torch.empty_like(self).copy_(torch.from_numpy(np.asarray(kept)))
