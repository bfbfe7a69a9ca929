"""Find elements of ATen's result that are uninitialised memory: no kernel can match them."""

from __future__ import annotations

import torch

from opforge.cases.tensors import to_float64
from opforge.judge.reference.aten import CallOutcome, ReferenceCall, resolved

_MAX_ZEROED_BYTES = 64 << 20
_MAX_ZEROED_BLOCKS = 64
_MAX_RERUNS = 4


def uninitialised_elements(
    call: ReferenceCall, aten: torch.Tensor, index: int, *, may_be_nan: bool
) -> torch.Tensor | None:
    """Return where ATen's result with this index is uninitialised; None if unknown.

    ATen runs again with new memory filled with NaN or the largest integer. Elements with that value
    are uninitialised. If they had it the first time too, it is their true value, or was left by
    an earlier call. ATen then runs over zeros, as far as possible, to decide. With
    ``may_be_nan`` every NaN is uninitialised.
    """
    poisoned = _same_result(call.run_poisoned(), aten, index)
    if poisoned is None or aten.dtype == torch.bool:
        return None
    undefined = _is_poison(poisoned)
    if may_be_nan:
        return undefined
    unclear = undefined & _is_poison(aten)
    results: list[torch.Tensor] = []  # kept alive, so that each further call gets other memory
    while unclear.any() and len(results) < _MAX_RERUNS:
        again = _same_result(_run_over_zeros(call, aten), aten, index)
        if again is None:
            break
        unclear &= _is_poison(again)
        results.append(again)
    return undefined & ~unclear


def _same_result(answer: CallOutcome, aten: torch.Tensor, index: int) -> torch.Tensor | None:
    if answer.tensors is None or answer.tensors[index].shape != aten.shape:
        return None
    return resolved(answer.tensors[index]).to(aten.device)


def _is_poison(tensor: torch.Tensor) -> torch.Tensor:
    """Return where a tensor holds the value that memory is poisoned with."""
    if tensor.is_floating_point() or tensor.is_complex():
        return to_float64(tensor).isnan()
    return tensor == torch.iinfo(tensor.dtype).max


def _run_over_zeros(call: ReferenceCall, aten: torch.Tensor) -> CallOutcome:
    """Call ATen while free memory of its result's size holds zeros."""
    nbytes = max(1, aten.untyped_storage().nbytes())
    count = max(2, min(_MAX_ZEROED_BLOCKS, _MAX_ZEROED_BYTES // nbytes))
    zeros = [torch.zeros(nbytes, dtype=torch.uint8, device=call.device) for _ in range(count)]
    del zeros
    return call.run()
