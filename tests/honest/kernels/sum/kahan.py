"""sum of all elements with Neumaier's compensation, in lanes; half types in float32, integers in int64."""

import torch

OP = "sum.default"
LANES = 16


def _compensated(terms):
    total, lost = torch.zeros_like(terms[0]), torch.zeros_like(terms[0])
    for term in terms:
        new = total + term
        larger = total.abs() >= term.abs()
        lost = lost + torch.where(larger, (total - new) + term, (term - new) + total)
        total = new
    return torch.where(torch.isfinite(total), total + lost, total)  # beside an infinity the compensation is NaN


def _lanes(flat):
    padded = torch.cat([flat, flat.new_zeros(-len(flat) % LANES)])
    return _compensated(_compensated(padded.reshape(-1, LANES)).unbind(0)) if len(flat) else flat.new_zeros(())


def sum_kernel_impl(self, *, dtype=None):
    result = dtype or (self.dtype if self.is_floating_point() or self.is_complex() else torch.int64)
    if result.is_complex:
        pair = torch.view_as_real(self.to(result).resolve_conj())
        return torch.complex(_lanes(pair[..., 0].reshape(-1)), _lanes(pair[..., 1].reshape(-1)))
    if result.is_floating_point:
        return _lanes(self.to(torch.promote_types(result, torch.float32)).reshape(-1)).to(result)
    flat = self.to(torch.int64 if result == torch.bool else result).reshape(-1)
    padded = torch.cat([flat, flat.new_zeros(-len(flat) % LANES)]).reshape(-1, LANES)
    total = flat.new_zeros(LANES)
    for row in padded:
        total = total + row
    while len(total) > 1:
        total = total[: len(total) // 2] + total[len(total) // 2 :]
    return total[0].clone().to(result)
