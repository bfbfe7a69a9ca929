"""All operators of the installed torch, found by the names that people type. Needs no ``import torch``."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cache

from opforge import cache as cache_folder
from opforge.errors import UnknownNameError
from opforge.ops.operator import Form, Operator

_FORMAT = 1


class OpTable:
    """An index over operators: by overload name, by packet, by family."""

    def __init__(self, operators: Sequence[Operator]) -> None:
        self._by_name = {op.name: op for op in operators}
        self._by_base: dict[str, list[Operator]] = defaultdict(list)
        self._by_family: dict[str, list[Operator]] = defaultdict(list)
        self._by_packet: dict[str, list[Operator]] = defaultdict(list)
        for op in operators:
            self._by_base[op.base].append(op)
            self._by_family[op.family].append(op)
            self._by_packet[op.packet].append(op)

    def __iter__(self) -> Iterable[Operator]:
        return iter(self._by_name.values())

    def __len__(self) -> int:
        return len(self._by_name)

    def get(self, name: str) -> Operator | None:
        """Return the overload of an exact ``base.overload`` name."""
        return self._by_name.get(name)

    def resolve(self, name: str) -> Operator:
        """Return the one overload that a name means: ``relu``, ``add.Tensor``, ``aten::add.out``, ``torch.ops.aten.mm.default``."""
        short = strip_namespace(name)
        if short in self._by_name:
            return self._by_name[short]
        overloads = self._by_base.get(short)
        if overloads is None:
            raise self._unknown(name)
        for wanted in ("default", "Tensor"):
            if (op := self._by_name.get(f"{short}.{wanted}")) is not None:
                return op
        return next((op for op in overloads if op.form is Form.FUNCTIONAL), overloads[0])

    def select(self, names: Iterable[str]) -> list[Operator]:
        """Return what ``--ops`` means: a bare name is the whole packet with its families, a full name is one overload."""
        chosen: dict[str, Operator] = {}
        for name in names:
            short = strip_namespace(name)
            if short in self._by_name:
                chosen[short] = self._by_name[short]
                continue
            if short not in self._by_base:
                raise self._unknown(name)
            ops = self._by_packet.get(short) or self._by_base[short]
            chosen.update({op.name: op for op in ops})
        return list(chosen.values())

    def family(self, op: Operator) -> list[Operator]:
        """Return the functional, in-place and out forms of one signature."""
        return self._by_family[op.family]

    def served_by(self, folder: str) -> tuple[list[Operator], list[Operator]]:
        """Return what a kernel of a directory serves: its own family, then the overloads with the same parameters."""
        primary = self.resolve(folder)
        own = self.family(primary)
        if strip_namespace(folder) in self._by_name:
            return own, []
        taken = {op.name for op in own}
        parameters = primary.parameters
        others = [op for op in self._by_packet[primary.packet] if op.name not in taken and op.parameters == parameters]
        return own, others

    def _unknown(self, name: str) -> UnknownNameError:
        short = strip_namespace(name)
        known = self._by_base if "." not in short else self._by_name
        return UnknownNameError("operator", name, known, "see `opforge ls ops`")


def strip_namespace(name: str) -> str:
    """Drop ``torch.ops.``, ``aten.`` and ``aten::`` from the front of an operator's name."""
    return name.strip().removeprefix("torch.ops.").removeprefix("aten::").removeprefix("aten.")


@cache
def table() -> OpTable:
    """Return the operators of the installed torch, from the cache when it has them."""
    path = cache_folder.root() / f"ops-{cache_folder.torch_version()}-{_FORMAT}.json"
    rows = cache_folder.read_json(path)
    if rows is None:
        from opforge.ops.torchgen_source import read_operators  # noqa: PLC0415

        operators = read_operators()
        cache_folder.write_atomically(path, json.dumps([op.as_json() for op in operators]))
        return OpTable(operators)
    return OpTable([Operator.from_json(row) for row in rows])
