"""Journal of kernel generation, written as it happens to `generation/` in a run's folder.

    requests.jsonl                            one line per answered or failed request:
                                              worker, tokens, cost, seconds
    OP/worker_K/round_N/prompt.md             the request
                        cost.json, reply.md   the reply
                        kernel.py             the code in it (or kernel.cpp, kernel.cu)
                        verdict.json          the judge's verdict
    OP/winner.json                            the attempt that was kept
    summary.json                              all operators, once all are done

Files are complete or absent. A reply that exists is not requested again, and a verdict that exists
is not judged again.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from opforge.cache import read_json, write_atomically
from opforge.generate.provider import Reply, Request, Spent, Usage

FOLDER = "generation"
_SUMMARY = "summary.json"
_REQUEST_LOG = "requests.jsonl"


@dataclass(frozen=True, slots=True)
class AttemptVerdict:
    """The judge's verdict on one attempt; `verdict.json`."""

    right: bool
    problem: str
    """Why there was no kernel to judge; empty if there was one."""
    report: Mapping[str, Any]
    """The output of `opforge run --format json` for the kernel."""

    def wire(self) -> dict[str, Any]:
        return {"right": self.right, "problem": self.problem, **self.report}

    @classmethod
    def from_wire(cls, row: Mapping[str, Any]) -> AttemptVerdict:
        return cls(row["right"], row["problem"], {k: v for k, v in row.items() if k not in ("right", "problem")})


@dataclass(frozen=True, slots=True)
class OperatorResult:
    """Result for one operator."""

    name: str
    file: str | None
    """File in a kernel directory; None if no attempt produced a kernel."""
    right: bool
    attempts: int
    explanation: str
    """Which attempt was kept, or why there is none."""

    def wire(self) -> dict[str, str | int | None]:
        return {"file": self.file, "right": self.right, "attempts": self.attempts, "words": self.explanation}

    @classmethod
    def from_wire(cls, name: str, row: Mapping[str, Any]) -> OperatorResult:
        return cls(name, row["file"], row["right"], row["attempts"], row["words"])


@dataclass(frozen=True, slots=True)
class Winner:
    """The attempt that was kept for an operator, with its source; `winner.json`."""

    result: OperatorResult
    source: str


@dataclass(frozen=True, slots=True)
class GenerationSummary:
    """Results and costs of all operators; `summary.json`."""

    model: str
    operators: tuple[OperatorResult, ...]
    spent: Spent
    stopped: str
    """Why the budget stopped the run; empty if it did not."""
    bounds: Mapping[str, float | None] | None
    """Spending limits; None in runs of older versions."""
    seconds: float
    judging_seconds: float
    asking_seconds: float

    def wire(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "operators": {kept.name: kept.wire() for kept in self.operators},
            "right": sum(1 for kept in self.operators if kept.right),
            "attempts": sum(kept.attempts for kept in self.operators),
            **asdict(self.spent),
            "cost": round(self.spent.cost, 6),
            "stopped": self.stopped,
            "bounds": self.bounds,
            "seconds": round(self.seconds, 3),
            "judging_seconds": round(self.judging_seconds, 3),
            "asking_seconds": round(self.asking_seconds, 3),
        }

    @classmethod
    def from_wire(cls, row: Mapping[str, Any]) -> GenerationSummary:
        return cls(
            row["model"],
            tuple(OperatorResult.from_wire(name, kept) for name, kept in row["operators"].items()),
            Spent(**{field.name: row[field.name] for field in fields(Spent)}),
            row["stopped"],
            row.get("bounds"),
            row["seconds"],
            row["judging_seconds"],
            row["asking_seconds"],
        )


@dataclass(frozen=True, slots=True)
class AnsweredRequest:
    """A request that was answered or failed; a line of `requests.jsonl`."""

    usage: Usage
    seconds: float
    digest: str = ""
    stop: str = ""
    """Why the reply ended."""
    failed: str | None = None
    """Why there is no reply; None if there is one."""

    def wire(self) -> dict[str, str | float | None]:
        outcome = {"digest": self.digest} if self.failed is None else {"digest": self.digest, "failed": self.failed}
        stop = {"stop": self.stop} if self.failed is None else {}
        return {**outcome, **asdict(self.usage), **stop, "seconds": round(self.seconds, 3)}

    @classmethod
    def from_wire(cls, row: Mapping[str, Any]) -> AnsweredRequest:
        usage = Usage.from_wire(row)
        return cls(usage, row.get("seconds", 0.0), row.get("digest", ""), row.get("stop", ""), row.get("failed"))


