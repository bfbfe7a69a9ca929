"""abs through numpy, in chunks on two threads; numpy lets go of the interpreter while it computes."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

OP = "abs.default"


def abs_kernel_impl(self):
    if self.dtype == torch.bool:
        raise RuntimeError("abs is not defined for booleans")
    source = (self.float() if self.dtype == torch.bfloat16 else self.resolve_conj()).numpy().reshape(-1)
    target = np.empty(source.shape, np.absolute(source[:0]).dtype)
    middle = len(source) // 2
    parts = [slice(0, middle), slice(middle, len(source))]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda part: np.absolute(source[part], out=target[part]), parts))
    dtype = torch.bfloat16 if self.dtype == torch.bfloat16 else None
    return torch.from_numpy(target).reshape(self.shape).to(dtype or torch.from_numpy(target).dtype)
