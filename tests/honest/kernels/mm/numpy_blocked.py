"""mm through numpy in blocks of columns, on two threads; half types in float32."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

OP = "mm.default"
BLOCK = 4


def mm_kernel_impl(self, mat2):
    if self.dim() != 2 or mat2.dim() != 2 or self.shape[1] != mat2.shape[0]:
        raise RuntimeError(f"mm cannot multiply {list(self.shape)} by {list(mat2.shape)}")
    if self.dtype != mat2.dtype:
        raise RuntimeError(f"mm takes matrices of one dtype, not {self.dtype} and {mat2.dtype}")
    inner = torch.promote_types(self.dtype, torch.float32) if self.is_floating_point() else self.dtype
    left, right = (t.resolve_conj().resolve_neg().to(inner).numpy() for t in (self, mat2))
    result = np.zeros((left.shape[0], right.shape[1]), left.dtype)

    def block(start):
        columns = slice(start, start + BLOCK)
        for k in range(left.shape[1]):
            result[:, columns] += left[:, k : k + 1] * right[k : k + 1, columns]

    with np.errstate(all="ignore"), ThreadPoolExecutor(2) as pool:
        list(pool.map(block, range(0, right.shape[1], BLOCK)))
    return torch.from_numpy(result).to(self.dtype)
