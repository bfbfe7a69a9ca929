"""Folders of workers: created under one folder of the run, and removed with all their contents."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from typing import Any

PREFIX = "opforge-workers-"
"""Prefix of what a killed run leaves in the temporary folder; the server's process id follows."""


def make_server_folder() -> str:
    """Create the folder that contains those of all workers of a server."""
    folder = tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-")
    os.chmod(folder, 0o711)  # noqa: S103  # workers of another user pass through, but cannot list it
    return os.path.realpath(folder)


def make_client_folder(parent: str) -> str:
    """Create a folder for one client."""
    folder = tempfile.mkdtemp(dir=parent)
    os.chmod(folder, 0o711)  # noqa: S103
    return folder


def remove(folder: str) -> None:
    """Remove a worker's folder; its contents may be deep, unreadable or hostile."""
    with contextlib.suppress(RecursionError, OSError):
        shutil.rmtree(folder, onerror=_open_and_retry)
    if os.path.lexists(folder):
        subprocess.run(["rm", "-rf", "--", folder], check=False, stderr=subprocess.DEVNULL)


def _open_and_retry(function: Callable[..., Any], path: str, _error: Any) -> None:
    with contextlib.suppress(OSError):
        os.chmod(os.path.dirname(path), 0o700)
        if os.path.isdir(path) and not os.path.islink(path):
            os.chmod(path, 0o700)
            shutil.rmtree(path, ignore_errors=True)
        else:
            function(path)


def measure(folder: str, max_entries: int) -> tuple[int, int]:
    """Return the bytes and entries in a folder; stops after more than ``max_entries``."""
    held = entries = 0
    waiting = [folder]
    while waiting and entries <= max_entries:
        with contextlib.suppress(OSError), os.scandir(waiting.pop()) as listing:
            for entry in listing:
                entries += 1
                with contextlib.suppress(OSError):
                    held += entry.stat(follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
    return held, entries
