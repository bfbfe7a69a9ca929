"""Build the kernels of a run that are C++ or CUDA sources, before any of them is judged."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from opforge.errors import OpforgeError
from opforge.kernels import native
from opforge.kernels.native.builder import ConfinementPrefix, unconfined
from opforge.runs.plan import Job
from opforge.suites.base import Progress


def with_libraries(
    jobs: Iterable[Job], workers: int, progress: Progress, within: ConfinementPrefix = unconfined
) -> list[Job]:
    """Return the jobs with a library, or the reason why there is none, for each native source.

    Kernels and references may both be native.
    """
    jobs = list(jobs)
    files = dict.fromkeys(file for job in jobs for file in _files(job) if file and native.is_native(file))
    if not files:
        return jobs
    with ThreadPoolExecutor(workers) as pool:
        building = {file: pool.submit(library_of, Path(file), within) for file in files}
        built = {}
        for number, (file, future) in enumerate(building.items()):
            progress(f"building {Path(file).name}", number, len(building))
            built[file] = future.result()
    return [_with(job, built) for job in jobs]


def _files(job: Job) -> list[str | None]:
    reference = job.kernel.reference
    return [job.kernel.file, reference.file if reference is not None else None]


def _with(job: Job, built: Mapping[str, tuple[str, str]]) -> Job:
    kernel, not_built = job.kernel, ("", "")
    library, broken = built.get(kernel.file or "", not_built)
    kernel = replace(kernel, library=library, broken=broken)
    if kernel.reference is not None:
        library, broken = built.get(kernel.reference.file or "", not_built)
        kernel = replace(kernel, reference=replace(kernel.reference, library=library, broken=broken))
    return replace(job, kernel=kernel)


def library_of(file: Path, within: ConfinementPrefix) -> tuple[str, str]:
    """Return the library built from a source, or an empty path and the reason."""
    try:
        return str(native.build(native.LibrarySpec.of_file(file), confinement_prefix=within).library), ""
    except native.BuildError as error:
        return "", error.reason
    except OpforgeError as error:  # no compiler, no headers
        return "", f"cannot be built: {error}"
