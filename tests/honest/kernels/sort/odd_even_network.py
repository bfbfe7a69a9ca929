"""sort.stable by odd-even transposition, a network of neighbours; equal neighbours stay, so that it is stable."""

import torch

OP = "sort.stable"


def _before(left, right, descending):
    """Whether the right one of two neighbours must come first: NaN counts as largest."""
    if left.dtype == torch.bool:
        left, right = left.to(torch.uint8), right.to(torch.uint8)
    if descending:
        less = left < right
        return less | ((right != right) & (left == left)) if left.is_floating_point() else less
    more = left > right
    return more | ((left != left) & (right == right)) if left.is_floating_point() else more


def sort__stable_kernel_impl(self, *, stable, dim=-1, descending=False):
    if self.dim() == 0:
        return self.clone(), torch.zeros((), dtype=torch.int64)
    values = self.movedim(dim, -1).clone(memory_format=torch.contiguous_format)
    count = values.shape[-1]
    places = torch.arange(count).expand(values.shape).clone()
    for turn in range(count):
        start = turn % 2
        pairs = (count - start) // 2
        if not pairs or not values.numel():
            continue
        left, right = slice(start, start + 2 * pairs, 2), slice(start + 1, start + 2 * pairs, 2)
        swap = _before(values[..., left], values[..., right], descending)
        for row in (values, places):
            a, b = row[..., left].clone(), row[..., right].clone()
            row[..., left], row[..., right] = torch.where(swap, b, a), torch.where(swap, a, b)
    return values.movedim(-1, dim).contiguous(), places.movedim(-1, dim).contiguous()
