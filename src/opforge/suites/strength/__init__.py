"""Known weaknesses of a suite: operators whose cases do not detect some mutants of ATen.

They were measured on this machine or are shipped with opforge.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opforge import cache
from opforge.suites.lookup import names_a_file

SHIPPED = Path(__file__).parent
"""Folder of shipped tables, one per suite, made by `opforge strength --suite S --save FILE`."""


@dataclass(frozen=True, slots=True)
class StoredStrength:
    """A stored measurement."""

    weak: dict[str, list[str]]
    """Surviving mutants, by operator."""
    origin: str
    """Torch version, device, dtypes and date of the measurement, as text."""

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> StoredStrength:
        origin = f"torch {row['torch']}, {row['device']}, {' and '.join(row['dtypes'])}, {row['date']}"
        return cls({op: list(names) for op, names in row["weak"].items()}, origin)

    def weak_among(self, ops: Iterable[str]) -> dict[str, list[str]]:
        return {op: self.weak[op] for op in ops if op in self.weak}


def measurement_file(suite: str, device: str, dtypes: Iterable[str]) -> Path:
    """Return the file for the measurement of a whole suite."""
    name = f"{suite}-{cache.torch_version()}-{device.replace(':', '-')}-{','.join(dtypes)}.json"
    return cache.root() / "strength" / name


def stored_strength(suite: str, device: str, dtypes: Iterable[str]) -> StoredStrength | None:
    """Return this machine's measurement of a suite with these dtypes, else the shipped one."""
    if names_a_file(suite):
        return None
    for path in (measurement_file(suite, device, dtypes), SHIPPED / f"{suite}.json"):
        if (row := cache.read_json(path)) is not None:
            return StoredStrength.from_row(row)
    return None
