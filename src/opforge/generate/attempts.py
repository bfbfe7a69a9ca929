"""Attempts at one operator: ask for a kernel, judge it, and ask again with feedback."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from opforge.generate.budget import Budget, BudgetSpentError
from opforge.generate.extract import Code, extract
from opforge.generate.journal import AnsweredRequest, AttemptVerdict, Journal, Round
from opforge.generate.options import DSLS, GenerationOptions
from opforge.generate.prompting import EarlierAttempt, Prompts
from opforge.generate.provider import Message, Provider, ProviderError, Reply, Request
from opforge.generate.tasks import Task, is_timed
from opforge.generate.transcript import request_digest
from opforge.reports.feedback import feedback
from opforge.runs.execute.service import JudgingService, is_correct, tally_by_op
from opforge.runs.plan import Job
from opforge.runs.rows import ResultRow
from opforge.runs.score import Summary

_MAX_REMEMBERED_ATTEMPTS = 3
"""Number of a worker's last attempts that it sends in full, besides the task."""
_MAX_OUTCOME_CHARS = 200


@dataclass(frozen=True, slots=True)
class Attempt:
    """An attempt with its verdict."""

    worker: int
    round: int
    file: Path | None
    """None if the reply had no code."""
    right: bool
    cheated: bool
    correctness: float
    speedup: float | None
    """Speedup over the cases that count; None if nothing was timed.

    If every timed case is launch-bound, the speedup over those.
    """
    reason: str = ""
    """Reason of the first failure."""
    baseline: str = "ATen"
    """Baseline of the speedup."""
    reference_failed: bool = False
    """Whether only the user's reference failed and no case passed: no kernel can be right."""

    @classmethod
    def from_verdict(cls, attempt_round: Round, file: Path | None, verdict: AttemptVerdict, baseline: str) -> Attempt:
        scores = verdict.report["scores"]
        failures = verdict.report["failures"]
        reason = verdict.problem or (f"{failures[0]['verdict']}: {failures[0]['reason']}" if failures else "")
        return cls(
            attempt_round.worker,
            attempt_round.number,
            file,
            verdict.right,
            "cheated" in scores["verdicts"],
            scores["correctness"],
            scores["performance"] if scores["performance"] is not None else scores.get("performance_launch_bound"),
            reason,
            baseline,
            bool(failures)
            and not scores["verdicts"].get("passed")
            and all(f["verdict"] == "error" and f["reason"].startswith("the reference ") for f in failures),
        )

    @property
    def rank(self) -> tuple[bool, bool, float, float]:
        """Sort key: right before wrong, honest before cheating, then more cases, then speed."""
        return self.right, self.file is not None and not self.cheated, self.correctness, self.speedup or 0.0

    @property
    def summary(self) -> str:
        speed = f", {self.speedup:.3f}× {self.baseline}" if self.speedup is not None else ""
        right = "right" if self.right else f"{self.correctness:.0%} right"
        return f"worker {self.worker}, round {self.round}: {right}{speed}"

    @property
    def outcome(self) -> str:
        """Verdict and reason in one line."""
        if self.right:
            return "right" if self.speedup is None else f"right, {self.speedup:.3f}× {self.baseline}"
        kind = "no kernel" if self.file is None else f"{self.correctness:.0%} right"
        return f"{kind}: {_one_line(self.reason)}"


@dataclass
class OperatorAttempts:
    """All attempts at one operator, from all its workers."""

    task: Task
    target_speedup: float | None
    lock: threading.Lock = field(default_factory=threading.Lock)
    attempts: dict[tuple[int, int], Attempt] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    """Why workers stopped before they had used their rounds."""

    def add(self, attempt: Attempt) -> None:
        with self.lock:
            self.attempts[attempt.worker, attempt.round] = attempt

    def fail(self, reason: str) -> None:
        with self.lock:
            if reason not in self.failures:
                self.failures.append(reason)

    @property
    def best(self) -> Attempt | None:
        """Return the best attempt that has a kernel; the earliest of equals."""
        with self.lock:
            with_kernel = [
                a for _, a in sorted(self.attempts.items(), key=lambda i: (i[0][1], i[0][0])) if a.file is not None
            ]
        return max(with_kernel, key=lambda a: a.rank, default=None)

    @property
    def is_finished(self) -> bool:
        """Whether to stop: a kernel is right, and fast enough or untimed; or none can be right."""
        with self.lock:
            if any(attempt.reference_failed for attempt in self.attempts.values()):
                return True
        best = self.best
        if best is None or not best.right:
            return False
        if not is_timed(self.task.parts) or best.speedup is None:
            return True
        return self.target_speedup is not None and best.speedup >= self.target_speedup


