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
from typing import Any

from opforge.authoring.checking import fixes, forks, loading
from opforge.authoring.checking.report import CONTENTS, ENDED, Finding, Status
from opforge.errors import OpforgeError

_MAX_CRASHES_PER_OPERATOR = 3
MODULES = {
    "devices": "behaviour:devices", "schema": "schema:check", "fake": "fake:check", "layouts": "layouts:check", "mask": "mask:check",
    "compile": "compiling:check", "autograd": "gradients:check", "vmap": "batching:check", "determinism": "behaviour:determinism",
    "blocks": "blocks:check", "opcheck": "behaviour:opcheck",
}  # fmt: skip

Send = Callable[[dict[str, Any]], None]


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
        Examination(request, send).run()
    except OpforgeError as error:
        send({"error": str(error), "code": error.exit_code})


class Examination:
    """The check of one target: load it, find inputs, run the checks."""

    def __init__(self, request: dict[str, Any], send: Send) -> None:
        self.request, self.send = request, send
        self.target = request["target"]
        self.device = request["device"]

    def run(self) -> None:
        skipped = set(self.request["skip"])
        loading.prepare(self.device)
        self.loaded = loading.load(self.target, self.device, self.request["ops"])
        for check, name in MODULES.items():
            if check not in skipped:
                importlib.import_module(f"opforge.authoring.checking.{name.partition(':')[0]}")
        loading.warm(compiles=not {"compile", "opcheck"} <= skipped)
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

        from opforge.authoring.checking.subject import Subject, public_functions

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
        checks = [check for check in MODULES if check not in self.request["skip"]]
        ready = self._find_inputs(subjects)
        jobs = [self._job(subject, plans, check) for subject, plans in ready for check in checks]
        for done, outcome in enumerate(forks.run(jobs, self.request["workers"]), 1):
            name, check = outcome.key
            for finding in _findings(check, outcome, self.request["timeout"]):
                self.send({"operator": name, "finding": asdict(finding)})
            self.send({"progress": f"{name} {check}", "done": done, "total": len(jobs)})

    def _job(self, subject: Any, plans: list[Any], check: str) -> forks.Job:
        def action(tell: forks.Tell) -> None:
            self._set_calls(subject, plans)
            subject.before_call = lambda call: tell({"at": f"{subject.base}{call}"})
            module, _, function = MODULES[check].partition(":")
            try:
                for finding in getattr(importlib.import_module(f"opforge.authoring.checking.{module}"), function)(
                    subject
                ):
                    tell({"finding": asdict(finding)})
            except Exception as error:
                if error is not subject.raised:  # opforge's error, not the operator's
                    tell({"ours": f"{type(error).__name__}: {error}"[:400]})
                raise

        return forks.Job((subject.name, check), action, self.request["timeout"])

    def _set_calls(self, subject: Any, plans: list[Any]) -> None:
        from opforge.authoring.checking import inputs

        given, _place = inputs.declared(self._inputs_package(), self.request["inputs"], self.device)
        subject.reference = inputs.of(given.references, subject.name)
        subject.calls = list(inputs.made(subject, plans)) if plans else list(inputs.of(given.calls, subject.name) or [])

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
                forks.Job(name, self._search_action(waiting[name], start), self.request["timeout"])
                for name, start in starts.items()
            ]
            starts = {}
            for outcome in forks.run(jobs, self.request["workers"]):
                count += 1
                self.send(
                    {"progress": f"{outcome.key} inputs", "done": min(count, len(waiting)), "total": len(waiting)}
                )
                name, subject = outcome.key, waiting[outcome.key]
                plans = [row["plan"] for row in outcome.rows if "plan" in row]
                last_attempt = next((row for row in reversed(outcome.rows) if "at" in row), None)
                if (outcome.died or outcome.late) and last_attempt is not None:
                    crashes[name] += 1
                    if crashes[name] == 1:
                        self._send_crash(subject, outcome, last_attempt)
                    if not plans and crashes[name] < _MAX_CRASHES_PER_OPERATOR and outcome.died:
                        starts[name] = last_attempt["at"]
                        continue
                if self._send_inputs(subject, outcome, plans):
                    ready.append((subject, plans))
        order = {subject.name: index for index, subject in enumerate(subjects)}
        return sorted(ready, key=lambda pair: order[pair[0].name])

    def _search_action(self, subject: Any, start: int) -> Callable[[forks.Tell], None]:
        def action(tell: forks.Tell) -> None:
            from opforge.authoring.checking import inputs

            given, place = inputs.declared(self._inputs_package(), self.request["inputs"], self.device)
            calls = inputs.of(given.calls, subject.name)
            if calls:
                tell({"given": [str(call) for call in calls], "place": place})
                for call in calls:
                    tell({"at": 0, "call": str(call)})
                    subject.answer(call)
            else:
                inputs.find(subject, start, tell)

        return action

    def _send_crash(self, subject: Any, outcome: forks.Outcome, last_attempt: dict[str, Any]) -> None:
        ending = (
            f"took more than {self.request['timeout']:g} s"
            if outcome.late
            else f"ended the process, which {outcome.died}"
        )
        fault = f"{subject.base}{last_attempt['call']} {ending}{_last_words(outcome.said)}"
        finding = Finding("inputs", Status.FAILED, fault, fixes.HANG if outcome.late else fixes.CRASH, ENDED)
        self.send({"operator": subject.name, "finding": asdict(finding)})

    def _send_inputs(self, subject: Any, outcome: forks.Outcome, plans: list[Any]) -> bool:
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
                    f"the operator raises on a call of {rows['place']}: {subject.base}{call}: {rows['fault'][:300]}"
                )
        elif "alias" in rows:
            from opforge.authoring.checking.schema import alias_by_torch

            for finding in alias_by_torch(subject):
                self.send({"operator": subject.name, "finding": asdict(finding)})
            row["unsupported"] = "torch refuses every call; mend the finding of `schema` first"
        elif "no_kernel" in rows:
            keys = ", ".join(subject.backends()) or "none"
            row["unsupported"] = (
                f"it has no kernel for {self.device} (it has: {keys}); give --device, or inputs that lie on another one"
            )
        elif plans:
            row["calls"] = [sent["call"] for sent in outcome.rows if "plan" in sent]
        elif outcome.died or outcome.late:
            row["unsupported"] = (
                f"calls {'take too long' if outcome.late else 'end the process'}; see the finding of `inputs`"
            )
        else:
            row["unsupported"] = self._why_no_calls(subject, rows)
        self.send(row)
        return bool(row["calls"]) and not row["unsupported"]

    def _why_no_calls(self, subject: Any, rows: dict[str, Any]) -> str:
        from opforge.authoring.checking import samples

        advice = f'give calls with --inputs FILE: def inputs(): return {{"{subject.name}": [((x, …), {{}})]}}'
        if missing := samples.unmakeable(subject.arguments):
            return f"the argument {missing} cannot be made up; {advice}"
        if "fault" in rows:
            return f"making inputs failed: {rows['fault'][:300]}; {advice}"
        errors = "; ".join(rows.get("errors", ())) or "nothing was said"
        return f"it took none of {rows.get('tried', 0)} calls made from its schema ({errors}); {advice}"


