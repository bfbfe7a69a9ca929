"""A run that its budget has stopped goes on with a larger one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from opforge.errors import OpforgeError
from opforge.generate.journal import Journal
from opforge.kernels.proofs import proof_of
from opforge.runs.workshop import Workshop


def raised(folder: Path, generation: Mapping[str, Any], bounds: Mapping[str, float]) -> dict[str, Any]:
    """Return how kernels are asked for in the run of a folder, with other bounds on what it may spend; each must be more than what it has spent."""
    journal = Journal(folder)
    summary, spent = journal.summary(), journal.spent()
    option = {name: f"--{name.replace('_', '-')} {bound:g}" for name, bound in bounds.items()}
    if summary is not None and not summary["stopped"]:
        raise OpforgeError(
            f"{' and '.join(option.values())}: the run in {str(folder)!r} was not stopped by its budget, and nothing is left to be asked; go on without"
        )
    used = {"max_cost": (spent.cost, f"{spent.cost:.4f} USD"), "max_tokens": (spent.tokens, f"{spent.tokens} tokens")}
    for name, bound in bounds.items():
        least, words = used[name]
        if not (bound > least and math.isfinite(bound)):
            raise OpforgeError(
                f"{option[name]} does not go with the run in {str(folder)!r}: it must be more than the {words} that were spent there"
            )
    return {**generation, **bounds}


def reopen(journal: Journal, summary: Mapping[str, Any], workshop: Workshop) -> None:
    """Take back what the end of a run has made of attempts that were not the last; the attempts stay.

    It may be broken off at any point, and is then done again: the summary goes last.
    """
    workshop.reopen()
    for name, kept in summary["operators"].items():
        if kept["file"] is not None and journal.winner(name) is None:
            _withdraw(Path(kept["file"]), journal, name)
    journal.drop_summary()


def _withdraw(file: Path, journal: Journal, name: str) -> None:
    """Remove a kernel that was put into a directory, unless somebody has changed it since."""
    if file.is_file() and file.read_text(encoding="utf-8", errors="replace") in journal.sources(name):
        file.unlink()
        proof_of(file).unlink(missing_ok=True)