@dataclass(frozen=True, slots=True)
class WriterContext:
    """Objects that workers share: model, budget, judge, journal, prompts, options."""

    provider: Provider
    budget: Budget
    judging: JudgingService
    journal: Journal
    prompts: Prompts
    options: GenerationOptions
    report: Callable[[str, str], None]
    """Progress callback; takes the current activity and the operator's name."""
    notice: Callable[[str], None]
    """Callback for a line about each attempt."""


class KernelWriter:
    """Writes kernels for one operator in sequence, each with feedback on the earlier ones."""

    def __init__(self, context: WriterContext, operator_attempts: OperatorAttempts, number: int) -> None:
        self._context = context
        self._operator_attempts = operator_attempts
        self._task = operator_attempts.task
        self._number = number
        self._turns: list[tuple[Message, Message]] = []
        """The last replies, each with the feedback on it."""

    def run(self) -> None:
        """Use the rounds; reuse replies and verdicts from before an interruption."""
        for number in range(1, self._context.options.rounds + 1):
            if self._operator_attempts.is_finished:
                return
            this_round = self._context.journal.round(self._task.name, self._number, number)
            reply = this_round.reply() or self._ask(this_round)
            if reply is None or (this_round.verdict() is None and self._operator_attempts.is_finished):
                return
            earlier_verdict = this_round.verdict()
            verdict = earlier_verdict or self._judge(this_round, reply)
            attempt = Attempt.from_verdict(this_round, self._file(this_round), verdict, self._task.authority)
            self._operator_attempts.add(attempt)
            if earlier_verdict is None:
                self._context.notice(f"{self._label(number)}: {attempt.outcome}")
            self._remember(reply, attempt, verdict, self._context.options.rounds - number)

    def _label(self, number: int) -> str:
        options = self._context.options
        worker = f" of worker {self._number}" if options.workers > 1 else ""
        return f"{self._task.name}: attempt {number} of {options.rounds}{worker}"

    def _ask(self, this_round: Round) -> Reply | None:
        """Ask for the next kernel; return None if no reply can be had, and record why."""
        request = self._request()
        this_round.write_prompt(request)
        self._context.report("asking", self._task.name)
        started = time.monotonic()
        digest = request_digest(request)
        try:
            reply = self._context.budget.ask(
                self._context.provider, request, lambda message: self._context.report(message, self._task.name)
            )
        except BudgetSpentError as error:
            self._operator_attempts.fail(str(error))
            return None
        except ProviderError as error:
            failure = AnsweredRequest(error.usage, time.monotonic() - started, digest, failed=str(error))
            self._context.journal.log_request(this_round, request.model, failure)
            self._operator_attempts.fail(str(error))
            self._context.notice(f"{self._label(this_round.number)}: no reply: {_one_line(str(error))}")
            return None
        seconds = time.monotonic() - started
        answered = AnsweredRequest(reply.usage, seconds, digest, reply.stop)
        self._context.journal.log_request(this_round, request.model, answered)
        this_round.write_reply(reply, seconds)
        return reply

    def _request(self) -> Request:
        options = self._context.options
        first = self._context.prompts.first_prompt(self._task, self._number, options.workers)
        messages = [Message("user", first), *(message for turn in self._turns for message in turn)]
        system = self._context.prompts.system_prompt(self._task)
        return Request(options.model, system, tuple(messages), options.reply_tokens, self._temperature)

    @property
    def _temperature(self) -> float | None:
        """Return None (the model's default) for the first worker, 0.4 to 1 for the others."""
        if self._number == 1:
            return None
        return round(0.4 + 0.6 * (self._number - 1) / max(1, self._context.options.workers - 1), 2)

    def _judge(self, this_round: Round, reply: Reply) -> AttemptVerdict:
        code = extract(reply.text, self._task.entry, DSLS[self._context.options.dsl])
        if isinstance(code, Code):
            file = this_round.write_kernel(code.text, DSLS[self._context.options.dsl])
            self._context.report("judging", self._task.name)
            job = self._task.job(file.resolve(), this_round.label)
            verdict = verdict_on(job, self._context.judging.judge(job))
        else:
            verdict = _no_kernel(_problem(code.reason, reply, self._context.options.reply_tokens))
        this_round.write_verdict(verdict)
        return verdict

    def _file(self, this_round: Round) -> Path | None:
        file = this_round.path / f"kernel{DSLS[self._context.options.dsl]}"
        return file if file.exists() else None

    def _remember(self, reply: Reply, attempt: Attempt, verdict: AttemptVerdict, attempts_left: int) -> None:
        """Keep a reply and its feedback, with this worker's best attempt if that ranks higher."""
        own_attempts = [
            a
            for a in self._operator_attempts.attempts.copy().values()
            if a.worker == self._number and a.file is not None and a.round <= attempt.round
        ]
        best = max(own_attempts, key=lambda a: (a.rank, -a.round), default=None)
        better_attempt = None
        if best is not None and best.file is not None and best.rank > attempt.rank:
            better_attempt = EarlierAttempt(best.summary, best.file.read_text(encoding="utf-8"))
        feedback_text = self._context.prompts.feedback_prompt(self._task, verdict, attempts_left, better_attempt)
        turn = (Message("assistant", reply.text.strip() or "(nothing)"), Message("user", feedback_text))
        self._turns = [*self._turns, turn][-_MAX_REMEMBERED_ATTEMPTS:]


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MAX_OUTCOME_CHARS else f"{line[:_MAX_OUTCOME_CHARS]} …"


