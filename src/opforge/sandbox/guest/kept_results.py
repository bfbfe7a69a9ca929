"""Keep results, as programs do: no later call may write to their memory or reuse it."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from time import monotonic
from typing import Any

import torch

from opforge.cases.tensors import flat_bytes, same_on_host
from opforge.runtime.trees import instances
from opforge.sandbox.guest.aliases import InputAliases

_MAX_KEPT_BYTES = 32 << 20
"""Memory of results kept at once; further results are dropped."""
_MAX_KEPT_CALLS = 512
"""Most calls of one case while keeping all results."""
_KEEPING_LIMIT_S = 0.2
"""Time limit for those calls."""


class KeptResults:
    """The results of some calls, kept alive; views of inputs are left out."""

    def __init__(self) -> None:
        self._kept: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        """Call number, result, and a copy of its bytes made when the call returned."""
        self._spans: list[tuple[int, int]] = []
        """Sorted address ranges of the results."""
        self._bytes = 0

    @property
    def is_full(self) -> bool:
        return self._bytes >= _MAX_KEPT_BYTES

    def add(self, index: int, result: Any, aliases: InputAliases) -> bool:
        """Keep the results of a call; return whether one shares memory with an earlier result."""
        fresh = [
            t
            for t in instances(result, torch.Tensor)
            if t.layout == torch.strided and not t.is_meta and t.nbytes and not aliases.sharing_memory(t)
        ]
        spans = [_span(t) for t in fresh]
        shared = any(map(self._overlaps, spans))
        for tensor, span in zip(fresh, spans, strict=True):
            if self._bytes + tensor.nbytes <= _MAX_KEPT_BYTES:
                self._kept.append((index, tensor, flat_bytes(tensor).clone()))
                self._bytes += tensor.nbytes
                insort(self._spans, span)
        return shared

    def _overlaps(self, span: tuple[int, int]) -> bool:
        index = bisect_left(self._spans, span)
        return any(begin < span[1] and span[0] < end for begin, end in self._spans[max(0, index - 1) : index + 1])

    def changed_calls(self) -> Iterator[int]:
        """Yield the numbers of the calls whose results have changed since."""
        for index, tensor, then in self._kept:
            if not same_on_host(flat_bytes(tensor), then):
                yield index


def call_and_keep(function: Callable[[], Any], inputs: list[torch.Tensor]) -> tuple[Any, bool]:
    """Call a function many times and keep all results.

    Returns the first result, and whether two results share memory.
    """
    kept, input_aliases, end = KeptResults(), InputAliases(inputs), monotonic() + _KEEPING_LIMIT_S
    first = function()
    shared = kept.add(0, first, input_aliases)
    for number in range(1, _MAX_KEPT_CALLS):
        if shared or kept.is_full or monotonic() > end:
            break
        shared = kept.add(number, function(), input_aliases)
    return first, shared


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the address range of a tensor's elements."""
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.data_ptr()
    return begin, begin + (last + 1) * tensor.element_size()
