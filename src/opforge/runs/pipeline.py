"""A whole run: suite, backend, plan, execution, store, summary."""

from __future__ import annotations

import contextlib
import datetime as dt
import functools
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from opforge import registry
from opforge.backends import Backend
from opforge.cache import torch_version
from opforge.cases import Case
from opforge.cases.case import Expect
from opforge.errors import OpforgeError, RunDirectoryError
from opforge.kernels import Kernel
from opforge.kernels.hints import native_hints, python_hints
from opforge.kernels.native import is_native
from opforge.runs.config import RunConfig
from opforge.runs.execute.judge_pool import confinement_settings, start_server
from opforge.runs.execute.service import JudgingService
from opforge.runs.executors import Executor, Work
from opforge.runs.generation_context import GenerationContext, KernelGenerator
from opforge.runs.input_generators import case_maker
from opforge.runs.manifest import Activity, Machine, Manifest, PlannedKernel, PlanRecord, ProofsRecord, WeakOperators
from opforge.runs.plan import Job, Plan, load_suite, make_plan, selected_ops
from opforge.runs.proofs import write_proofs
from opforge.runs.rows import ResultRow, VerdictKey
from opforge.runs.score import Summary
from opforge.runs.store import RunStore
from opforge.runtime import untrusted_files as files
from opforge.sandbox.host import system_check
from opforge.sandbox.host.client import ForkServerHandle
from opforge.suites import LoadedSuite, Suite
from opforge.suites.base import MakeCases, Notice, Progress, no_notice, no_progress
from opforge.suites.lookup import find_suite
from opforge.suites.strength import stored_strength

INPUTS = "inputs"
"""Subfolder of a run's folder for cases made for this run."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """A finished run."""

    store: RunStore
    manifest: Manifest
    summary: Summary


def run(
    config: RunConfig,
    out: Path,
    *,
    resume: bool = False,
    progress: Progress = no_progress,
    notice: Notice = no_notice,
    command: list[str] | None = None,
    suite: Suite | None = None,
    backend: Backend | None = None,
) -> RunResult:
    """Judge a backend on a suite and store everything in ``out``.

    The suite and the backend are the registered ones unless given.
    """
    config = config.checked()
    backend = backend or registry.load("backends", config.backend)(config.backend_options)
    suite = suite or find_suite(config.suite)
    selected_ops(config, suite)  # report a misspelt operator before starting anything
    if isinstance(backend, KernelGenerator) and config.executor != "local":
        raise OpforgeError(
            f"backend {config.backend!r} judges its kernels on this machine while it makes them, not with --executor "
            f"{config.executor}; "
            f"judge them afterwards with --backend {'custom_ops' if config.suite == 'custom_ops' else 'directory'} "
            f"--executor {config.executor}"
        )
    executor_class = registry.load("executors", config.executor)
    server = start_server(config.device, confined=config.confine)
    executor: Executor | None = None
    try:
        executor = executor_class(config, server)
        machine = describe_machine(config, executor)
        if config.runtime == "native" and config.executor == "local":  # before anything is written
            progress("native runtime", 0, 1)
            system_check.load_native_runtime(server.spawner)
        with tempfile.TemporaryDirectory(prefix="opforge-inputs-") as temporary:
            folder = out / INPUTS if resume and (out / INPUTS).is_dir() else Path(temporary)
            loaded = load_suite(config, progress, suite, make=_input_maker(config, server, out), folder=folder)
            makes = isinstance(backend, KernelGenerator)
            plan = Plan(loaded, (), tuple(loaded.cases)) if makes else make_plan(config, backend, loaded)
            manifest = _manifest(config, plan, command or sys.argv, machine)
            store = RunStore.reopen(out) if resume else RunStore.create(out, manifest)
            plan = replace(plan, suite=_keep_blobs(loaded, folder, out / INPUTS))
        try:
            confinement = executor.confinement() if config.confine else system_check.no_protections()
            peaks = _peaks(config, plan, executor, progress)
            store.write_manifest(replace(store.manifest(), confinement=confinement, peaks=peaks))
            if isinstance(backend, KernelGenerator):
                plan = _generate_kernels(config, backend, plan.suite, store, server, progress, notice)
            return _judge(plan, store, executor, progress)
        finally:
            store.close()
    finally:
        if executor is not None:
            executor.close()
        server.close()


def store_verdicts(
    config: RunConfig,
    plan: Plan,
    rows: Iterable[ResultRow],
    out: Path,
    *,
    machine: Machine,
    confinement: dict[str, Any],
    peaks: dict[str, Any] | None,
    command: list[str],
) -> RunResult:
    """Store verdicts of a judging service as a finished run, with the proofs of its kernels."""
    manifest = replace(_manifest(config, plan, command, machine), confinement=confinement, peaks=peaks)
    store = RunStore.create(out, manifest)
    try:
        summary = Summary.start(manifest)
        named = [row._replace(suite=plan.suite.name) for row in rows]
        store.append(named)
        for row in named:
            summary.add(row)
        return _finished(plan, store, manifest, summary)
    finally:
        store.close()


def load_cases(config: RunConfig, suite: Suite, progress: Progress = no_progress) -> LoadedSuite:
    """Return the cases of a suite that makes them in the sandbox, to list them without running."""
    server = start_server(config.device, confined=config.confine)
    try:
        with tempfile.TemporaryDirectory(prefix="opforge-inputs-") as folder:
            make = _input_maker(config, server, Path(folder))
            return load_suite(config, progress, suite, make=make, folder=Path(folder))
    finally:
        server.close()


def _input_maker(config: RunConfig, server: ForkServerHandle, out: Path) -> MakeCases:
    """Return a function that makes inputs in the sandbox; it probes the confinement when called."""

    def make(files: Mapping[str, Path], blob: Path, name: str, progress: Progress) -> dict[str, list[Case]]:
        confine = None
        if config.confine:
            confine = {
                "run": str(out.resolve()),
                "held": not system_check.working_protections(server.spawner)["missing"],
            }
        return case_maker(config, server, confine)(files, blob, name, progress)

    return make


def _keep_blobs(loaded: LoadedSuite, source: Path, destination: Path) -> LoadedSuite:
    """Return the suite with the blobs made for this run copied into the run's folder."""
    if source == destination or not any(source.iterdir()):
        return loaded
    shutil.copytree(source, destination)
    blobs = {name: destination / path.name if path.parent == source else path for name, path in loaded.blobs.items()}
    return replace(loaded, blobs=blobs)