def verdict_on(job: Job, rows: list[ResultRow]) -> AttemptVerdict:
    """Return the verdict on a kernel."""
    optional = frozenset(part.op for part in job.operators if not part.required)
    if all(tally.op in optional and tally.declined for tally in tally_by_op(rows).values()):
        optional = frozenset()  # a kernel may not decline everything, so report what it raised
    races = frozenset(part.op for part in job.operators if any(c.phase == "performance" for c in part.cases))
    apart = frozenset([job.kernel.name] if job.kernel.reference is not None else [])
    summary = Summary(
        {},
        (),
        optional,
        len(job.operators),
        planned_timed_units=apart if apart and races else races,
        separate_kernels=apart,
    )
    for row in rows:
        summary.add(row)
    return AttemptVerdict(is_correct(job, rows), "", feedback(summary, rows))


def _no_kernel(problem: str) -> AttemptVerdict:
    scores = {"verdicts": {}, "cases": 0, "correctness": 0.0, "performance": None}
    return AttemptVerdict(False, problem, {"scores": scores, "operators": [], "failures": [], "times": []})


def _problem(reason: str, reply: Reply, limit: int) -> str:
    if reply.stop == "max_tokens":
        return f"{reason}; the reply was cut off at {limit} tokens, so write a shorter one"
    if reply.stop == "refusal":
        return f"{reason}; the model refused to answer"
    return reason


def judged_attempts(journal: Journal, options: GenerationOptions, task: Task) -> Iterator[Attempt]:
    """Yield the attempts at an operator that were judged before the run was interrupted."""
    for past_round in journal.judged_rounds(task.name, options.workers, options.rounds):
        file = past_round.path / f"kernel{DSLS[options.dsl]}"
        if (verdict := past_round.verdict()) is not None:
            yield Attempt.from_verdict(past_round, file if file.exists() else None, verdict, task.authority)
