"""Enable a packed backend when torch is imported, as the environment says. Nothing here may break the import."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .enabling import Enabled

BACKEND_VARIABLE = "OPFORGE_BACKEND"
"""Environment variable with the names of the backends to enable, with commas between them."""
REPORT_VARIABLE = "OPFORGE_BACKEND_REPORT"
"""Environment variable that is 1 if the counters shall be printed when the process ends."""
_OPTION_VARIABLES = {"policy": "OPFORGE_POLICY", "ops": "OPFORGE_BACKEND_OPS", "learn": "OPFORGE_BACKEND_LEARN"}
"""Options of ``enable`` and their environment variables."""
_DONE = "_opforge_backends_autoloaded"
"""Entry of ``sys.modules`` that says that a package of any version has enabled the backends."""
_MAX_REFUSED = 5
"""Refused operators that a report names."""


def autoload(summary: str) -> None:
    """Enable the backends that the environment names, in that order; warn of what is wrong.

    Torch calls the entry point of every backend, in any order; the first call serves all.
    ``summary`` is that of a packed backend's distribution, which identifies it.
    """
    wanted = [name.strip() for name in os.environ.get(BACKEND_VARIABLE, "").split(",") if name.strip()]
    if not wanted or _DONE in sys.modules:
        return
    sys.modules[_DONE] = sys.modules[__name__]
    with _errors_as_warnings("backends"):
        points = entry_points(group="torch.backends")
        packed = (point for point in points if point.dist and point.dist.metadata.json.get("summary") == summary)
        installed = {point.name for point in packed}  # and the names of their modules
        if unknown := [name for name in wanted if name not in installed]:
            _warn(
                f"{BACKEND_VARIABLE} names {' and '.join(map(repr, unknown))}, which no installed backend is called; "
                f"installed: {', '.join(sorted(installed))}"
            )
        for name in dict.fromkeys(wanted):
            if name in installed:
                with _errors_as_warnings(name):
                    _enable(name, importlib.import_module(name).enable)


def _enable(name: str, enable: Callable[..., Enabled]) -> None:
    with contextlib.suppress(ImportError):  # torch 2.11 has none
        importlib.import_module("torch._native")  # else it would override our kernels a moment later
    values = {option: os.environ.get(variable, "").strip() for option, variable in _OPTION_VARIABLES.items()}
    enabled = enable(**{option: value for option, value in values.items() if value})
    if os.environ.get(REPORT_VARIABLE, "").strip() not in ("", "0"):
        atexit.register(_print_report, name, enabled, os.getpid())


@contextlib.contextmanager
def _errors_as_warnings(name: str) -> Iterator[None]:
    """Turn errors and exits into warnings: importing torch must not fail because of a kernel's file."""
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001  # a kernel's file may raise anything, or exit
        _warn(f"{name} could not be enabled: {type(error).__name__}: {_one_line(str(error))}")


def _warn(text: str) -> None:
    """Warn; where warnings are errors, write to stderr."""
    try:
        warnings.warn(text, RuntimeWarning, stacklevel=5)
    except RuntimeWarning:
        _write(text)


def _write(text: str) -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or none at all
        sys.stderr.write(f"{text}\n")


def _print_report(name: str, enabled: Enabled, process: int) -> None:
    if os.getpid() == process:  # not in a forked child, whose counts are partly its parent's
        _write("\n".join(_report(name, enabled, process)))


def _report(name: str, enabled: Enabled, process: int) -> Iterator[str]:
    """Yield the lines of a table of an enabled backend's counters."""
    yield f"{name}: policy {enabled.policy}, {enabled.device}, process {process}"
    rows = enabled.counters()
    called = {op: row for op, row in rows.items() if row["served"] or row["aten"]}
    if called:
        table = [("operator", "kernel", "served", "replayed", "passed on")]
        table += [(op, *_cells(row)) for op, row in called.items()]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        for op, kernel, *numbers in table:
            cells = [op.ljust(widths[0]), kernel.ljust(widths[1])]
            cells += [cell.rjust(width) for cell, width in zip(numbers, widths[2:-1], strict=False)]
            yield f"  {'  '.join([*cells, numbers[-1]])}"
    if not_called := len(rows) - len(called):
        yield f"  not called: {not_called} of {len(rows)} operators"
    refused = list(enabled.refused.items())
    for op, reason in refused[:_MAX_REFUSED]:
        yield f"  not enabled: {op}: {_one_line(reason)}"
    if len(refused) > _MAX_REFUSED:
        yield f"  not enabled: {len(refused) - _MAX_REFUSED} more"


def _cells(row: dict[str, Any]) -> tuple[str, str, str, str]:
    """Return the kernel, the calls served, those of them replayed, and those passed on with the reasons."""
    reasons = "; ".join(f"{count} {_one_line(reason)}" for reason, count in row["aten"].items())
    return row["kernel"], str(row["served"]), str(row.get("replayed", 0)), reasons or "0"


def _one_line(text: str) -> str:
    return " ".join(text.split())[:300]
