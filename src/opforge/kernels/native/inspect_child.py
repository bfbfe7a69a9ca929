"""Child process that test-loads libraries.

It reads groups of paths as JSON from stdin and writes a line of JSON for each to stdout. It imports
torch once and forks for each group, so that a library that kills its process kills only its
group's.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Callable
from typing import Any

from opforge.procs.forks import Send, run_fork

_LIMIT_S = 60.0
_MAX_OUTPUT_CHARACTERS = 4000


def main() -> None:
    import torch

    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries is not an answer
    for group in json.load(sys.stdin):
        row = run_forked(_load, group)
        if len(group) == 1 and row.get("operators"):
            row["whole"] = [
                name for name in _namespaces(row) if "died" in run_forked(_load_after_claim, [name, *group])
            ]
        answers.write(json.dumps(row) + "\n")
        answers.flush()


def _namespaces(row: dict[str, Any]) -> list[str]:
    return sorted({name.partition("::")[0] for name in row["operators"]})


def run_forked(action: Callable[[list[str]], dict[str, Any]], arguments: list[str]) -> dict[str, Any]:
    """Run an action in a forked process; return its answer, or how it died."""

    def answer(_send: Send) -> dict[str, Any]:
        try:
            return action(arguments)
        except BaseException as error:  # noqa: BLE001  # boundary: any error from loading is the answer
            return {"error": str(error.__cause__ or error)}  # torch's own message hides the loader's

    result = run_fork(answer, _LIMIT_S)
    if result.answer is not None:
        row: dict[str, Any] = result.answer
        return row
    return {"died": None if result.timed_out else result.code, "said": result.output[-_MAX_OUTPUT_CHARACTERS:]}


def _load(paths: list[str]) -> dict[str, Any]:
    """Load libraries, and return the operators they add."""
    import torch

    before = set(torch._C._dispatch_get_all_op_names())  # noqa: SLF001  # torch has no public list of operators
    for path in paths:
        torch.ops.load_library(path)
    added = sorted(set(torch._C._dispatch_get_all_op_names()) - before)  # noqa: SLF001
    return {"operators": {name: _schema(name) for name in added}}


def _load_after_claim(arguments: list[str]) -> dict[str, Any]:
    """Claim a namespace, then load libraries.

    A library that claims the namespace too kills the process; one that only adds to it does not.
    """
    import torch

    namespace, *paths = arguments
    claim = torch.library.Library(namespace, "DEF")
    row = _load(paths)
    del claim
    return row


def _schema(name: str) -> str:
    import torch

    base, _, overload = name.partition(".")
    try:
        return str(torch._C._get_schema(base, overload))  # noqa: SLF001  # torch has no public name for it
    except RuntimeError:
        return ""


if __name__ == "__main__":
    main()
