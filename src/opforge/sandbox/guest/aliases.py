"""Which inputs of a call a tensor is, or shares memory with.

Fast enough for the hundreds of tensors that operators on lists have.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


class InputAliases:
    """The inputs of a call, by identity and by storage."""

    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        self._inputs = inputs  # kept alive, so that nothing else gets their ids
        self._numbers: dict[int, list[int]] = {}
        self._memory: dict[int, list[int]] = {}
        for number, tensor in enumerate(inputs):
            self._numbers.setdefault(id(tensor), []).append(number)
            storage = tensor.untyped_storage()
            if storage.nbytes():
                self._memory.setdefault(storage.data_ptr(), []).append(number)

    def identical(self, tensor: torch.Tensor) -> list[int]:
        """Return the indices of the inputs that are this very tensor."""
        return self._numbers.get(id(tensor), [])

    def sharing_memory(self, tensor: torch.Tensor) -> list[int]:
        """Return the indices of the inputs that share memory with a tensor."""
        return self._memory.get(tensor.untyped_storage().data_ptr(), [])
