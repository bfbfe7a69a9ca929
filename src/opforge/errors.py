"""The errors that opforge raises on purpose. Each carries the exit code of the command line."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class OpforgeError(Exception):
    """Something that the user can mend; the message says what, which value, what is allowed, what to do."""

    exit_code = 2


class UnknownNameError(OpforgeError):
    """A name that is in none of our lists."""

    def __init__(self, kind: str, name: str, known: Iterable[str], hint: str = "") -> None:
        names = sorted(set(known))
        close = difflib.get_close_matches(name, names, n=3, cutoff=0.6)
        text = f"unknown {kind} {name!r}"
        if close:
            text += f"; did you mean {' or '.join(repr(c) for c in close)}?"
        elif len(names) <= 20:
            text += f"; known: {', '.join(names)}"
        if hint:
            text += f" ({hint})"
        super().__init__(text)
        self.close = close


class CaseSyntaxError(OpforgeError):
    """Text that is not a case."""


class NothingToJudgeError(OpforgeError):
    """The selection is valid and empty."""

    exit_code = 5


class RunDirectoryError(OpforgeError):
    """The folder of a run is in use, holds something else, or does not fit."""


class InternalError(OpforgeError):
    """Our own fault."""

    exit_code = 3
