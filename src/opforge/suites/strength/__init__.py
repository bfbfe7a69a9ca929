"""What is known of a suite's strength: operators whose cases let mutants of ATen through, measured here or shipped with opforge."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opforge import cache
from opforge.suites.finding import is_file

SHIPPED = Path(__file__).parent
"""Tables that come with the package, one a suite; `opforge strength --suite S --save FILE` makes them."""


@dataclass(frozen=True, slots=True)
class Known:
    """A measurement that was kept."""

    weak: dict[str, list[str]]
    """Mutants that survive, by operator."""
    origin: str
    """When and where it was measured, in words."""

    @classmethod
    def of(cls, row: dict[str, Any]) -> Known:
        origin = f"torch {row['torch']}, {row['device']}, {' and '.join(row['dtypes'])}, {row['date']}"
        return cls({op: list(names) for op, names in row["weak"].items()}, origin)

    def among(self, ops: Iterable[str]) -> dict[str, list[str]]:
        return {op: self.weak[op] for op in ops if op in self.weak}


def kept_at(suite: str, device: str, dtypes: Iterable[str]) -> Path:
    """Return where the measurement of a whole suite is kept."""
    name = f"{suite}-{cache.torch_version()}-{device.replace(':', '-')}-{','.join(dtypes)}.json"
    return cache.root() / "strength" / name


def known(suite: str, device: str, dtypes: Iterable[str]) -> Known | None:
    """Return what is known of a suite: the measurement of these very dtypes on this machine, else the shipped one."""
    if is_file(suite):
        return None
    for path in (kept_at(suite, device, dtypes), SHIPPED / f"{suite}.json"):
        if (row := cache.read_json(path)) is not None:
            return Known.of(row)
    return None
