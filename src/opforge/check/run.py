"""Check a target: a child process imports and judges it, and this process collects the findings."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from opforge.check.report import CHECKS, CheckReport, Finding, OperatorReport, Status, demote_consequences
from opforge.check.target import CheckTarget
from opforge.errors import InternalError, OpforgeError, UnknownNameError
from opforge.frames import is_from_opforge
from opforge.procs import linux

CHILD_COMMAND = (sys.executable, "-P", "-W", "ignore", "-m", "opforge.check.child")

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class CheckOptions:
    """Options of a check."""

    device: str = "cpu"
    ops: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    inputs: str = ""
    timeout_s: float = 60.0
    workers: int = 2

    def __post_init__(self) -> None:
        kind, _, number = self.device.partition(":")
        if kind not in ("cpu", "cuda") or (number and not (kind == "cuda" and number.isdigit())):
            raise OpforgeError(f"unknown device {self.device!r}; allowed: cpu, cuda, cuda:N")
        for name in self.skip:
            if name not in CHECKS or name == "inputs":
                raise UnknownNameError("check", name, [check for check in CHECKS if check != "inputs"])
        if not self.timeout_s > 0:
            raise OpforgeError(f"--timeout {self.timeout_s:g} is not allowed; give seconds above 0")
        if self.workers < 1:
            raise OpforgeError(f"--workers {self.workers} is not allowed; give 1 or more")
        if self.inputs and not Path(self.inputs).is_file():
            raise OpforgeError(f"there is no file {self.inputs!r} for --inputs")


def _silent(_what: str, _done: int, _total: int) -> None:
    pass


def run_checks(target: CheckTarget, options: CheckOptions, progress: Progress = _silent) -> CheckReport:
    """Run every check on every operator that a target registers, each check in its own process."""
    request = {
        "target": asdict(target),
        "device": options.device,
        "ops": list(options.ops),
        "skip": list(options.skip),
        "inputs": str(Path(options.inputs).resolve()) if options.inputs else "",
        "timeout": options.timeout_s,
        "workers": options.workers,
    }
    progress(f"importing {target.text}", 0, 1)
    builder = _ReportBuilder(target, options, progress)
    with tempfile.TemporaryFile("w+") as stderr:
        # torch raises on aliases only if CI is set; findings must be the same everywhere
        environment = {name: value for name, value in os.environ.items() if name != "CI"}
        with subprocess.Popen(
            CHILD_COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment
        ) as child:
            try:
                code = _read_rows(child, json.dumps(request), builder)
            finally:
                child.kill()
        stderr.seek(0)
        builder.check_exit(code, stderr.read())
    return builder.report()


def _read_rows(child: subprocess.Popen[str], request: str, builder: _ReportBuilder) -> int:
    if child.stdin is None or child.stdout is None:
        raise AssertionError
    with child.stdin:
        child.stdin.write(request)
    for line in child.stdout:
        builder.add_row(json.loads(line))
    return child.wait()


class _ReportBuilder:
    """The child's messages so far."""

    def __init__(self, target: CheckTarget, options: CheckOptions, progress: Progress) -> None:
        self.target, self.options, self.progress = target, options, progress
        self.head: dict[str, Any] = {}
        self.operators: dict[str, dict[str, Any]] = {}
        self.findings: dict[str, list[Finding]] = {}

    def add_row(self, row: dict[str, Any]) -> None:
        match row:
            case {"error": str(text), "code": int(code)}:
                error = OpforgeError(text)
                error.exit_code = code
                raise error
            case {"operators": list(operators)}:
                self.head = row
                self.operators = {operator["name"]: dict(operator) for operator in operators}
                self.findings = {operator["name"]: [] for operator in operators}
            case {"operator": str(name), "finding": dict(finding)}:
                self.findings[name].append(Finding(**{**finding, "status": Status(finding["status"])}))
            case {"operator": str(name)}:
                self.operators[name] |= {key: value for key, value in row.items() if key != "operator"}
            case {"progress": str(what), "done": int(done), "total": int(total)}:
                self.progress(what, done, total)

    def check_exit(self, code: int, stderr: str) -> None:
        if code == 0 and self.head:
            return
        tail = " / ".join(line.strip() for line in stderr.strip().splitlines()[-6:])[-800:]
        if any(map(is_from_opforge, re.findall(r'File "([^"]+)", line', tail))):
            raise InternalError(f"checking {self.target.text} failed: {tail}")
        step = f"importing {self.target.text}" if not self.head else "checking"
        raise OpforgeError(
            f"{step} ended its process, which {linux.describe_returncode(code)}{f': {tail}' if tail else ''}"
        )

    def report(self) -> CheckReport:
        operators = tuple(
            OperatorReport(
                name, row["schema"], tuple(row.get("calls", ())), row.get("origin", ""), row.get("unsupported", ""),
                demote_consequences(self.findings[name]),
            )
            for name, row in self.operators.items()
        )  # fmt: skip
        return CheckReport(
            self.target.text,
            self.options.device,
            operators,
            tuple(self.head["notes"]),
            self.head["versions"],
            self.options.skip,
        )
