"""The process that imports the target of a check: a JSON request on stdin, rows of JSON on stdout.

It imports torch and the target once and runs no operator. Every search for inputs and every check
runs in a fork of it.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from opforge.check import fixes, forks, target_loading
from opforge.check.report import KIND_CONTENTS, KIND_ENDED, Finding, Status
from opforge.errors import OpforgeError

if TYPE_CHECKING:
    from opforge.check.subject import Subject

_MAX_CRASHES_PER_OPERATOR = 3
CHECK_FUNCTIONS = {
    "devices": "determinism:devices", "schema": "schema:check", "fake": "fake:check", "layouts": "layouts:check",
    "mask": "memory:check", "compile": "compile:check", "autograd": "autograd:check", "vmap": "vmap:check",
    "determinism": "determinism:determinism", "blocks": "blocks:check", "opcheck": "determinism:opcheck",
}  # fmt: skip

SendRow = Callable[[dict[str, Any]], None]


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keep the target's prints out of the answers

    def send(row: dict[str, Any]) -> None:
        answers.write(json.dumps(row) + "\n")
        answers.flush()

    request = json.load(sys.stdin)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    warnings.simplefilter("ignore")
    try:
        CheckRun(request, send).run()
    except OpforgeError as error:
        send({"error": str(error), "code": error.exit_code})


class CheckRun:
    """The check of one target: load it, find inputs, run the checks."""

    def __init__(self, request: dict[str, Any], send: SendRow) -> None:
        self.request, self.send = request, send
        self.target = request["target"]
        self.device = request["device"]

    def run(self) -> None:
        skipped = set(self.request["skip"])
        target_loading.set_up_torch(self.device)
        self.loaded = target_loading.load_target(self.target, self.device, self.request["ops"])
        for check, name in CHECK_FUNCTIONS.items():
            if check not in skipped:
                importlib.import_module(f"opforge.check.{name.partition(':')[0]}")
        target_loading.preload_modules(with_compiler=not {"compile", "opcheck"} <= skipped)
        import torch

        by_name = {name: self._subject(name) for name in self.loaded.operators}
        subjects = [subject for subject in by_name.values() if subject is not None]

        versions = {"torch": torch.__version__, "python": sys.version.split()[0]}
        rows = [{"name": name, "schema": str(s.overload._schema) if s else ""} for name, s in by_name.items()]  # noqa: SLF001
        self.send({"operators": rows, "notes": self.loaded.notes, "versions": versions})
        for name in (name for name, subject in by_name.items() if subject is None):
            self.send(
                {
                    "operator": name,
                    "unsupported": "kernels are registered for it, and nothing defines it: there is no schema",
                }
            )
        self._run_checks(subjects)

    def _subject(self, name: str) -> Any:
        import torch

        from opforge.check.subject import Subject, public_functions

        namespace, _, rest = name.partition("::")
        base, _, overload = rest.partition(".")
        try:
            operator = getattr(getattr(getattr(torch.ops, namespace), base), overload or "default")
        except AttributeError:  # a kernel for an undefined operator
            return None
        return Subject(
            name,
            operator,
            functions=public_functions(base, self.loaded.package),
            device=self.device.partition(":")[0],
            interpreted=self.loaded.interpreted,
        )

    # ── inputs, then checks ────────────────────────────────────────────────────────────────────

    def _run_checks(self, subjects: list[Any]) -> None:
        checks = [check for check in CHECK_FUNCTIONS if check not in self.request["skip"]]
        ready = self._find_inputs(subjects)
        jobs = [self._job(subject, plans, check) for subject, plans in ready for check in checks]
        for done, outcome in enumerate(forks.run_jobs(jobs, self.request["workers"]), 1):
            name, check = outcome.key
            for finding in _findings(check, outcome, self.request["timeout"]):
                self.send({"operator": name, "finding": asdict(finding)})
            self.send({"progress": f"{name} {check}", "done": done, "total": len(jobs)})

    def _job(self, subject: Subject, plans: list[Any], check: str) -> forks.ForkedJob:
        def action(tell: forks.SendRow) -> None:
            self._set_calls(subject, plans)
            subject.before_call = lambda call: tell({"at": f"{subject.base_name}{call}"})
            module, _, function = CHECK_FUNCTIONS[check].partition(":")
            try:
                for finding in getattr(importlib.import_module(f"opforge.check.{module}"), function)(subject):
                    tell({"finding": asdict(finding)})
            except Exception as error:
                if error is not subject.last_error:  # opforge's error, not the operator's
                    tell({"ours": f"{type(error).__name__}: {error}"[:400]})
                raise

        return forks.ForkedJob((subject.name, check), action, self.request["timeout"])

    def _set_calls(self, subject: Subject, plans: list[Any]) -> None:
        from opforge.check import inputs

        given, _place = inputs.declared_inputs(self._inputs_package(), self.request["inputs"], self.device)
        subject.reference = inputs.lookup(given.references, subject.name)
        subject.calls = (
            list(inputs.rebuild_calls(subject, plans))
            if plans
            else list(inputs.lookup(given.calls, subject.name) or [])
        )

    def _inputs_package(self) -> str:
        return str(self.target["module"]).partition(".")[0]

    def _find_inputs(self, subjects: list[Any]) -> list[tuple[Any, list[Any]]]:
        """Find calls for every operator; return the operators that have some, with their plans."""
        waiting = {subject.name: subject for subject in subjects}
        starts = dict.fromkeys(waiting, 0)
        crashes = dict.fromkeys(waiting, 0)
        ready: list[tuple[Any, list[Any]]] = []
        count = 0
        while starts:
            jobs = [
                forks.ForkedJob(name, self._search_action(waiting[name], start), self.request["timeout"])
                for name, start in starts.items()
            ]
            starts = {}
            for outcome in forks.run_jobs(jobs, self.request["workers"]):
                count += 1
                self.send(
                    {"progress": f"{outcome.key} inputs", "done": min(count, len(waiting)), "total": len(waiting)}
                )
                name, subject = outcome.key, waiting[outcome.key]
                plans = [row["plan"] for row in outcome.rows if "plan" in row]
                last_attempt = next((row for row in reversed(outcome.rows) if "at" in row), None)
                if (outcome.death or outcome.timed_out) and last_attempt is not None:
                    crashes[name] += 1
                    if crashes[name] == 1:
                        self._send_crash(subject, outcome, last_attempt)
                    if not plans and crashes[name] < _MAX_CRASHES_PER_OPERATOR and outcome.death:
                        starts[name] = last_attempt["at"]
                        continue
                if self._send_inputs(subject, outcome, plans):
                    ready.append((subject, plans))
        order = {subject.name: index for index, subject in enumerate(subjects)}
        return sorted(ready, key=lambda pair: order[pair[0].name])

    def _search_action(self, subject: Subject, start: int) -> Callable[[forks.SendRow], None]:
        def action(tell: forks.SendRow) -> None:
            from opforge.check import inputs

            given, place = inputs.declared_inputs(self._inputs_package(), self.request["inputs"], self.device)
            calls = inputs.lookup(given.calls, subject.name)
            if calls:
                tell({"given": [str(call) for call in calls], "place": place})
                for call in calls:
                    tell({"at": 0, "call": str(call)})
                    subject.run_copy(call)
            else:
                inputs.search_calls(subject, start, tell)

        return action

    def _send_crash(self, subject: Subject, outcome: forks.JobResult, last_attempt: dict[str, Any]) -> None:
        ending = (
            f"took more than {self.request['timeout']:g} s"
            if outcome.timed_out
            else f"ended the process, which {outcome.death}"
        )
        fault = f"{subject.base_name}{last_attempt['call']} {ending}{_last_output_line(outcome.output)}"
        finding = Finding("inputs", Status.FAILED, fault, fixes.HANG if outcome.timed_out else fixes.CRASH, KIND_ENDED)
        self.send({"operator": subject.name, "finding": asdict(finding)})

    def _send_inputs(self, subject: Subject, outcome: forks.JobResult, plans: list[Any]) -> bool:
        """Send an operator's calls, or why there are none; return whether it can be checked."""
        row: dict[str, Any] = {
            "operator": subject.name,
            "unsupported": "",
            "calls": [],
            "origin": "made from the schema",
        }
        rows = {key: value for sent in outcome.rows for key, value in sent.items()}
        if "given" in rows:
            row |= {"calls": rows["given"], "origin": rows["place"]}
            if "fault" in rows:
                call = rows.get("call", "")
                row["unsupported"] = (
                    f"the operator raises on a call of {rows['place']}: {subject.base_name}{call}: "
                    f"{rows['fault'][:300]}"
                )
        elif "alias" in rows:
            from opforge.check.schema import alias_refused_by_torch

            for finding in alias_refused_by_torch(subject):
                self.send({"operator": subject.name, "finding": asdict(finding)})
            row["unsupported"] = "torch rejects every call; fix the finding of `schema` first"
        elif "no_kernel" in rows:
            keys = ", ".join(subject.backends()) or "none"
            row["unsupported"] = (
                f"it has no kernel for {self.device} (it has: {keys}); give --device, or inputs on another device"
            )
        elif plans:
            row["calls"] = [sent["call"] for sent in outcome.rows if "plan" in sent]
        elif outcome.death or outcome.timed_out:
            row["unsupported"] = (
                f"calls {'take too long' if outcome.timed_out else 'end the process'}; see the finding of `inputs`"
            )
        else:
            row["unsupported"] = self._why_no_calls(subject, rows)
        self.send(row)
        return bool(row["calls"]) and not row["unsupported"]

    def _why_no_calls(self, subject: Subject, rows: dict[str, Any]) -> str:
        from opforge.check import generated_calls

        advice = f'give calls with --inputs FILE: def inputs(): return {{"{subject.name}": [((x, …), {{}})]}}'
        if missing := generated_calls.unsupported_argument(subject.arguments):
            return f"no value can be generated for the argument {missing}; {advice}"
        if "fault" in rows:
            return f"making inputs failed: {rows['fault'][:300]}; {advice}"
        errors = "; ".join(rows.get("errors", ())) or "no message"
        return f"it accepted none of {rows.get('tried', 0)} calls generated from its schema ({errors}); {advice}"


