"""sort.stable by counting, byte after byte, over integer keys that are ordered as the numbers are."""

import numpy as np
import torch

OP = "sort.stable"
WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _keys(x):
    """Return keys as unsigned bytes, the most significant last."""
    size = x.element_size()
    if x.dtype in (torch.bool, torch.uint8):
        return x.to(torch.uint8).numpy()[..., None]
    word = x.contiguous().view(WORDS[size]).numpy()
    least = word.dtype.type(-(1 << (8 * size - 1)))
    if x.is_floating_point():
        nan = torch.isnan(x).numpy()
        word = np.where(word == least, 0, word).astype(word.dtype)  # both zeros are one
        word = np.where(word < 0, word ^ word.dtype.type((1 << (8 * size - 1)) - 1), word)
        word = np.where(nan, word.dtype.type((1 << (8 * size - 1)) - 1), word)
    return np.ascontiguousarray(word ^ least).view(np.uint8).reshape(*word.shape, size)


def _order(keys):
    order = np.arange(len(keys))
    for digit in range(keys.shape[1]):
        byte = keys[order, digit]
        starts = np.concatenate([[0], np.bincount(byte, minlength=256).cumsum()[:-1]])
        target = np.empty_like(order)
        for place, value in zip(order, byte, strict=True):
            target[starts[value]] = place
            starts[value] += 1
        order = target
    return order


def sort__stable_kernel_impl(self, *, stable, dim=-1, descending=False):
    if self.dim() == 0:
        return self.clone(), torch.zeros((), dtype=torch.int64)
    lines = self.movedim(dim, -1).contiguous()
    keys = _keys(lines.reshape(-1, lines.shape[-1]) if lines.numel() else lines.reshape(0, 1))
    places = np.zeros(keys.shape[:2], np.int64)
    for row, line in enumerate(keys):
        places[row] = _order(255 - line if descending else line)
    order = torch.from_numpy(places).reshape(lines.shape)
    return torch.gather(lines, -1, order).movedim(-1, dim).contiguous(), order.movedim(-1, dim).contiguous()
