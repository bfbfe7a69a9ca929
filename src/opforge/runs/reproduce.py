"""Repeat one case of a run: the same call and contents, with the current kernel."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from opforge import registry
from opforge.backends import Backend, BackendOptions
from opforge.backends.custom_ops import CustomOpsBackend
from opforge.backends.directory import DirectoryBackend
from opforge.backends.single import SingleBackend
from opforge.cases import Phase
from opforge.cases.case import Expect
from opforge.errors import OpforgeError, RunDirectoryError
from opforge.kernels import Kernel
from opforge.runs.config import RunConfig
from opforge.runs.manifest import PlannedKernel
from opforge.runs.pipeline import INPUTS, run
from opforge.runs.rows import ResultRow
from opforge.runs.store import read_manifest, read_rows
from opforge.suites import LoadedSuite, Suite, SuiteOptions
from opforge.suites.base import Progress, no_progress
from opforge.suites.given import GivenSuite, given_case
from opforge.suites.lookup import find_suite

_MAX_SHOWN_IDS = 5


@dataclass(frozen=True, slots=True)
class Reproduction:
    """A repeated case."""

    before: ResultRow
    """Its line in the run."""
    after: ResultRow
    """Its new line."""
    changed: tuple[str, ...]
    """Files that changed since the run: the kernel, a reference, input generators."""

    @property
    def is_same_verdict(self) -> bool:
        return self.before.verdict == self.after.verdict

    @property
    def exit_code(self) -> int:
        return 0 if self.after.verdict == "passed" else 1


def reproduce(
    folder: Path, case: str, out: Path, *, kernel: str | None = None, progress: Progress = no_progress
) -> Reproduction:
    """Judge one case of the run in ``folder`` again, into the new folder ``out``.

    Its settings are those of the run.
    """
    manifest = read_manifest(folder)
    before = find_row(folder, case, kernel)
    judged = {kernel.name: kernel for kernel in manifest.plan.kernels}[before.kernel]
    config = replace(
        RunConfig.from_json(manifest.config), ops=(before.op,), workers=1, executor="local", ray_address=""
    )
    suite = _SingleCaseSuite(_suite(config, before), before.id, folder / INPUTS)
    backend = _SingleKernelBackend(_backend(config, judged, before.op), before.kernel)
    result = run(config, out, progress=progress, suite=suite, backend=backend)
    (now,) = result.store.rows()
    (served,) = result.manifest.plan.kernels
    sources = manifest.plan.sources
    changed = [f for f, digest in result.manifest.plan.sources.items() if digest != sources.get(f)]
    if served.digest != judged.digest:
        changed.append(str(served.file))
    return Reproduction(before, now, tuple(sorted(changed)))


def find_row(folder: Path, case: str, kernel: str | None = None) -> ResultRow:
    """Return the line of a case, named by its id or an unambiguous prefix of it."""
    matches = [row for row in read_rows(folder) if case and row.id.startswith(case)]
    if not matches:
        raise OpforgeError(f"no case {case!r} in {str(folder)!r}; ids are in its results.jsonl and report.html")
    if kernel is not None:
        names = sorted({row.kernel for row in matches})
        matches = [row for row in matches if row.kernel == kernel]
        if not matches:
            raise OpforgeError(f"case {case!r} was not judged for kernel {kernel!r}; it was for: {', '.join(names)}")
    if len(matches) > 1:
        ids = sorted({row.id for row in matches})
        if len(ids) > 1:
            raise OpforgeError(f"{case!r} matches several ids: {', '.join(ids[:_MAX_SHOWN_IDS])}; give more characters")
        names = sorted({row.kernel for row in matches})
        raise OpforgeError(f"case {case!r} was judged for several kernels: {', '.join(names)}; say which with --kernel")
    return matches[0]


def _suite(config: RunConfig, row: ResultRow) -> Suite:
    """Return the run's suite; cases that a user gave are read from its lines, which do not say whether ATen raises."""
    if config.suite == GivenSuite.name:
        return GivenSuite(given_case(row.op, row.case, phase=Phase(row.phase), expect=expect) for expect in Expect)
    return find_suite(config.suite)


def _backend(config: RunConfig, kernel: PlannedKernel, op: str) -> Backend:
    """Return the run's backend, pinned to the judged implementation if there may be a newer one."""
    if config.backend == SingleBackend.name:
        return (
            SingleBackend.from_argument(kernel.file, op)
            if kernel.file is not None
            else SingleBackend.from_argument(f"aten:{op}")
        )
    backend_class = registry.load("backends", config.backend)
    makes = hasattr(backend_class, "make")  # its kernels were made in the run and are stored in a directory
    file = Path(kernel.file or "")
    if makes and kernel.reference is not None:
        return CustomOpsBackend(BackendOptions(custom_ops_root=file.parent.parent))
    if config.backend == DirectoryBackend.name or makes:
        config = replace(config, implementations={**config.implementations, file.parent.name: file.name})
        if makes:
            backend_class, config = DirectoryBackend, replace(config, ops_directory=str(file.parent.parent))
    backend: Backend = backend_class(config.backend_options)
    return backend


class _SingleCaseSuite:
    """A suite reduced to one case."""

    def __init__(self, suite: Suite, case: str, inputs: Path) -> None:
        self.name = suite.name
        self._suite = suite
        self._case = case
        self._inputs = inputs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._suite, name)

    def load(self, options: SuiteOptions, progress: Progress = no_progress) -> LoadedSuite:
        """Return the case; inputs made for the run are read from the run's folder."""
        if self._inputs.is_dir():
            options = replace(options, folder=self._inputs.resolve())
        loaded = self._suite.load(options, progress)
        chosen = {op: [c for c in cases if c.id == self._case] for op, cases in loaded.cases.items()}
        chosen = {op: cases for op, cases in chosen.items() if cases}
        if not chosen:
            raise RunDirectoryError(
                f"suite {self.name!r} has no case {self._case} any more: its source or torch has changed since the run"
            )
        return replace(loaded, cases=chosen)


class _SingleKernelBackend:
    """A backend reduced to one kernel."""

    def __init__(self, backend: Backend, kernel: str) -> None:
        self.name = backend.name
        self._backend = backend
        self._kernel = kernel

    def kernels(self, ops: Iterable[str]) -> list[Kernel]:
        matches = [k for k in self._backend.kernels(ops) if k.name == self._kernel]
        if not matches:
            raise RunDirectoryError(f"kernel {self._kernel} was removed after the run")
        return matches