@dataclass(frozen=True, slots=True)
class Round:
    """Folder of one attempt."""

    path: Path
    op: str
    worker: int
    number: int

    @property
    def label(self) -> str:
        return f"{self.op}_worker_{self.worker}_round_{self.number}"

    def reply(self) -> Reply | None:
        """Return the reply; None if there is none yet."""
        try:
            text = (self.path / "reply.md").read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        row = read_json(self.path / "cost.json") or {}
        return Reply(text, Usage.from_wire(row), row.get("stop", "end"))

    def verdict(self) -> AttemptVerdict | None:
        row = read_json(self.path / "verdict.json")
        return AttemptVerdict.from_wire(row) if isinstance(row, dict) else None

    def write_prompt(self, request: Request) -> None:
        parts = [f"# system\n\n{request.system}", *(f"# {m.role}\n\n{m.text}" for m in request.messages)]
        write_atomically(self.path / "prompt.md", "\n\n".join(parts) + "\n")

    def write_reply(self, reply: Reply, seconds: float) -> None:
        """Write a reply. It counts as present once its text is, so the text is written last."""
        row = {**asdict(reply.usage), "stop": reply.stop, "seconds": round(seconds, 3)}
        _write_json(self.path / "cost.json", row)
        write_atomically(self.path / "reply.md", reply.text)

    def write_kernel(self, source: str, suffix: str) -> Path:
        path = self.path / f"kernel{suffix}"
        write_atomically(path, source)
        return path

    def write_verdict(self, verdict: AttemptVerdict) -> None:
        _write_json(self.path / "verdict.json", verdict.wire())


class Journal:
    """The `generation/` folder of a run."""

    def __init__(self, run: Path) -> None:
        self.path = run / FOLDER
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()

    def round(self, op: str, worker: int, number: int) -> Round:
        return Round(self.path / op / f"worker_{worker}" / f"round_{number}", op, worker, number)

    def judged_rounds(self, op: str, workers: int, rounds: int) -> Iterator[Round]:
        """Yield the attempts at an operator that have a verdict."""
        for worker in range(1, workers + 1):
            for number in range(1, rounds + 1):
                attempt_round = self.round(op, worker, number)
                if (attempt_round.path / "verdict.json").exists():
                    yield attempt_round

    def log_request(self, attempt_round: Round, model: str, answered: AnsweredRequest) -> None:
        """Add a line about a request; it is on disk when this returns."""
        head = {"op": attempt_round.op, "worker": attempt_round.worker, "round": attempt_round.number, "model": model}
        line = json.dumps({**head, **answered.wire()}) + "\n"
        with self._lock, (self.path / _REQUEST_LOG).open("ab") as handle:
            if handle.tell() and not _ends_with_newline(self.path / _REQUEST_LOG):
                line = "\n" + line  # after a partial line of a killed process
            handle.write(line.encode())
            handle.flush()
            os.fsync(handle.fileno())

    def requests(self) -> Iterator[AnsweredRequest]:
        """Yield the requests so far, also of earlier processes; skip a partial line of a killed process."""
        try:
            text = (self.path / _REQUEST_LOG).read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return
        for line in text.splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict):
                yield AnsweredRequest.from_wire(row)

    def spent(self) -> Spent:
        """Return the total usage so far."""
        spent = Spent()
        for request in self.requests():
            spent = spent.plus(request.usage)
        return spent

    def sources(self, op: str) -> Iterator[str]:
        """Yield the kernels that were written for an operator."""
        for file in (self.path / op).glob("worker_*/round_*/kernel.*"):
            yield file.read_text(encoding="utf-8")

    def winner(self, op: str) -> Winner | None:
        row = read_json(self.path / op / "winner.json")
        return Winner(OperatorResult.from_wire(op, row), row["source"]) if isinstance(row, dict) else None

    def write_winner(self, winner: Winner) -> None:
        _write_json(self.path / winner.result.name / "winner.json", {**winner.result.wire(), "source": winner.source})

    def summary(self) -> GenerationSummary | None:
        row = read_json(self.path / _SUMMARY)
        return GenerationSummary.from_wire(row) if isinstance(row, dict) else None

    def drop_summary(self) -> None:
        (self.path / _SUMMARY).unlink(missing_ok=True)

    def write_summary(self, summary: GenerationSummary) -> None:
        _write_json(self.path / _SUMMARY, summary.wire())


def _write_json(path: Path, row: Mapping[str, Any]) -> None:
    write_atomically(path, json.dumps(row, indent=1) + "\n")


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as handle:
        handle.seek(-1, os.SEEK_END)
        return handle.read(1) == b"\n"