def _last_output_line(output: str) -> str:
    lines = [
        line.strip()
        for line in output.splitlines()
        if line.strip() and not line.startswith(("frame #", "Exception raised"))
    ]
    last_line = "".join(c if c.isprintable() else "?" for c in lines[-1]) if lines else ""
    return f" ({last_line[:200]})" if last_line else ""


def _findings(check: str, outcome: forks.JobResult, limit_s: float) -> list[Finding]:
    """Return the findings of a check, how it died, or PASSED if it found no fault."""
    findings = [
        Finding(**{**row["finding"], "status": Status(row["finding"]["status"])})
        for row in outcome.rows
        if "finding" in row
    ]
    fault = next((row for row in outcome.rows if "fault" in row), None)
    where = next((f", at {row['at']}" for row in reversed(outcome.rows) if "at" in row), "")
    if outcome.timed_out:
        findings.append(
            Finding(
                check,
                Status.FAILED,
                f"no answer within {limit_s:g} s: the operator hangs, or is very slow{where}",
                fixes.HANG,
                KIND_ENDED,
            )
        )
    elif outcome.death:
        findings.append(
            Finding(
                check,
                Status.FAILED,
                f"the process {outcome.death}{_last_output_line(outcome.output)}{where}",
                fixes.CRASH_BY_CHECK.get(check, fixes.CRASH),
                KIND_ENDED,
            )
        )
    elif (own_error := next((row["ours"] for row in outcome.rows if "ours" in row), None)) is not None:
        findings.append(Finding(check, Status.SKIPPED, f"it could not be judged{where}: {own_error}"))
    elif fault is not None:
        findings.append(
            Finding(
                check,
                Status.FAILED,
                f"the operator raises{where}: {fault['fault'][:400]}",
                "see the error; it accepted these calls before",
                KIND_CONTENTS,
            )
        )
    if not any(f.status in (Status.FAILED, Status.SKIPPED) for f in findings):
        findings.append(Finding(check, Status.PASSED))
    return findings


if __name__ == "__main__":
    main()
