"""The processes that check targets.

``python -m opforge.check.child FD`` imports torch, and forks a process for each request. That one
imports the target and runs no operator. Every search for inputs and every check runs in a fork of it.
"""

from __future__ import annotations

import importlib
import os
import resource
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from opforge.check import fixes, target_loading
from opforge.check.check_request import CheckRequest
from opforge.check.findings import KIND_CONTENTS, KIND_ENDED, Finding, Findings, Status, failed, note, skipped
from opforge.check.messages import (
    AcceptedCall,
    BackwardCalled,
    Calling,
    CallPlan,
    CheckBroke,
    CheckFound,
    ChildFailed,
    DeclaredCalls,
    EveryCallRefused,
    Message,
    NoCallAccepted,
    OperatorBackward,
    OperatorFound,
    OperatorInputs,
    Progress,
    Raised,
    Send,
    TargetLoaded,
    fork_job,
    sent,
)  # fmt: skip
from opforge.errors import OpforgeError
from opforge.procs.channel import Channel
from opforge.procs.child import message_pipe
from opforge.procs.child import send as send_to_parent
from opforge.procs.forks import ForkJob, ForkResult, run_forks
from opforge.procs.preloaded import serve_forks

if TYPE_CHECKING:
    from opforge.check.inputs import DeclaredInputs
    from opforge.check.subject import Subject

_MAX_CRASHES_PER_OPERATOR = 3
_IMPLAUSIBLE = (
    "no generated call is accepted by the fake too and gives the same result twice: the calls below may be invalid"
)
CHECK_FUNCTIONS = {
    "devices": "determinism:devices", "schema": "schema:check", "fake": "fake:check", "layouts": "layouts:check",
    "mask": "memory:check", "compile": "compile:check", "autograd": "autograd:check", "vmap": "vmap:check",
    "determinism": "determinism:determinism", "blocks": "blocks:check", "opcheck": "determinism:opcheck",
}  # fmt: skip


def main() -> None:
    """Import torch, and fork a process for each request, until the parent hangs up."""
    warnings.simplefilter("ignore")
    import torch

    torch.set_num_threads(1)  # a fork has only one thread
    importlib.import_module("torch._dynamo")  # a call of a Python operator imports it
    serve_forks(Channel.from_fd(int(sys.argv.pop())), lambda _request: None, _answer)


def _answer(wire: str, fd: int) -> NoReturn:
    """Check a target, and end this process."""
    pipe = message_pipe(fd)

    def send(message: Message) -> None:
        send_to_parent(pipe, message.wire())
        pipe.flush()

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    code = 0
    try:
        CheckRun(CheckRequest.from_wire(wire), send).run()
    except OpforgeError as error:
        send(ChildFailed(str(error), error.exit_code))
    except BaseException:  # noqa: BLE001  # nothing may get back to the loop that forks
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _check_function(check: str) -> Callable[[Subject], Findings]:
    module, _, function = CHECK_FUNCTIONS[check].partition(":")
    found: Callable[[Subject], Findings] = getattr(importlib.import_module(f"opforge.check.{module}"), function)
    return found


