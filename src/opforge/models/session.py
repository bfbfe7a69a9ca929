"""The judge process for a model.

It runs the model with kernels, without them and in float64, compares and times the runs, and finds
the faulty kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from opforge.judge.rooms import Rooms
from opforge.judge.verdict import NotRightError, Outcome
from opforge.judge.workers import DeathError, KernelWorker, WorkerConfig
from opforge.models import bisect
from opforge.models.compare import Compared
from opforge.models.locate import Located, Locator
from opforge.models.process import ModelError, ModelProcess, Recipe, Tally
from opforge.models.race import profile, race
from opforge.models.standard import Standard, standard
from opforge.models.target import Target
from opforge.sandbox.client import Spawner
from opforge.sandbox.wire import Channel


def serve(config: dict[str, Any], fds: list[int]) -> None:
    """Judge one model and send the report."""
    channel, spawner = Channel.from_fd(fds[0]), Spawner.from_fd(fds[1])
    workers = WorkerConfig(config["device"], config["timeout_s"], config["memory_bytes"])
    rooms = Rooms(spawner, **config["confine"]) if config.get("confine") else None
    recipe = Recipe(Target.from_wire(config["target"]), config["dtype"], config["train"], config["seed"])
    session = Session(channel, spawner, workers, rooms, recipe, config["kernels"])
    channel.send({"report": session.judge()})


@dataclass
class Trial:
    """The result of a run with some kernels installed."""

    outcome: Outcome
    reason: str = ""
    kernel: str = ""
    """The kernel that was running when the process died, as reported by the process."""
    compared: list[Compared] = field(default_factory=list)
    tallies: list[Tally] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return self.outcome is Outcome.PASSED


class Session:
    """One model and the kernels of one backend."""

    def __init__(
        self,
        channel: Channel,
        spawner: Spawner,
        config: WorkerConfig,
        rooms: Rooms | None,
        recipe: Recipe,
        kernels: list[dict[str, Any]],
    ) -> None:
        self._channel = channel
        self._spawner = spawner
        self._config = config
        self._rooms = rooms
        self._recipe = recipe
        self._kernels = {kernel["name"]: kernel for kernel in kernels}
        self._dtype = ""
        self._trial_count = 0

    def judge(self) -> dict[str, Any]:
        """Return the report, or why there is none."""
        self._say("running the model without kernels")
        try:
            baseline = self._start_baseline()
        except ModelError as error:
            return {"unusable": str(error)}
        try:
            return self._judged(baseline)
        finally:
            baseline.close()

    def _judged(self, baseline: Standard) -> dict[str, Any]:
        kernels, unusable = self._loadable()
        trial, process = self._try(baseline, kernels)
        report: dict[str, Any] = {
            "verdict": trial.outcome.value,
            "reason": trial.reason,
            "dtype": self._dtype,
            "notes": baseline.notes,
            "results": [c.row() for c in trial.compared],
        }
        times: dict[str, Any] = {}
        try:
            if trial.passed and process is not None and any(t.answered for t in trial.tallies):
                report["time"], times = self._times(process, baseline.plain, trial.tallies)
            elif not trial.passed:
                report["blame"] = self._blame(baseline, kernels, trial)
        except NotRightError as error:
            report |= {"verdict": error.finding.outcome.value, "reason": error.finding.reason}
        except ModelError as error:
            report |= {"verdict": error.outcome.value, "reason": f"while it was timed: {error}"}
        finally:
            if process is not None:
                process.close()
        report["kernels"] = _kernel_rows(self._kernels, trial, unusable, times)
        return report

    def _start_baseline(self) -> Standard:
        """Return the runs of ATen and of float64."""
        plain = self._start([])
        self._dtype = plain.build(self._recipe, wide=False)
        exact: ModelProcess | None = None
        float64_error = ""
        if self._dtype != "f64":
            self._say("running the model in float64")
            exact = self._start([])
            try:
                exact.build(self._recipe, wide=True)
            except ModelError as error:
                exact.close()
                exact, float64_error = None, str(error)
        baseline = standard(plain, exact)
        if float64_error:
            baseline.notes.append(
                f"the model cannot be made in float64, so kernels are held against ATen alone: {float64_error}"
            )
        return baseline

    def _start(self, kernels: Sequence[str]) -> ModelProcess:
        target = self._recipe.target
        files: list[tuple[str | None, str | None]] = [(target.reads, None)]
        files += [(self._kernels[name]["file"], self._kernels[name].get("library")) for name in kernels]
        room = None if self._rooms is None else self._rooms.shared(files, target.folder)
        return ModelProcess.start(self._spawner, self._config, room)

    def _loadable(self) -> tuple[list[str], dict[str, tuple[Outcome, str]]]:
        """Return the loadable kernels, and why the others failed; each crash costs a process."""
        names = [name for name, kernel in self._kernels.items() if not kernel.get("broken")]
        unusable = {n: (Outcome.ERROR, k["broken"]) for n, k in self._kernels.items() if k.get("broken")}
        while names:
            process = self._start(names)
            try:
                process.install([self._kernels[name] for name in names])
                failed = {
                    name: (Outcome.ERROR, f"cannot be loaded: {reason}") for name, reason in process.broken.items()
                }
            except ModelError as error:
                if error.kernel not in names:
                    raise
                failed = {error.kernel: (error.outcome, f"while loading: {error}")}
            finally:
                process.close()
            unusable |= failed
            names = [name for name in names if name not in failed]
            if not failed:
                break
        return names, unusable

    def _try(self, baseline: Standard, kernels: Sequence[str]) -> tuple[Trial, ModelProcess | None]:
        """Run the model with kernels in a fresh process; return the process if the run passed."""
        self._trial_count += 1
        self._say(f"running the model with {len(kernels)} kernel{'s' if len(kernels) != 1 else ''}")
        process = self._start(kernels)
        try:
            process.build(self._recipe, wide=False)
            process.install([self._kernels[name] for name in kernels])
            process.run()
            compared = baseline.compare(process, self._say)
        except ModelError as error:
            process.close()
            return self._with_breaches(_failed(error, process.tallies), process, baseline), None
        trial = Trial(Outcome.PASSED, "", "", compared, process.tallies, process.refused)
        if wrong := sorted((c for c in compared if not c.right), key=lambda c: -c.excess):
            suffix = f", and {len(wrong) - 1} more of {len(compared)} results" if len(wrong) > 1 else ""
            trial.outcome, trial.reason = Outcome.WRONG, f"{wrong[0].reason}{suffix}"
        if self._with_breaches(trial, process, baseline).passed:
            return trial, process
        process.close()
        return trial, None

    def _with_breaches(self, trial: Trial, process: ModelProcess, baseline: Standard) -> Trial:
        """Return a trial, marked as cheated if its process has breaches that ATen's has not."""
        if breaches := [b for b in process.breaches if b not in baseline.plain.breaches]:
            trial.outcome, trial.reason = Outcome.CHEATED, "; ".join(breaches)
        return trial

    def _times(
        self, process: ModelProcess, plain: ModelProcess, tallies: list[Tally]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        self._say("timing the model with kernels and without")
        times = race(process, plain)
        served = [(t.kernel, t.op) for t in tallies if t.answered or t.fallbacks]
        return times, profile(process, plain, served)

    def _blame(self, baseline: Standard, kernels: Sequence[str], trial: Trial) -> dict[str, Any]:
        """Return the faulty kernels, each with the first call at which its answer is wrong."""
        trials_before = self._trial_count
        called = {t.kernel for t in trial.tallies} | {trial.kernel}
        died = trial.outcome in (Outcome.CRASHED, Outcome.TIMED_OUT)  # the counts are lost with the process
        suspects = [name for name in kernels if died or name in called]
        alone: dict[str, Trial] = {}

        def fails(names: Sequence[str]) -> bool:
            result, process = self._try(baseline, names)
            if process is not None:
                process.close()
            if len(names) == 1:
                alone[names[0]] = result
            return not result.passed

        blame = bisect.find(suspects or list(kernels), fails, trial.kernel)
        guilty = []
        for name in blame.guilty:
            result = alone.get(name, trial)
            row = {
                "kernel": name,
                "file": self._kernels[name]["file"],
                "verdict": result.outcome.value,
                "reason": result.reason,
            }
            guilty.append({**row, **self._located(baseline, name).row()})
        together = [
            [
                {"kernel": name, "file": self._kernels[name]["file"], **self._located(baseline, name).row()}
                for name in group
            ]
            for group in blame.together
        ]
        return {"guilty": guilty, "together": together, "trials": self._trial_count - trials_before}

    def _located(self, baseline: Standard, name: str) -> Located:
        """Find the first call at which a kernel's answer is wrong."""
        self._say(f"looking at the calls of {name}")
        kernel = self._kernels[name]
        room = None if self._rooms is None else self._rooms.shared([(kernel["file"], kernel.get("library"))])
        worker = KernelWorker(self._spawner, self._config, room)
        try:
            return Locator(worker, self._config, kernel).first_off(
                baseline.plain, [op for op, _required in kernel["ops"]]
            )
        except (DeathError, ModelError):
            return Located()
        finally:
            worker.close()

    def _say(self, message: str) -> None:
        self._channel.send({"doing": message})


def _failed(error: ModelError, tallies: list[Tally]) -> Trial:
    """Return the trial of a process that died or raised, with the responsible kernel if known."""
    raised = next((t for t in tallies if t.raised), None)
    if raised is not None and error.outcome is Outcome.ERROR:
        reason = f"{raised.kernel}, for {raised.op}, raised {raised.raised}"
        return Trial(error.outcome, reason, raised.kernel, [], tallies)
    prefix = f"in {error.kernel}: " if error.kernel else ""
    return Trial(error.outcome, f"{prefix}{error}", error.kernel, [], tallies)


def _kernel_rows(
    kernels: dict[str, dict[str, Any]], trial: Trial, unusable: dict[str, tuple[Outcome, str]], times: dict[str, Any]
) -> list[dict[str, Any]]:
    """Return the statistics of each kernel, including those never called."""
    rows = []
    for name, kernel in kernels.items():
        tallies = [t for t in trial.tallies if t.kernel == name]
        reasons: dict[str, int] = {}
        for tally in tallies:
            for reason, count in tally.fallbacks.items():
                reasons[reason] = reasons.get(reason, 0) + count
        served = dict(kernel["ops"])
        row: dict[str, Any] = {
            "kernel": name,
            "file": kernel["file"],
            "calls": sum(t.answered for t in tallies),
            "ops": {t.op: t.answered for t in tallies},
            "fallbacks": sum(reasons.values()),
            "fallback_reasons": reasons,
            "refused": {op: why for op, why in trial.refused.items() if served.get(op)},
            **times.get(name, {}),
        }
        if name in unusable:
            outcome, why = unusable[name]
            row |= {"verdict": outcome.value, "reason": why}
        rows.append(row)
    return rows
