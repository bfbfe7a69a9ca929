"""Which elements of ATen's result hold whatever the memory held before: nothing that a kernel could be asked for."""

from __future__ import annotations

import torch

from opforge.judge.reference import Answer, Call, plain

_STIRRED_BYTES = 64 << 20
_STIRRED_BLOCKS = 64
_TRIES = 4


def undefined_elements(call: Call, aten: torch.Tensor, index: int, *, may_be_nan: bool) -> torch.Tensor | None:
    """Return where one of ATen's results, by its number, is uninitialised: told by what it is when new memory holds NaN or the largest integer.

    Where it was such a value the first time already, that is its answer, or what an earlier call of this kind has left in the
    memory: ATen is asked again, where memory holds zeros as far as that can be had. With ``may_be_nan`` every NaN is a leftover.
    """
    poisoned = _same_result(call.run_poisoned(), aten, index)
    if poisoned is None or aten.dtype == torch.bool:
        return None
    left = _poison(poisoned)
    if may_be_nan:
        return left
    unclear = left & _poison(aten)
    held: list[torch.Tensor] = []  # so that each further call finds other memory
    while unclear.any() and len(held) < _TRIES:
        again = _same_result(_run_over_zeros(call, aten), aten, index)
        if again is None:
            break
        unclear &= _poison(again)
        held.append(again)
    return left & ~unclear


def _same_result(answer: Answer, aten: torch.Tensor, index: int) -> torch.Tensor | None:
    if answer.tensors is None or answer.tensors[index].shape != aten.shape:
        return None
    return plain(answer.tensors[index]).to(aten.device)


def _poison(tensor: torch.Tensor) -> torch.Tensor:
    """Return where a tensor holds what memory is poisoned with."""
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64).isnan()
    return tensor == torch.iinfo(tensor.dtype).max


def _run_over_zeros(call: Call, aten: torch.Tensor) -> Answer:
    """Call ATen where free memory that fits its result holds zeros."""
    nbytes = max(1, aten.untyped_storage().nbytes())
    count = max(2, min(_STIRRED_BLOCKS, _STIRRED_BYTES // nbytes))
    zeros = [torch.zeros(nbytes, dtype=torch.uint8, device=call.device) for _ in range(count)]
    del zeros
    return call.run()
