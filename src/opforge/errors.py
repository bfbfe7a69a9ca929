"""Errors that opforge raises on purpose. Each carries the exit code of the command line."""

from __future__ import annotations

import difflib
import errno
from collections.abc import Iterable


class OpforgeError(Exception):
    """An error that the user can fix.

    The message names the problem, the value, the allowed values and the remedy.
    """

    exit_code = 2


class DiskFullError(OpforgeError):
    """No space is left for a file; what is written already is kept."""

    def __init__(
        self, error: OSError, kept: str = "", remedy: str = "free some space and run the command again"
    ) -> None:
        place = f" at {error.filename}" if error.filename else ""
        super().__init__(f"the disk is full{place} ({error.strerror}); {kept}{remedy}")


def is_disk_full(error: OSError) -> bool:
    """Return whether an error means that no space is left, or none for this user."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


MIN_TIMEOUT_S, MAX_TIMEOUT_S = 0.1, 86_400.0


def check_range(option: str, value: float, minimum: float, maximum: float) -> None:
    """Raise if an option's value is outside of its range; NaN is outside of any."""
    if not minimum <= value <= maximum:
        raise OpforgeError(f"{option} {value} is out of range; it must be {minimum:,.12g} to {maximum:,.12g}")


class UnknownNameError(OpforgeError):
    """A name that is not registered or listed anywhere."""

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
    """Text that does not parse as a case."""


class NothingToJudgeError(OpforgeError):
    """The selection is valid but empty."""

    exit_code = 5


class RunDirectoryError(OpforgeError):
    """The run folder is in use, holds something else, or does not match the run."""


class InternalError(OpforgeError):
    """A bug in opforge."""

    exit_code = 3
