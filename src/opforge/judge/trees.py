"""Calls as JSON trees with a row for each tensor, and the layout of the tensors in an arena."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from opforge.cases.materialise import Bytes
from opforge.sandbox.worker import ALIGN

INPUTS_AT = ALIGN
"""The first bytes of an arena are the worker's counter."""


def aligned(nbytes: int) -> int:
    """Return how many bytes a tensor takes up in an arena, with alignment."""
    return nbytes + (-nbytes % ALIGN)


def storage_bytes(tensor: torch.Tensor) -> Bytes:
    """Return the whole storage of a tensor on the CPU, without a copy."""
    nbytes = tensor.untyped_storage().nbytes()
    contents: Bytes = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage(), 0, (nbytes,), (1,)).numpy()
    return contents


def with_rows(tree: Any, rows: Iterator[list[Any]]) -> Any:
    """Return a copy of a JSON tree with other rows for its tensors, in the order of ``decode``."""
    if isinstance(tree, list):
        return [with_rows(value, rows) for value in tree]
    if not isinstance(tree, dict):
        return tree
    if "T" in tree and isinstance(tree["T"], list):
        return {"T": next(rows)}
    return {name: with_rows(value, rows) for name, value in tree.items()}


def rows_of(tree: Any) -> Iterable[list[Any]]:
    """Yield the rows of the tensors in a JSON tree, in the order of ``decode``."""
    if isinstance(tree, list):
        for value in tree:
            yield from rows_of(value)
    elif isinstance(tree, dict):
        if "T" in tree and isinstance(tree["T"], list):
            yield tree["T"]
        else:
            for value in tree.values():
                yield from rows_of(value)