class CheckRun:
    """The check of one target: load it, find inputs, run the checks."""

    def __init__(self, request: CheckRequest, send: Send) -> None:
        self.target, self.options, self.send = request.target, request.options, send
        self.checks = [check for check in CHECK_FUNCTIONS if check not in request.options.skip]

    def run(self) -> None:
        import torch

        if self.options.device != "cpu" and not torch.cuda.device_count():
            raise OpforgeError(f"--device {self.options.device}: torch sees no such GPU here; use --device cpu")
        self.loaded = target_loading.load_target(self.target, self.options.device, self.options.ops)
        for check in self.checks:
            _check_function(check)  # imported once, before forking
        if {"compile", "opcheck"} & set(self.checks):
            target_loading.preload_compiler()
        by_name = {name: self._subject(name) for name in self.loaded.operators}
        schemas = {
            name: "" if subject is None else str(subject.overload._schema)  # noqa: SLF001
            for name, subject in by_name.items()
        }
        versions = {"torch": torch.__version__, "python": sys.version.split()[0]}
        self.send(TargetLoaded(schemas, self.loaded.notes, versions))
        for name in (name for name, subject in by_name.items() if subject is None):
            undefined = "kernels are registered for it, and nothing defines it: there is no schema"
            self.send(OperatorInputs(name, [], "", undefined))
        self._run_checks([subject for subject in by_name.values() if subject is not None])

    def _subject(self, name: str) -> Subject | None:
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
            device=self.options.device.partition(":")[0],
            interpreted=self.loaded.interpreted,
        )

    # ── inputs, then checks ────────────────────────────────────────────────────────────────────

    def _run_checks(self, subjects: list[Subject]) -> None:
        ready = self._find_inputs(subjects)
        jobs = [self._job(subject, plans, check) for subject, plans in ready for check in self.checks]
        for done, outcome in enumerate(run_forks(jobs, self.options.workers), 1):
            name, check = outcome.key
            for finding in _findings(check, outcome, self.options.timeout_s):
                self.send(OperatorFound(name, finding))
            for called in sent(outcome, BackwardCalled):
                self.send(OperatorBackward(name, [other for other in called.operators if other != name]))
            self.send(Progress(f"{name} {check}", done, len(jobs)))

    def _job(self, subject: Subject, plans: list[CallPlan], check: str) -> ForkJob:
        def action(send: Send) -> None:
            from opforge.check.subject import describe_error

            self._set_calls(subject, plans)
            subject.before_call = lambda call: send(Calling(f"{subject.base_name}{call}"))
            try:
                for finding in _check_function(check)(subject):
                    send(CheckFound(finding))
                if subject.backward_calls:
                    send(BackwardCalled(sorted(subject.backward_calls)))
            except Exception as error:  # it is raised again
                if error is not subject.last_error:  # opforge's error, not the operator's
                    send(CheckBroke(f"{type(error).__name__}: {error}"[:400]))
                else:
                    send(Raised(describe_error(error, 400)))
                raise

        return fork_job((subject.name, check), action, self.options.timeout_s)

    def _set_calls(self, subject: Subject, plans: list[CallPlan]) -> None:
        from opforge.check import inputs

        declared, _source = self._declared_inputs()
        subject.reference = inputs.lookup(declared.references, subject.name)
        subject.calls = (
            list(inputs.rebuild_calls(subject, plans))
            if plans
            else list(inputs.lookup(declared.calls, subject.name) or [])
        )

    def _declared_inputs(self) -> tuple[DeclaredInputs, str]:
        from opforge.check import inputs

        package = self.target.module.partition(".")[0]
        return inputs.declared_inputs(package, self.options.inputs, self.options.device)

    def _find_inputs(self, subjects: list[Subject]) -> list[tuple[Subject, list[CallPlan]]]:
        """Find calls for every operator; return the operators that have some, with their plans."""
        by_name = {subject.name: subject for subject in subjects}
        starts = dict.fromkeys(by_name, 0)
        crashes = dict.fromkeys(by_name, 0)
        ready: dict[str, list[CallPlan]] = {}
        count = 0
        while starts:
            jobs = [
                fork_job(name, self._search_action(by_name[name], start), self.options.timeout_s)
                for name, start in starts.items()
            ]
            starts = {}
            for outcome in run_forks(jobs, self.options.workers):
                count += 1
                name = outcome.key
                self.send(Progress(f"{name} inputs", min(count, len(by_name)), len(by_name)))
                plans = [accepted.plan for accepted in sent(outcome, AcceptedCall)]
                calling = sent(outcome, Calling)
                if (outcome.death or outcome.timed_out) and calling:
                    crashes[name] += 1
                    if crashes[name] == 1:
                        self._send_crash(by_name[name], outcome, calling[-1].call)
                    if not plans and crashes[name] < _MAX_CRASHES_PER_OPERATOR and outcome.death:
                        starts[name] = calling[-1].number
                        continue
                if self._send_inputs(by_name[name], outcome):
                    ready[name] = plans
        return [(subject, ready[subject.name]) for subject in subjects if subject.name in ready]

    def _search_action(self, subject: Subject, start: int) -> Callable[[Send], None]:
        def action(send: Send) -> None:
            from opforge.check import inputs
            from opforge.check.subject import describe_error

            try:
                declared, source = self._declared_inputs()
                calls = inputs.lookup(declared.calls, subject.name)
                if calls:
                    send(DeclaredCalls([str(call) for call in calls], source))
                    for call in calls:
                        send(Calling(str(call)))
                        subject.run_copy(call)
                else:
                    inputs.search_calls(subject, start, send)
            except Exception as error:  # it is raised again
                send(Raised(describe_error(error)))
                raise

        return action

    def _send_crash(self, subject: Subject, outcome: ForkResult, call: str) -> None:
        ending = (
            f"took more than {self.options.timeout_s:g} s"
            if outcome.timed_out
            else f"ended the process, which {outcome.death}"
        )
        fault = f"{subject.base_name}{call} {ending}{_last_output_line(outcome.output)}"
        fix = fixes.HANG if outcome.timed_out else fixes.CRASH
        self.send(OperatorFound(subject.name, failed("inputs", fault, fix, KIND_ENDED)))

    def _send_inputs(self, subject: Subject, outcome: ForkResult) -> bool:
        """Send an operator's calls, or why there are none; return whether it can be checked."""
        declared, accepted = sent(outcome, DeclaredCalls), sent(outcome, AcceptedCall)
        calls = declared[0].calls if declared else [one.call for one in accepted]
        if accepted and not any(one.plausible for one in accepted):
            self.send(OperatorFound(subject.name, note("inputs", _IMPLAUSIBLE, fixes.INPUTS)))
        origin = declared[0].source if declared else "made from the schema"
        refused = sent(outcome, EveryCallRefused)
        unsupported = ""
        if declared and outcome.error is not None:
            call = next((calling.call for calling in reversed(sent(outcome, Calling))), "")
            fault = f"{subject.base_name}{call}: {_raised(outcome)}"
            unsupported = f"the operator raises on a call of {origin}: {fault}"
        elif refused:
            calls, unsupported = [], self._why_all_refused(subject, refused[0])
        elif not calls and (outcome.death or outcome.timed_out):
            ending = "take too long" if outcome.timed_out else "end the process"
            unsupported = f"calls {ending}; see the finding of `inputs`"
        elif not calls:
            unsupported = _why_no_calls(subject, outcome)
        self.send(OperatorInputs(subject.name, calls, origin, unsupported))
        return not unsupported

    def _why_all_refused(self, subject: Subject, refused: EveryCallRefused) -> str:
        if refused.returns_input:
            from opforge.check.schema import alias_refused_by_torch

            self.send(OperatorFound(subject.name, alias_refused_by_torch(subject)))
            return "torch rejects every call; fix the finding of `schema` first"
        keys = ", ".join(subject.backends())
        if not keys:
            return (
                "it is defined without a kernel for any device: the library with its kernels is not loaded, or was "
                "built without them"
            )
        return (
            f"it has no kernel for {self.options.device} (it has: {keys}); give --device, or inputs on another device"
        )


