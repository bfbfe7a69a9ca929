"""Where opforge keeps what it can make again: ``$OPFORGE_CACHE``, else the user's cache folder."""

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
    """Write a whole file or nothing: other processes never see half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    draft.touch(exist_ok=False)  # for whom the umask lets read it; a temporary file would be for its owner alone
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def read_json(path: Path) -> Any | None:
    """Return what a cached JSON file holds, or None when it is missing or broken (it is then made again)."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return None
