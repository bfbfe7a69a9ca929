"""Child processes that end by themselves: their environment, and a time limit for their answer."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from opforge.errors import OpforgeError


def child_environment(base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return an environment in which Python finds this opforge, installed or not."""
    package = str(Path(__file__).resolve().parents[2])
    return {**base, "PYTHONPATH": os.pathsep.join(filter(None, [package, base.get("PYTHONPATH", "")]))}


def run_command(
    command: Sequence[str], *, label: str, limit_s: float, question: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command with a question on its stdin; raise if it takes longer than its limit."""
    try:
        return subprocess.run(command, input=question, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        raise OpforgeError(f"{label} took more than {limit_s:g} s") from None
