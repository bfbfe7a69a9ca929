"""sort.stable by merging in plain Python, line by line; numbers are compared as Python's own, NaN as largest."""

import torch

OP = "sort.stable"


def _merge(left, right):
    merged, i, j = [], 0, 0
    while i < len(left) and j < len(right):
        if right[j][0] < left[i][0]:
            merged.append(right[j])
            j += 1
        else:
            merged.append(left[i])
            i += 1
    return merged + left[i:] + right[j:]


def _sort(line):
    if len(line) < 2:
        return line
    middle = len(line) // 2
    return _merge(_sort(line[:middle]), _sort(line[middle:]))


def _key(value, descending):
    is_nan = value != value
    value = 0 if is_nan else value
    return (not is_nan, -value) if descending else (is_nan, value)


def sort__stable_kernel_impl(self, *, stable, dim=-1, descending=False):
    if self.dim() == 0:
        return self.clone(), torch.zeros((), dtype=torch.int64)
    lines = self.movedim(dim, -1).contiguous()
    flat = lines.reshape(-1, lines.shape[-1]).tolist() if lines.numel() else []
    places = [[i for _, i in _sort([(_key(v, descending), i) for i, v in enumerate(line)])] for line in flat]
    order = torch.tensor(places, dtype=torch.int64).reshape(lines.shape)
    values = torch.gather(lines, -1, order)
    return values.movedim(-1, dim).contiguous(), order.movedim(-1, dim).contiguous()
