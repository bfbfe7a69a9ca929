"""Artefacts that are costly to make (packages, wheels, programs, libraries, environments), made once for all workers and runs."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path

from filelock import FileLock

from tests.conftest import ROOT

STORE = Path(os.environ.get("OPFORGE_TEST_STORE", ROOT / ".cache" / "tests"))
_MADE = ".made"
_UNUSED_FOR_S = 24 * 3600.0


def stored(name: str, inputs: Iterable[Path | str], make: Callable[[Path], None]) -> Path:
    """Return the folder of an artefact; ``make`` fills it if there is none for these inputs: files, folders or texts.

    It stays where it was made, as environments and editable installations know their own paths. Tests must not change it.
    """
    digest = _digest(name, inputs)
    place = STORE / f"{name}-{digest}"
    STORE.mkdir(parents=True, exist_ok=True)
    with FileLock(STORE / f".{name}-{digest}.lock"):
        if not (place / _MADE).exists():
            shutil.rmtree(place, ignore_errors=True)  # what a worker that was killed has left
            place.mkdir()
            make(place)
        (place / _MADE).touch()
    _forget_unused(name)
    return place


def _digest(name: str, inputs: Iterable[Path | str]) -> str:
    whole = hashlib.sha256(f"{name} {sys.version} {sys.prefix} {version('torch')} {ROOT}".encode())
    for part in inputs:
        for path in _files(part) if isinstance(part, Path) else ():
            whole.update(f"\0{path.name}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
        if isinstance(part, str):
            whole.update(f"\0{part}".encode())
    return whole.hexdigest()[:16]


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    return sorted(p for p in path.rglob("*") if p.is_file() and "__pycache__" not in p.parts)


def _forget_unused(name: str) -> None:
    """Remove artefacts of this name that nobody has used for a day."""
    for made in STORE.glob(f"{name}-*/{_MADE}"):
        if time.time() - made.stat().st_mtime > _UNUSED_FOR_S:
            shutil.rmtree(made.parent, ignore_errors=True)