def _last_words(output: str) -> str:
    lines = [
        line.strip()
        for line in output.splitlines()
        if line.strip() and not line.startswith(("frame #", "Exception raised"))
    ]
    last_line = "".join(c if c.isprintable() else "?" for c in lines[-1]) if lines else ""
    return f" ({last_line[:200]})" if last_line else ""


def _findings(check: str, outcome: forks.Outcome, limit_s: float) -> list[Finding]:
    """Return the findings of a check, how it died, or PASSED if it found no fault."""
    findings = [
        Finding(**{**row["finding"], "status": Status(row["finding"]["status"])})
        for row in outcome.rows
        if "finding" in row
    ]
    fault = next((row for row in outcome.rows if "fault" in row), None)
    where = next((f", at {row['at']}" for row in reversed(outcome.rows) if "at" in row), "")
    if outcome.late:
        findings.append(
            Finding(
                check,
                Status.FAILED,
                f"no answer within {limit_s:g} s: the operator hangs, or is very slow{where}",
                fixes.HANG,
                ENDED,
            )
        )
    elif outcome.died:
        findings.append(
            Finding(
                check,
                Status.FAILED,
                f"the process {outcome.died}{_last_words(outcome.said)}{where}",
                fixes.ENDED.get(check, fixes.CRASH),
                ENDED,
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
                "see the error; the calls are those that it took before",
                CONTENTS,
            )
        )
    if not any(f.status in (Status.FAILED, Status.SKIPPED) for f in findings):
        findings.append(Finding(check, Status.PASSED))
    return findings


if __name__ == "__main__":
    main()
