"""Operators by the names that users type. Needs no ``import torch``."""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Collection, Iterable


class UnknownOperatorError(ValueError):
    """A name that no operator has."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        close = difflib.get_close_matches(strip_namespace(name), sorted(known), n=3)
        super().__init__(
            f"unknown operator {name!r}; "
            + (f"did you mean {' or '.join(map(repr, close))}?" if close else "write relu or add.Tensor")
        )
        self.name = name


def strip_namespace(name: str) -> str:
    """Remove the prefixes ``torch.ops.``, ``aten.`` and ``aten::`` from an operator's name."""
    return name.strip().removeprefix("torch.ops.").removeprefix("aten::").removeprefix("aten.")


def select_operators(names: Iterable[str], known: Collection[str]) -> list[str]:
    """Return the overloads that names mean, among those known.

    A full name is one overload. A bare name is a packet: all overloads, with in-place and out forms.
    """
    by_base: dict[str, list[str]] = defaultdict(list)
    by_packet: dict[str, list[str]] = defaultdict(list)
    for full_name in known:
        base = full_name.partition(".")[0]
        by_base[base].append(full_name)
        by_packet[base if base.endswith("__") else base.removesuffix("_")].append(full_name)
    chosen: dict[str, None] = {}
    for name in names:
        short = strip_namespace(name)
        if short in known:
            chosen[short] = None
        elif short in by_base:
            chosen.update(dict.fromkeys(by_packet.get(short) or by_base[short]))
        else:
            raise UnknownOperatorError(name, known if "." in short else by_base)
    return list(chosen)
