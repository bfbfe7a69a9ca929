"""Run a program confined: ``python -m opforge.sandbox.confined FOLDER READ… -- PROGRAM WORD…``. So compilers run on sources that nobody has read.

What a source includes would else be shown in the compiler's errors, or end up in the library: keys, say, or other people's files.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from opforge.sandbox import confinement, reach


def words_before(folder: Path, sources: Sequence[Path]) -> list[str]:
    """Return what goes before a command so that it writes to one folder only, and of the user's files reads sources and what lies beside them."""
    reads = sorted({path for source in sources for path in reach.source_reads(str(source))})
    return [sys.executable, "-P", "-m", __name__, str(folder), *reads, "--"]


def main() -> None:
    folder, *words = sys.argv[1:]
    end = words.index("--")
    where = os.getcwd()
    confinement.enter(confinement.Room(folder, tuple(words[:end])), None, None)
    os.chdir(where)
    command = words[end + 1 :]
    os.execvp(command[0], command)  # noqa: S606  # confined, and no shell


if __name__ == "__main__":
    main()
