"""The judge process for a model.

It runs the model with kernels, without them and in float64, compares and times the runs, and finds
the faulty kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from opforge.judge.forbidden_calls import forbidden_operators
from opforge.judge.kernel_worker import KernelWorker, WorkerConfig, WorkerDiedError
from opforge.judge.verdict import RejectedError, Verdict, VerdictKind
from opforge.judge.worker_folders import WorkerFolders
from opforge.models import bisect
from opforge.models.baseline import Baseline, run_baseline
from opforge.models.first_wrong_call import WrongCallFinder, WrongCallReport
from opforge.models.job import ModelJob, ModelKernel
from opforge.models.model_process import ModelProcess, ModelProcessError, ReportedCalls
from opforge.models.tensor_comparison import TensorComparison
from opforge.models.timing import measure_speedup, profile_kernels
from opforge.ops import table
from opforge.procs.channel import Channel
from opforge.sandbox.host.client import Spawner


def serve(config: dict[str, Any], fds: list[int]) -> None:
    """Judge one model and send the report."""
    channel, spawner = Channel.from_fd(fds[0]), Spawner.from_fd(fds[1])
    judge = ModelJudge(channel, spawner, ModelJob.from_wire(config["job"]))
    channel.send({"report": judge.judge()})


@dataclass
class TrialResult:
    """The result of a run with some kernels installed."""

    kind: VerdictKind
    reason: str = ""
    prime_suspect: str = ""
    """The kernel that was running when the process died, as reported by the process."""
    comparisons: list[TensorComparison] = field(default_factory=list)
    call_counts: list[ReportedCalls] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return self.kind is VerdictKind.PASSED


class ModelJudge:
    """One model and the kernels of one backend."""

    def __init__(self, channel: Channel, spawner: Spawner, job: ModelJob) -> None:
        self._channel = channel
        self._spawner = spawner
        self._config = WorkerConfig(job.device, job.timeout_s, job.memory_bytes)
        self._worker_folders = WorkerFolders(spawner, run="", held=job.protected) if job.confined else None
        self._spec = job.spec
        self._kernels = {kernel.name: kernel for kernel in job.kernels}
        self._allow_fallback = job.allow_fallback
        self._dtype = ""
        self._trial_count = 0

    def judge(self) -> dict[str, Any]:
        """Return the report, or why there is none."""
        self._send_status("running the model without kernels")
        try:
            baseline = self._start_baseline()
        except ModelProcessError as error:
            return {"unusable": str(error)}
        try:
            return self._judge_against(baseline)
        finally:
            baseline.close()

    def _judge_against(self, baseline: Baseline) -> dict[str, Any]:
        kernels, unusable = self._load_kernels()
        trial, process = self._run_trial(baseline, kernels)
        report: dict[str, Any] = {
            "verdict": trial.kind.value,
            "reason": trial.reason,
            "dtype": self._dtype,
            "notes": baseline.notes,
            "results": [c.to_row() for c in trial.comparisons],
        }
        times: dict[str, Any] = {}
        try:
            if trial.passed and (cheats := self._find_cheats(baseline, trial.call_counts)):
                unusable |= {name: (verdict.kind, verdict.reason) for name, verdict in cheats.items()}
                report |= {"verdict": next(iter(cheats.values())).kind.value, "reason": _describe_cheats(cheats)}
            elif trial.passed and process is not None and any(t.answered for t in trial.call_counts):
                report["time"], times = self._measure_times(process, baseline.aten, trial.call_counts)
            elif not trial.passed:
                report["blame"] = self._find_faulty(baseline, kernels, trial)
        except RejectedError as error:
            report |= {"verdict": error.verdict.kind.value, "reason": error.verdict.reason}
        except ModelProcessError as error:
            report |= {"verdict": error.kind.value, "reason": f"while its kernels were checked or timed: {error}"}
        finally:
            if process is not None:
                process.close()
        report["kernels"] = _kernel_rows(self._kernels, trial, unusable, times)
        return report

    def _start_baseline(self) -> Baseline:
        """Return the runs of ATen and of float64."""
        plain = self._start([])
        self._dtype = plain.build(self._spec, wide=False)
        exact: ModelProcess | None = None
        float64_error = ""
        if self._dtype != "f64":
            self._send_status("running the model in float64")
            exact = self._start([])
            try:
                exact.build(self._spec, wide=True)
            except ModelProcessError as error:
                exact.close()
                exact, float64_error = None, str(error)
        baseline = run_baseline(plain, exact)
        if float64_error:
            baseline.notes.append(
                f"the model cannot be made in float64, so kernels are compared with ATen only: {float64_error}"
            )
        return baseline

    def _start(self, kernels: Sequence[str]) -> ModelProcess:
        target = self._spec.target
        files: list[tuple[str | None, str | None]] = [(target.reads, None)]
        files += [self._kernels[name].readable_files for name in kernels]
        confinement = (
            None if self._worker_folders is None else self._worker_folders.shared_confinement(files, target.folder)
        )
        return ModelProcess.start(self._spawner, self._config, confinement)

    def _load_kernels(self) -> tuple[list[str], dict[str, tuple[VerdictKind, str]]]:
        """Return the loadable kernels, and why the others failed; each crash costs a process."""
        names = [name for name, kernel in self._kernels.items() if not kernel.broken]
        unusable = {n: (VerdictKind.ERROR, k.broken) for n, k in self._kernels.items() if k.broken}
        while names:
            process = self._start(names)
            try:
                process.install([self._kernels[name] for name in names])
                failed = {
                    name: (VerdictKind.ERROR, f"cannot be loaded: {reason}") for name, reason in process.broken.items()
                }
            except ModelProcessError as error:
                if error.running_kernel not in names:
                    raise
                failed = {error.running_kernel: (error.kind, f"while loading: {error}")}
            finally:
                process.close()
            unusable |= failed
            names = [name for name in names if name not in failed]
            if not failed:
                break
        return names, unusable

    def _run_trial(self, baseline: Baseline, kernels: Sequence[str]) -> tuple[TrialResult, ModelProcess | None]:
        """Run the model with kernels in a fresh process; return the process if the run passed."""
        self._trial_count += 1
        self._send_status(f"running the model with {len(kernels)} kernel{'s' if len(kernels) != 1 else ''}")
        process = self._start(kernels)
        try:
            process.build(self._spec, wide=False)
            process.install([self._kernels[name] for name in kernels])
            process.run()
            compared = baseline.compare(process, self._send_status)
        except ModelProcessError as error:
            process.close()
            return self._with_breaches(_failed_trial(error, process.call_counts), process, baseline), None
        trial = TrialResult(VerdictKind.PASSED, "", "", compared, process.call_counts, process.refused)
        if wrong := sorted((c for c in compared if not c.passed), key=lambda c: -c.excess):
            suffix = f", and {len(wrong) - 1} more of {len(compared)} results" if len(wrong) > 1 else ""
            trial.kind, trial.reason = VerdictKind.WRONG, f"{wrong[0].reason}{suffix}"
        if self._with_breaches(trial, process, baseline).passed:
            return trial, process
        process.close()
        return trial, None

    def _with_breaches(self, trial: TrialResult, process: ModelProcess, baseline: Baseline) -> TrialResult:
        """Return a trial, marked as cheated if its process has breaches that ATen's has not."""
        if breaches := [b for b in process.breaches if b not in baseline.aten.breaches]:
            trial.kind, trial.reason = VerdictKind.CHEATED, "; ".join(breaches)
        return trial

    def _measure_times(
        self, process: ModelProcess, aten: ModelProcess, call_counts: list[ReportedCalls]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        self._send_status("timing the model with kernels and without")
        times = measure_speedup(process, aten)
        served = [(t.kernel, t.op) for t in call_counts if t.answered or t.fallbacks]
        return times, profile_kernels(process, aten, served)

    def _find_faulty(self, baseline: Baseline, kernels: Sequence[str], trial: TrialResult) -> dict[str, Any]:
        """Return the faulty kernels, each with the first call at which its answer is wrong."""
        trials_before = self._trial_count
        called = {t.kernel for t in trial.call_counts} | {trial.prime_suspect}
        died = trial.kind in (VerdictKind.CRASHED, VerdictKind.TIMED_OUT)  # the counts are lost with the process
        suspects = [name for name in kernels if died or name in called]
        alone: dict[str, TrialResult] = {}

        def fails(names: Sequence[str]) -> bool:
            result, process = self._run_trial(baseline, names)
            if process is not None:
                process.close()
            if len(names) == 1:
                alone[names[0]] = result
            return not result.passed

        blame = bisect.find_faulty(suspects or list(kernels), fails, trial.prime_suspect)
        guilty = []
        for name in blame.faulty:
            result = alone.get(name, trial)
            row = {
                "kernel": name,
                "file": self._kernels[name].file,
                "verdict": result.kind.value,
                "reason": result.reason,
            }
            guilty.append({**row, **self._find_wrong_call(baseline, name).to_row()})
        together = [
            [
                {"kernel": name, "file": self._kernels[name].file, **self._find_wrong_call(baseline, name).to_row()}
                for name in group
            ]
            for group in blame.faulty_sets
        ]
        return {"guilty": guilty, "together": together, "trials": self._trial_count - trials_before}

    def _find_wrong_call(self, baseline: Baseline, name: str) -> WrongCallReport:
        """Find the first call at which a kernel's answer is wrong."""
        self._send_status(f"checking the calls of {name}")
        try:
            with self._finder(name) as finder:
                return finder.find_first(baseline.aten)
        except (WorkerDiedError, ModelProcessError):
            return WrongCallReport()

    def _find_cheats(self, baseline: Baseline, call_counts: Sequence[ReportedCalls]) -> dict[str, Verdict]:
        """Return the kernels that call the operator they replace, or end their process, each with its verdict.

        In the model's process ATen's operators are in use, so each kernel gets a call of each of its
        operators again in a worker of its own, with the traps of a run. A kernel that knows the two
        processes apart can be honest there; a run and its proof are what holds.
        """
        if self._allow_fallback:
            return {}
        served: dict[str, list[str]] = {}
        for calls in call_counts:
            if calls.answered and calls.kernel in self._kernels:
                served.setdefault(calls.kernel, []).append(calls.op)
        cheats: dict[str, Verdict] = {}
        for name, ops in served.items():
            self._send_status(f"checking what {name} calls")
            forbidden = forbidden_operators(op for op in map(table().get, self._kernels[name].ops) if op is not None)
            try:
                with self._finder(name, forbidden) as finder:
                    verdict = finder.first_cheat(baseline.aten, ops)
            except WorkerDiedError as death:
                verdict = Verdict(death.kind, str(death))
            if verdict is not None:
                cheats[name] = verdict
        return cheats

    @contextmanager
    def _finder(self, name: str, forbidden: Sequence[str] = ()) -> Iterator[WrongCallFinder]:
        """Yield a finder whose worker runs one kernel, with traps at forbidden operators."""
        kernel = self._kernels[name]
        confinement = (
            None if self._worker_folders is None else self._worker_folders.shared_confinement([kernel.readable_files])
        )
        worker = KernelWorker(self._spawner, self._config, confinement)
        try:
            yield WrongCallFinder(worker, self._config, kernel, forbidden)
        finally:
            worker.close()

    def _send_status(self, message: str) -> None:
        self._channel.send({"doing": message})


def _failed_trial(error: ModelProcessError, call_counts: list[ReportedCalls]) -> TrialResult:
    """Return the trial of a process that died or raised, with the responsible kernel if known."""
    raised = next((t for t in call_counts if t.raised), None)
    if raised is not None and error.kind is VerdictKind.ERROR:
        reason = f"{raised.kernel}, for {raised.op}, raised {raised.raised}"
        return TrialResult(error.kind, reason, raised.kernel, [], call_counts)
    prefix = f"in {error.running_kernel}: " if error.running_kernel else ""
    return TrialResult(error.kind, f"{prefix}{error}", error.running_kernel, [], call_counts)


def _describe_cheats(cheats: dict[str, Verdict]) -> str:
    (name, verdict), *others = cheats.items()
    return f"{name} {verdict.reason}" + (f", and {len(others)} more kernels" if others else "")


def _kernel_rows(
    kernels: dict[str, ModelKernel],
    trial: TrialResult,
    unusable: dict[str, tuple[VerdictKind, str]],
    times: dict[str, Any],
) -> list[dict[str, Any]]:
    """Return the statistics of each kernel, including those never called."""
    rows = []
    for name, kernel in kernels.items():
        tallies = [t for t in trial.call_counts if t.kernel == name]
        reasons: dict[str, int] = {}
        for tally in tallies:
            for reason, count in tally.fallbacks.items():
                reasons[reason] = reasons.get(reason, 0) + count
        row: dict[str, Any] = {
            "kernel": name,
            "file": kernel.file,
            "calls": sum(t.answered for t in tallies),
            "ops": {t.op: t.answered for t in tallies},
            "fallbacks": sum(reasons.values()),
            "fallback_reasons": reasons,
            "refused": {op: why for op, why in trial.refused.items() if kernel.ops.get(op)},
            **times.get(name, {}),
        }
        if name in unusable:
            outcome, why = unusable[name]
            row |= {"verdict": outcome.value, "reason": why}
        rows.append(row)
    return rows
