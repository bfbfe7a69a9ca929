"""Where the proof of a kernel is kept."""

from __future__ import annotations

from pathlib import Path

SUFFIX = ".proof.json"


def proof_of(file: Path) -> Path:
    """Return where the proof of a kernel's file is kept: beside it."""
    return file.with_name(file.stem + SUFFIX)
