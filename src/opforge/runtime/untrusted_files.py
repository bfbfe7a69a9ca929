"""Read untrusted files. Needs no torch.

Only regular files of bounded size are read. Links are not followed.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

MAX_FILE_BYTES = 16 << 20
"""Limit for one file."""
MAX_FILES = 1000
"""Limit for one folder and its subfolders, and for the files that one kernel names."""
_MAX_FOLDER_DEPTH = 16


def read(path: Path, max_bytes: int = MAX_FILE_BYTES) -> bytes:
    """Return a file's bytes.

    Raises OSError for a link, for anything but a regular file, and for more than ``max_bytes``.
    """
    status = os.lstat(path)
    if stat.S_ISLNK(status.st_mode):
        raise OSError(errno.ELOOP, "it is a link, and links are not followed: copy the file", str(path))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    # O_NONBLOCK: if a FIFO has replaced the file meanwhile, opening it does not wait for a writer.
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(handle, "rb") as opened:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        if status.st_size > max_bytes:
            raise OSError(errno.EFBIG, f"it holds {status.st_size} bytes; {max_bytes} are allowed", str(path))
        data = opened.read(max_bytes + 1)
    if len(data) > max_bytes:  # it is growing
        raise OSError(errno.EFBIG, f"it holds more than {max_bytes} bytes", str(path))
    return data


def read_text(path: Path, max_bytes: int = MAX_FILE_BYTES) -> str:
    """Return a file's text, with bytes that are not UTF-8 replaced."""
    return read(path, max_bytes).decode("utf-8", errors="replace")


def is_regular(path: Path) -> bool:
    """Whether the path is a regular file, and not a link to one."""
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except (OSError, ValueError):
        return False


def is_folder(path: Path) -> bool:
    """Whether the path is a folder, and not a link to one."""
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except (OSError, ValueError):
        return False


def files_below(folder: Path, max_files: int = MAX_FILES) -> Iterator[Path]:
    """Yield the regular files in a folder and its subfolders; raise OSError for too many.

    Hidden files and compiled Python are left out.
    """
    count = 0
    pending = [(folder, 0)]
    while pending:
        current, depth = pending.pop()
        with os.scandir(current) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                count += 1
                if count > max_files or depth > _MAX_FOLDER_DEPTH:
                    raise OSError(
                        errno.EFBIG,
                        f"it holds more than {max_files} files, or deeper folders than are read",
                        str(folder),
                    )
                if entry.name.startswith((".", "__pycache__")) or entry.name.endswith(".pyc"):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    pending.append((Path(entry.path), depth + 1))
                elif entry.is_file(follow_symlinks=False):
                    yield Path(entry.path)
