"""Calls as JSON trees with a row for each tensor, and the layout of the tensors in an arena."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from opforge.cases.tensors import Bytes
from opforge.sandbox.guest.worker import ARENA_ALIGNMENT

INPUTS_OFFSET = ARENA_ALIGNMENT
"""The first bytes of an arena are the worker's counter."""


def aligned_size(nbytes: int) -> int:
    """Return how many bytes a tensor takes up in an arena, with alignment."""
    return nbytes + (-nbytes % ARENA_ALIGNMENT)


def storage_bytes(tensor: torch.Tensor) -> Bytes:
    """Return the whole storage of a tensor on the CPU, without a copy."""
    nbytes = tensor.untyped_storage().nbytes()
    contents: Bytes = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage(), 0, (nbytes,), (1,)).numpy()
    return contents


def replace_tensor_rows(tree: Any, rows: Iterator[list[Any]]) -> Any:
    """Return a copy of a JSON tree with other rows for its tensors, in the order of ``cases.wire.decode``."""
    if isinstance(tree, list):
        return [replace_tensor_rows(value, rows) for value in tree]
    if not isinstance(tree, dict):
        return tree
    if "T" in tree and isinstance(tree["T"], list):
        return {"T": next(rows)}
    return {name: replace_tensor_rows(value, rows) for name, value in tree.items()}


def tensor_rows(tree: Any) -> Iterable[list[Any]]:
    """Yield the rows of the tensors in a JSON tree, in the order of ``cases.wire.decode``."""
    if isinstance(tree, list):
        for value in tree:
            yield from tensor_rows(value)
    elif isinstance(tree, dict):
        if "T" in tree and isinstance(tree["T"], list):
            yield tree["T"]
        else:
            for value in tree.values():
                yield from tensor_rows(value)
