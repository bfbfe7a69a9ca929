"""Continue a run that its budget stopped, with a larger budget."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from opforge.errors import OpforgeError
from opforge.generate.journal import Journal
from opforge.kernels.proof import proof_path
from opforge.runs.generation import GenerationContext


def with_raised_limits(folder: Path, generation: Mapping[str, Any], limits: Mapping[str, float]) -> dict[str, Any]:
    """Return a run's generation options with new spending limits.

    Each limit must be more than the run has spent.
    """
    journal = Journal(folder)
    summary, spent = journal.summary(), journal.spent()
    option = {name: f"--{name.replace('_', '-')} {bound:g}" for name, bound in limits.items()}
    if summary is not None and not summary["stopped"]:
        raise OpforgeError(
            f"{' and '.join(option.values())}: the run in {str(folder)!r} was not stopped by its budget; continue without"
        )
    used = {"max_cost": (spent.cost, f"{spent.cost:.4f} USD"), "max_tokens": (spent.tokens, f"{spent.tokens} tokens")}
    for name, bound in limits.items():
        amount, amount_text = used[name]
        if not (bound > amount and math.isfinite(bound)):
            raise OpforgeError(
                f"{option[name]} is too small for the run in {str(folder)!r}: it must be more than the {amount_text} that were spent there"
            )
    return {**generation, **limits}


def reopen(journal: Journal, summary: Mapping[str, Any], workshop: GenerationContext) -> None:
    """Undo the end of a run that still had attempts left; the attempts stay.

    If this is interrupted, it is done again from the start: the summary is removed last.
    """
    workshop.drop_verdicts()
    for name, kept in summary["operators"].items():
        if kept["file"] is not None and journal.winner(name) is None:
            _withdraw(Path(kept["file"]), journal, name)
    journal.drop_summary()


def _withdraw(file: Path, journal: Journal, name: str) -> None:
    """Remove a kernel from a directory, unless it was changed since it was written."""
    if file.is_file() and file.read_text(encoding="utf-8", errors="replace") in journal.sources(name):
        file.unlink()
        proof_path(file).unlink(missing_ok=True)
