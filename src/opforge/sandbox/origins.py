"""Which of a call's inputs a tensor is, or shares memory with; asked of hundreds of tensors, as operators on lists have them."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Origins:
    """The inputs of a call, as they lie now."""

    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        self._inputs = inputs  # kept: while they live nothing else has their ids
        self._numbers: dict[int, list[int]] = {}
        self._memory: dict[int, list[int]] = {}
        for number, tensor in enumerate(inputs):
            self._numbers.setdefault(id(tensor), []).append(number)
            storage = tensor.untyped_storage()
            if storage.nbytes():
                self._memory.setdefault(storage.data_ptr(), []).append(number)

    def same(self, tensor: torch.Tensor) -> list[int]:
        """Return the numbers of the inputs that a tensor is itself."""
        return self._numbers.get(id(tensor), [])

    def sharing(self, tensor: torch.Tensor) -> list[int]:
        """Return the numbers of the inputs with which a tensor shares memory."""
        return self._memory.get(tensor.untyped_storage().data_ptr(), [])
