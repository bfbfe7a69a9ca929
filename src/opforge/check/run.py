"""Check a target: a child process imports and judges it, and this process collects the findings."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from opforge.check import messages
from opforge.check.check_request import CheckOptions, CheckRequest, CheckTarget
from opforge.check.findings import CheckReport, Finding, OperatorReport, demote_consequences
from opforge.errors import InternalError, OpforgeError
from opforge.frames import is_from_opforge
from opforge.procs import linux
from opforge.procs.child import child_environment
from opforge.procs.preloaded import ForkingModule

_FORKING_PROCESS = ForkingModule("opforge.check.child")
"""The process that imports torch and forks the one that checks."""

ShowProgress = Callable[[str, int, int], None]


def _silent(_what: str, _done: int, _total: int) -> None:
    pass


def run_checks(target: CheckTarget, options: CheckOptions, progress: ShowProgress = _silent) -> CheckReport:
    """Run every check on every operator that a target registers, each check in its own process."""
    inputs = str(Path(options.inputs).resolve()) if options.inputs else ""
    request = CheckRequest(target, replace(options, inputs=inputs))
    progress(f"importing {target.text}", 0, 1)
    builder = _ReportBuilder(target, options, progress)
    with _FORKING_PROCESS.ask(request.wire(), _environment(options.device), limit_s=None) as child:
        for row, _ in child.messages():
            builder.add(messages.from_wire(row))
        return builder.report(child.wait(), child.output())


def _environment(device: str) -> dict[str, str]:
    """Return the environment of the process that checks, in which torch is imported."""
    # torch raises on aliases only if CI is set; findings must be the same everywhere
    environment = {name: value for name, value in child_environment().items() if name != "CI"}
    # the check for a GPU must not initialise CUDA: forks could not use it
    environment["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    environment.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # no extra compile processes
    kind, _, number = device.partition(":")
    if kind == "cpu":
        environment.setdefault("TRITON_INTERPRET", "1")
    if number:
        seen = environment.get("CUDA_VISIBLE_DEVICES", "").split(",")
        environment["CUDA_VISIBLE_DEVICES"] = seen[int(number)] if int(number) < len(seen) and seen[0] else number
    return environment


class _ReportBuilder:
    """The child's messages so far."""

    def __init__(self, target: CheckTarget, options: CheckOptions, progress: ShowProgress) -> None:
        self.target, self.options, self.progress = target, options, progress
        self.loaded: messages.TargetLoaded | None = None
        self.operators: dict[str, OperatorReport] = {}
        self.findings: dict[str, list[Finding]] = {}
        self.backward_of: dict[str, set[str]] = {}
        """Operators whose backward calls an operator, by its name."""

    def add(self, message: messages.Message) -> None:
        match message:
            case messages.ChildFailed():
                error = OpforgeError(message.error)
                error.exit_code = message.exit_code
                raise error
            case messages.TargetLoaded():
                self.loaded = message
                self.operators = {name: OperatorReport(name, schema) for name, schema in message.schemas.items()}
                self.findings = {name: [] for name in message.schemas}
            case messages.OperatorFound():
                self.findings[message.operator].append(message.finding)
            case messages.OperatorBackward(name, calls):
                for called in calls:
                    self.backward_of.setdefault(called, set()).add(name)
            case messages.OperatorInputs(name, calls, origin, unsupported):
                self.operators[name] = replace(
                    self.operators[name], calls=tuple(calls), origin=origin, unsupported=unsupported
                )
            case messages.Progress(label, done, total):
                self.progress(label, done, total)

    def report(self, code: int, output: str) -> CheckReport:
        """Return the report; raise if the child did not finish."""
        if code == 0 and self.loaded is not None:
            return self._report(self.loaded)
        tail = " / ".join(line.strip() for line in output.strip().splitlines()[-6:])[-800:]
        if any(map(is_from_opforge, re.findall(r'File "([^"]+)", line', tail))):
            raise InternalError(f"checking {self.target.text} failed: {tail}")
        step = f"importing {self.target.text}" if self.loaded is None else "checking"
        raise OpforgeError(
            f"{step} ended its process, which {linux.describe_returncode(code)}{f': {tail}' if tail else ''}"
        )

    def _report(self, loaded: messages.TargetLoaded) -> CheckReport:
        operators = tuple(
            replace(operator, findings=demote_consequences(self.findings[name], self.backward_of.get(name, ())))
            for name, operator in self.operators.items()
        )
        return CheckReport(
            self.target.text, self.options.device, operators, tuple(loaded.notes), loaded.versions, self.options.skip
        )
