"""Look up operators of the installed torch by the names users type. Needs no ``import torch``."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any

from opforge import cache as cache_folder
from opforge.errors import UnknownNameError
from opforge.ops.operator import Operator, SchemaKind, packet_of
from opforge.runtime.operator_names import UnknownOperatorError, select_operators, strip_namespace

_FORMAT = 3


class OpTable:
    """Index of operators by overload, packet and family; creates operators on demand."""

    def __init__(self, rows: Sequence[dict[str, Any]]) -> None:
        self._rows: dict[str, dict[str, Any]] = {f"{row['base']}.{row['overload']}": row for row in rows}
        self._made: dict[str, Operator] = {}
        self._by_base: dict[str, list[str]] = defaultdict(list)
        self._by_family: dict[str, list[str]] = defaultdict(list)
        self._by_packet: dict[str, list[str]] = defaultdict(list)
        for name, row in self._rows.items():
            self._by_base[row["base"]].append(name)
            self._by_family[row["family"]].append(name)
            self._by_packet[packet_of(row["base"], row["form"])].append(name)

    def __iter__(self) -> Iterator[Operator]:
        return (self._operator(name) for name in self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def get(self, name: str) -> Operator | None:
        """Return the overload with an exact ``base.overload`` name, or None."""
        return self._operator(name) if name in self._rows else None

    def _operator(self, name: str) -> Operator:
        op = self._made.get(name)
        if op is None:
            op = self._made[name] = Operator.from_json(self._rows[name])
        return op

    def resolve(self, name: str) -> Operator:
        """Resolve a name to one overload.

        Accepts ``relu``, ``add.Tensor``, ``aten::add.out``, ``torch.ops.aten.mm.default``.
        """
        short = strip_namespace(name)
        if short in self._rows:
            return self._operator(short)
        if short not in self._by_base:
            raise self._unknown_name_error(name)
        for overload in ("default", "Tensor"):
            if (op := self.get(f"{short}.{overload}")) is not None:
                return op
        overloads = [self._operator(n) for n in self._by_base[short]]
        return next((op for op in overloads if op.kind is SchemaKind.FUNCTIONAL), overloads[0])

    def select(self, names: Iterable[str]) -> list[Operator]:
        """Resolve ``--ops``: a bare name is a packet with its families, a full name an overload."""
        try:
            return [self._operator(name) for name in select_operators(names, self._rows)]
        except UnknownOperatorError as error:
            raise self._unknown_name_error(error.name) from None

    def family(self, op: Operator) -> list[Operator]:
        """Return the functional, in-place and out forms of one signature."""
        return [self._operator(name) for name in self._by_family[op.family]]

    def packet(self, name: str) -> list[str]:
        """Return the names of a packet's overloads in all forms; empty for an unknown packet."""
        return self._by_packet.get(name) or self._by_base.get(name) or []

    def folder_of(self, op: Operator) -> str:
        """Return the name of the folder searched for an operator's kernel."""
        return op.packet if op.packet in self._by_base else op.base

    def served_by(self, folder: str) -> tuple[list[Operator], list[Operator]]:
        """Return the operators served by the kernel in a folder.

        The first list is its own family. The second is the packet's other overloads; it may decline
        those.
        """
        primary = self.resolve(folder)
        family = self.family(primary)
        if strip_namespace(folder) in self._rows:
            return family, []
        family_names = {op.name for op in family}
        others = (self._operator(name) for name in self._by_packet[primary.packet] if name not in family_names)
        return family, [op for op in others if op.kind is not SchemaKind.MUTABLE]

    def _unknown_name_error(self, name: str) -> UnknownNameError:
        short = strip_namespace(name)
        known_names: Iterable[str] = self._rows if "." in short else self._by_base
        return UnknownNameError("operator", name, known_names, "see `opforge ls ops`")


@cache
def table() -> OpTable:
    """Return the operators of the installed torch, from the cache if present."""
    path = cache_folder.root() / f"ops-{cache_folder.torch_version()}-{_FORMAT}.json"
    rows = cache_folder.read_json(path)
    if rows is None:
        from opforge.ops.torchgen_source import read_operators

        rows = [op.as_json() for op in read_operators()]
        cache_folder.write_atomically(path, json.dumps(rows))
    return OpTable(rows)
