"""Create a folder with given files, all or nothing. Needs no torch."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

from opforge.errors import OpforgeError


def write_folder(folder: Path, texts: Mapping[str, str]) -> tuple[Path, ...]:
    """Create a folder with these files, and return their relative paths. Overwrites nothing."""
    if folder.is_symlink() or (folder.exists() and (not folder.is_dir() or any(folder.iterdir()))):
        raise OpforgeError(f"{str(folder)!r} is there already and not an empty folder; choose another")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as workshop:
            draft = Path(workshop) / "made"
            for name, text in texts.items():
                (draft / name).parent.mkdir(parents=True, exist_ok=True)
                (draft / name).write_text(text)
            draft.rename(folder)  # replaces at most an empty folder
    except OSError as error:
        raise OpforgeError(f"folder {str(folder)!r} cannot be made: {error.strerror}") from None
    return tuple(sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file()))
