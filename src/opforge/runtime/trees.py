"""Helpers for nested values: arguments and results of operators, in lists, tuples and dicts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")


def leaves(tree: Any) -> Iterator[Any]:
    """Yield the values in nested lists, tuples and dicts, in order."""
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, list | tuple):
        for value in tree:
            yield from leaves(value)
    else:
        yield tree


def instances(tree: Any, kind: type[T]) -> Iterator[T]:
    """Yield the leaves of one class, for example tensors."""
    return (leaf for leaf in leaves(tree) if isinstance(leaf, kind))


def map_instances(tree: Any, kind: type[T], change: Callable[[T], Any]) -> Any:
    """Return a copy of a tree in which every leaf of one class is changed. Named tuples stay such."""
    if isinstance(tree, kind):
        return change(tree)
    if isinstance(tree, dict):
        return {name: map_instances(value, kind, change) for name, value in tree.items()}
    if isinstance(tree, list | tuple):
        values = [map_instances(value, kind, change) for value in tree]
        return tree._make(values) if hasattr(tree, "_make") else type(tree)(values)
    return tree
