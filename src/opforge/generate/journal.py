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
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from opforge.cache import read_json, write_atomically
from opforge.generate.budget import Spent
from opforge.generate.provider import Reply, Request, Usage

FOLDER = "generation"
_SUMMARY = "summary.json"
_REQUEST_LOG = "requests.jsonl"


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
        usage = Usage(row.get("input_tokens", 0), row.get("output_tokens", 0), row.get("cost"))
        return Reply(text, usage, row.get("stop", "end"))

    def verdict(self) -> dict[str, Any] | None:
        row = read_json(self.path / "verdict.json")
        return row if isinstance(row, dict) else None

    def write_prompt(self, request: Request) -> None:
        parts = [f"# system\n\n{request.system}", *(f"# {m.role}\n\n{m.text}" for m in request.messages)]
        write_atomically(self.path / "prompt.md", "\n\n".join(parts) + "\n")

    def write_reply(self, reply: Reply, seconds: float) -> None:
        """Write a reply. It counts as present once its text is, so the text is written last."""
        row = {**asdict(reply.usage), "stop": reply.stop, "seconds": round(seconds, 3)}
        write_atomically(self.path / "cost.json", json.dumps(row, indent=1) + "\n")
        write_atomically(self.path / "reply.md", reply.text)

    def write_kernel(self, source: str, suffix: str) -> Path:
        path = self.path / f"kernel{suffix}"
        write_atomically(path, source)
        return path

    def write_verdict(self, verdict: dict[str, Any]) -> None:
        write_atomically(self.path / "verdict.json", json.dumps(verdict, indent=1) + "\n")


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

    def log_request(self, attempt_round: Round, request: Request, **fields: Any) -> None:
        """Add a line about a request; it is on disk when this returns."""
        head = {
            "op": attempt_round.op,
            "worker": attempt_round.worker,
            "round": attempt_round.number,
            "model": request.model,
        }
        line = json.dumps({**head, **fields}) + "\n"
        with self._lock, (self.path / _REQUEST_LOG).open("ab") as handle:
            if handle.tell() and not _ends_with_newline(self.path / _REQUEST_LOG):
                line = "\n" + line  # after a partial line of a killed process
            handle.write(line.encode())
            handle.flush()
            os.fsync(handle.fileno())

    def requests(self) -> Iterator[dict[str, Any]]:
        """Yield the lines about requests; skip a partial line of a killed process."""
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
                yield row

    def usages(self) -> Iterator[Usage]:
        """Yield the usage of each request so far, also of earlier processes."""
        for row in self.requests():
            yield Usage(row.get("input_tokens", 0), row.get("output_tokens", 0), row.get("cost"))

    def spent(self) -> Spent:
        """Return the total usage so far."""
        spent = Spent()
        for usage in self.usages():
            spent = spent.plus(usage)
        return spent

    def sources(self, op: str) -> Iterator[str]:
        """Yield the kernels that were written for an operator."""
        for file in (self.path / op).glob("worker_*/round_*/kernel.*"):
            yield file.read_text(encoding="utf-8")

    def winner(self, op: str) -> dict[str, Any] | None:
        row = read_json(self.path / op / "winner.json")
        return row if isinstance(row, dict) else None

    def write_winner(self, op: str, row: dict[str, Any]) -> None:
        write_atomically(self.path / op / "winner.json", json.dumps(row, indent=1) + "\n")

    def summary(self) -> dict[str, Any] | None:
        row = read_json(self.path / _SUMMARY)
        return row if isinstance(row, dict) else None

    def drop_summary(self) -> None:
        (self.path / _SUMMARY).unlink(missing_ok=True)

    def write_summary(self, row: dict[str, Any]) -> None:
        write_atomically(self.path / _SUMMARY, json.dumps(row, indent=1) + "\n")


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as handle:
        handle.seek(-1, os.SEEK_END)
        return handle.read(1) == b"\n"