def _why_no_calls(subject: Subject, outcome: ForkResult) -> str:
    from opforge.check import generated_calls

    advice = f'give calls with --inputs FILE: def inputs(): return {{"{subject.name}": [((x, …), {{}})]}}'
    if missing := generated_calls.unsupported_argument(subject.arguments):
        return f"no value can be generated for the argument {missing}; {advice}"
    if outcome.error is not None:
        return f"making inputs failed: {_raised(outcome)}; {advice}"
    tried, errors = next(((m.tried, m.errors) for m in sent(outcome, NoCallAccepted)), (0, []))
    reasons = "; ".join(errors) or "no message"
    return f"it accepted none of {tried} calls generated from its schema ({reasons}); {advice}"


def _raised(outcome: ForkResult) -> str:
    """Return the error of a fork, with the line of the user's code if known."""
    return next((raised.error for raised in sent(outcome, Raised)), str(outcome.error)[:400])


def _last_output_line(output: str) -> str:
    lines = [
        line.strip()
        for line in output.splitlines()
        if line.strip() and not line.startswith(("frame #", "Exception raised"))
    ]
    last_line = "".join(c if c.isprintable() else "?" for c in lines[-1]) if lines else ""
    return f" ({last_line[:200]})" if last_line else ""


def _findings(check: str, outcome: ForkResult, limit_s: float) -> list[Finding]:
    """Return the findings of a check, how it died, or PASSED if it found no fault."""
    findings = [message.finding for message in sent(outcome, CheckFound)]
    where = next((f", at {calling.call}" for calling in reversed(sent(outcome, Calling))), "")
    broke = sent(outcome, CheckBroke)
    if outcome.timed_out:
        fault = f"no answer within {limit_s:g} s: the operator hangs, or is very slow{where}"
        findings.append(failed(check, fault, fixes.HANG, KIND_ENDED))
    elif outcome.death:
        fault = f"the process {outcome.death}{_last_output_line(outcome.output)}{where}"
        findings.append(failed(check, fault, fixes.CRASH_BY_CHECK.get(check, fixes.CRASH), KIND_ENDED))
    elif broke:
        findings.append(skipped(check, f"it could not be judged{where}: {broke[0].error}"))
    elif outcome.error is not None:
        fault = f"the operator raises{where}: {_raised(outcome)}"
        findings.append(failed(check, fault, "see the error; it accepted these calls before", KIND_CONTENTS))
    if not any(f.status in (Status.FAILED, Status.SKIPPED) for f in findings):
        findings.append(Finding(check, Status.PASSED))
    return findings


if __name__ == "__main__":
    main()