def _generate_kernels(
    config: RunConfig,
    backend: KernelGenerator,
    suite: LoadedSuite,
    store: RunStore,
    server: ForkServerHandle,
    progress: Progress,
    notice: Notice,
) -> Plan:
    """Let a backend make its kernels, judged as often as it likes, and plan with the results."""
    manifest = store.manifest()
    _check_sources_unchanged(manifest, suite)  # before any kernel is made from changed files
    if manifest.config.get("generation") != config.generation:
        settings = {**manifest.config, "generation": config.generation}
        store.write_manifest(replace(manifest, config=settings))
    empty_plan = _plan_record(config, Plan(suite, (), tuple(suite.cases)))
    confine = confinement_settings(config, store.path, manifest)
    with JudgingService(config, server, suite, confine, manifest.peaks) as judging:
        backend.make(
            GenerationContext(
                config, suite, store.path, manifest, judging, progress, notice, lambda: store.restart(empty_plan)
            )
        )
    plan = make_plan(config, backend, suite)
    manifest = store.manifest()
    if not manifest.plan.kernels:  # otherwise the run is resumed after the kernels were made
        store.write_manifest(replace(manifest, plan=_plan_record(config, plan)))
    return plan


def _judge(plan: Plan, store: RunStore, executor: Executor, progress: Progress) -> RunResult:
    manifest = store.manifest()
    _check_kernels_unchanged(manifest, plan)
    _check_sources_unchanged(manifest, plan.suite)
    summary = Summary.start(manifest)
    done: set[VerdictKey] = set()
    for row in store.rows():
        done.add(row.key)
        summary.add(row)
    jobs = [job for job in (j.without(done) for j in plan.jobs) if job.operators] if done else list(plan.jobs)
    count, total = len(done), plan.case_count

    def emit(rows: list[ResultRow]) -> None:
        nonlocal count
        rows = [row._replace(suite=plan.suite.name) for row in rows]
        store.append(rows)
        count += len(rows)
        for row in rows:
            summary.add(row)
        if rows:
            progress(rows[-1].op, count, total)

    def judging(ops: str) -> None:
        progress(ops, count, total)

    try:
        activity = executor.execute(Work(plan, jobs, emit, store.path, manifest, progress, judging))
    except BaseException:
        with contextlib.suppress(OSError, OpforgeError):  # the error that ended the run takes precedence
            _proofs(plan, store, manifest, finished=False)
        raise
    return _finished(plan, store, manifest, summary, activity)


def _finished(
    plan: Plan, store: RunStore, manifest: Manifest, summary: Summary, activity: Activity | None = None
) -> RunResult:
    """Write the proofs and scores of a run whose cases all have their verdicts."""
    proofs, scores = _proofs(plan, store, manifest), summary.scores()
    ended = replace(store.manifest(), finished=_utc_now(), scores=scores, proofs=proofs, activity=activity)
    store.write_manifest(ended)
    return RunResult(store, store.manifest(), summary)


