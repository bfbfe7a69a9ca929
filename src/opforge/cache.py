"""Cache folder for files that can be rebuilt: ``$OPFORGE_CACHE`` or the user's cache folder."""

from __future__ import annotations

import functools
import json
import os
import secrets
from importlib.metadata import version
from pathlib import Path
from typing import Any


def root() -> Path:
    """Return the cache folder; it may not exist yet."""
    if own := os.environ.get("OPFORGE_CACHE"):
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "opforge"


@functools.cache
def torch_version() -> str:
    """Return the version of the installed torch without importing it."""
    return version("torch")


def write_atomically(path: Path, text: str) -> None:
    """Write a whole file or nothing; other processes never see a partial file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    draft.touch(exist_ok=False)  # permissions follow the umask; a temporary file would be private to its owner
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def read_json(path: Path) -> Any | None:
    """Return the contents of a cached JSON file; None if missing or broken (then rebuilt)."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return None
