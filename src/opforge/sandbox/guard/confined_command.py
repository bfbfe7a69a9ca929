"""Run a program confined; used for compilers on unreviewed sources.

``python -m opforge.sandbox.guard.confined_command FOLDER READ… -- PROGRAM WORD…``. Otherwise a source could
include keys or other people's files, and show them in the compiler's errors or in the library.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from opforge.sandbox.guard import confinement, readable_paths


def confined_command(folder: Path, sources: Sequence[Path]) -> list[str]:
    """Return the prefix of a command that confines it.

    The command writes to one folder only. Of the user's files it reads the sources and their
    neighbours.
    """
    reads = sorted({path for source in sources for path in readable_paths.compiler_readable_paths(str(source))})
    return [sys.executable, "-P", "-m", __name__, str(folder), *reads, "--"]


def main() -> None:
    folder, *arguments = sys.argv[1:]
    end = arguments.index("--")
    where = os.getcwd()
    confinement.enter(confinement.Confinement(folder, tuple(arguments[:end])), None, None)
    os.chdir(where)
    command = arguments[end + 1 :]
    os.execvp(command[0], command)  # noqa: S606  # confined, and no shell


if __name__ == "__main__":
    main()
