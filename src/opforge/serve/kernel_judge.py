"""Judges the kernels of requests, and stores each verdict as an ordinary run."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from opforge.backends.directory import kernel_from_file
from opforge.errors import OpforgeError
from opforge.ops import table
from opforge.reports.feedback import feedback
from opforge.runs.config import RunConfig
from opforge.runs.execute.judge_pool import start_server
from opforge.runs.execute.local import ThisMachine
from opforge.runs.execute.service import JudgingService, is_correct
from opforge.runs.pipeline import describe_machine, store_verdicts
from opforge.runs.plan import Job, OperatorCases, Plan, load_suite
from opforge.sandbox.host import system_check
from opforge.sandbox.host.admission import Version
from opforge.serve.judge_request import SUFFIXES, JudgeRequest, cases_of
from opforge.serve.request_store import StoredRequest
from opforge.serve.reward import reward
from opforge.suites import LoadedSuite
from opforge.suites.base import Progress, no_progress


class KernelJudge:
    """One fork server with its judges, for the kernels of all clients."""

    def __init__(self, config: RunConfig, folder: Path, progress: Progress = no_progress) -> None:
        """Load the suite and start the judges; raises if kernels cannot be confined here."""
        self._config = config = config.checked()
        self._folder = folder
        with ExitStack() as stack:
            server = start_server(config.device)
            stack.callback(server.close)
            executor = ThisMachine(config, server)
            self._machine = describe_machine(config, executor)
            self._confinement = executor.confinement()
            if missing := set(system_check.SHARED_SERVER_PROTECTIONS) & set(self._confinement["missing"]):
                raise OpforgeError(
                    f"not protected on this system: {', '.join(sorted(missing))}; kernels of strangers are judged "
                    "only where they can be confined (docs/confinement.md)"
                )
            self.suite = load_suite(config, progress)
            progress(f"peaks of {config.device}", 0, 1)
            self._peaks = executor.peaks()
            confine = {"run": str(folder.resolve()), "held": not self._confinement["missing"]}
            self.service = stack.enter_context(
                JudgingService(config, server, self.suite, confine, self._peaks, limit_judges=True)
            )
            self._stack = stack.pop_all()

    @property
    def settings_digest(self) -> str:
        """Return a digest of what decides answers besides the requests: versions, device, suite and limits."""
        version = Version.here()
        settings = [version.opforge, version.torch, version.python, self._config.as_json(), self.suite.digest]
        return hashlib.blake2b(json.dumps(settings, default=str, sort_keys=True).encode(), digest_size=16).hexdigest()

    @property
    def workers(self) -> int:
        return self._config.workers

    def check(self, request: JudgeRequest) -> None:
        """Raise if a request cannot be judged: its operator, its calls."""
        request.checked()
        primary = table().resolve(request.op).name
        family, others = table().served_by(request.op)
        cases_of(request, {op.name: True for op in family} | {op.name: False for op in others}, primary, self.suite)

    def run_folder(self, identifier: str) -> Path:
        """Return the folder of the run that a request becomes."""
        return self._folder / "runs" / identifier[:2] / identifier

    def judge(self, stored: StoredRequest) -> dict[str, Any]:
        """Judge a request's kernel, store the run, and return the answer."""
        began = time.monotonic()
        request, out = stored.request, self.run_folder(stored.id)
        shutil.rmtree(out, ignore_errors=True)  # left by a server that was killed
        primary = table().resolve(request.op)
        name = primary.name.replace(".", "__") if "." in request.op else primary.base
        file = out / "kernels" / name / f"{name}_implementation_1{SUFFIXES[request.language]}"
        file.parent.mkdir(parents=True)
        file.write_text(request.source, encoding="utf-8")
        kernel = kernel_from_file(file, request.op)
        parts = cases_of(request, {s.op: s.required for s in kernel.serves}, primary.name, self.suite)
        served = {part.op for part in parts}
        job = Job(replace(kernel, serves=tuple(s for s in kernel.serves if s.op in served)), tuple(parts))
        rows = self.service.judge(job)
        suite = _suite_of(self.suite, parts)
        result = store_verdicts(
            replace(self._config, suite=suite.name, ops=(request.op,), ops_directory=str(out / "kernels")),
            Plan(suite, (job,), ()), rows,
            out / "run", machine=self._machine, confinement=self._confinement, peaks=self._peaks,
            command=["opforge", "serve"],
        )  # fmt: skip
        right = is_correct(job, rows)
        proofs = result.manifest.proofs
        return {
            "op": primary.name,
            "right": right,
            "reward": reward(request.reward, rows, is_right=right),
            "feedback": feedback(result.summary, rows),
            "proof": json.loads(Path(proofs.written[0]).read_text()) if right and proofs and proofs.written else None,
            "seconds": round(time.monotonic() - began, 3),
        }

    def close(self) -> None:
        """End the judges."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


def _suite_of(suite: LoadedSuite, parts: list[OperatorCases]) -> LoadedSuite:
    """Return the part of a suite that was judged; calls of the client's own are a suite by themselves."""
    cases = {part.op: part.cases for part in parts}
    if any(case.source == "given" for part in parts for case in part.cases):
        return LoadedSuite("given", cases)
    return replace(suite, cases=cases)