def _proofs(plan: Plan, store: RunStore, manifest: Manifest, *, finished: bool = True) -> ProofsRecord:
    """Write proofs of the judged kernels beside their files; report those not writable."""
    raising = {
        case.id for job in plan.jobs for part in job.operators for case in part.cases if case.expect is Expect.RAISES
    }
    kernels = [job.kernel for job in plan.jobs]
    written = write_proofs(kernels, store.rows(), manifest, raising, finished=finished)
    return ProofsRecord(tuple(map(str, written.paths)), written.remarks)


def _peaks(config: RunConfig, plan: Plan, executor: Executor, progress: Progress) -> dict[str, Any] | None:
    """Return the device's measured peaks if anything is timed; measuring takes seconds, once."""
    if not plan.timed_units:
        return None
    progress(f"peaks of {config.device}", 0, 1)
    return executor.peaks()


def _check_kernels_unchanged(manifest: Manifest, plan: Plan) -> None:
    """Refuse to mix verdicts on two versions of a kernel, or of torch, in one run."""
    if (started_with := manifest.versions["torch"]) != torch_version():
        raise RunDirectoryError(
            f"the run was started with torch {started_with}, and this is {torch_version()}; start a new run with --out"
        )
    old_digests = {kernel.name: kernel.digest for kernel in manifest.plan.kernels}
    if gone := set(old_digests) - {job.kernel.name for job in plan.jobs}:
        raise RunDirectoryError(f"kernel {min(gone)} was removed after the run started; start a new run with --out")
    for job in plan.jobs:
        kernel = job.kernel
        if kernel.file is not None and old_digests.get(kernel.name) != kernel.digest:
            raise RunDirectoryError(
                f"kernel {kernel.name} ({kernel.file}) has changed since the run started; start a new run with --out"
            )


def _check_sources_unchanged(manifest: Manifest, suite: LoadedSuite) -> None:
    """Refuse to resume with changed cases or references."""
    for file, digest in manifest.plan.sources.items():
        if suite.sources.get(file) != digest:
            raise RunDirectoryError(f"{file} has changed since the run started; start a new run with --out")


def describe_machine(config: RunConfig, executor: Executor) -> Machine:
    name = executor.device_name()  # first: it checks the device
    return Machine(platform.platform(), platform.machine(), config.device, name, executor.overridden_by_torch())


def _manifest(config: RunConfig, plan: Plan, command: list[str], machine: Machine) -> Manifest:
    return Manifest(
        config.as_json(),
        _plan_record(config, plan),
        command=tuple(command),
        versions={name: _version(name) for name in ("opforge", "torch", "triton", "numpy")}
        | {"python": platform.python_version()},
        machine=machine,
        started=_utc_now(),
    )


def _plan_record(config: RunConfig, plan: Plan) -> PlanRecord:
    return PlanRecord(
        suite=plan.suite.name,
        suite_digest=plan.suite.digest,
        cases=plan.case_count,
        operators=plan.unit_count,
        missing=plan.missing,
        optional=tuple(sorted(plan.optional)),
        performance=plan.timed_units,
        kernels=tuple(map(_planned_kernel, plan.jobs)),
        sources=dict(plan.suite.sources),
        losses=tuple(plan.suite.losses),
        remarks=plan.remarks,
        weak=_weak_operators(config, plan),
    )


def _weak_operators(config: RunConfig, plan: Plan) -> WeakOperators:
    """Return the judged operators whose cases let mutants pass, and the origin of that data."""
    measured = stored_strength(config.suite, config.device, config.dtypes)
    if measured is None:
        return WeakOperators()
    return WeakOperators(measured.origin, measured.weak_among(p.op for job in plan.jobs for p in job.operators))


def _planned_kernel(job: Job) -> PlannedKernel:
    kernel = job.kernel
    return PlannedKernel(
        kernel.name,
        kernel.primary,
        kernel.file,
        kernel.digest,
        tuple(part.op for part in job.operators),
        _source_hints(kernel),
        None if kernel.reference is None else kernel.reference.name,
    )


def _source_hints(kernel: Kernel) -> tuple[str, ...]:
    """Return hints on a kernel's source; none if it cannot be read, as its verdicts will say."""
    if kernel.file is None:
        return ()
    find_hints = native_hints if is_native(kernel.file) else python_hints
    try:
        return tuple(find_hints(files.read_text(Path(kernel.file))))
    except OSError:
        return ()


@functools.cache
def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _utc_now() -> str:
    return dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
