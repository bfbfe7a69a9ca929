"""flip by bytes in numpy, with negative steps and a copy; the bytes of an element stay together."""

import numpy as np
import torch

OP = "flip.default"


def flip_kernel_impl(self, dims):
    turned = {d % max(self.dim(), 1) for d in dims}
    if any(not -max(self.dim(), 1) <= d < max(self.dim(), 1) for d in dims):
        raise IndexError(f"a dimension of {list(dims)} is out of range for {self.dim()} dimensions")
    if len(turned) < len(dims):
        raise RuntimeError(f"a dimension appears twice in {list(dims)}")
    source = self.resolve_conj().resolve_neg().contiguous()
    if not self.numel() or not self.dim():
        return source.clone()
    raw = source.reshape(*self.shape, 1).view(torch.uint8).numpy()
    steps = tuple(slice(None, None, -1 if d in turned else None) for d in range(self.dim()))
    copied = np.ascontiguousarray(raw[(*steps, slice(None))])
    return torch.from_numpy(copied).view(self.dtype).reshape(self.shape)
