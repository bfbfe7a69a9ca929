"""Build the kernels of a run that are C++ or CUDA sources, before any of them is judged."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from opforge.errors import OpforgeError
from opforge.kernels import Kernel, native
from opforge.kernels.native.building import Within, unconfined
from opforge.runs.plan import Job
from opforge.suites.base import Progress


def with_libraries(jobs: Iterable[Job], workers: int, progress: Progress, within: Within = unconfined) -> list[Job]:
    """Return the jobs with a library for each kernel that must be compiled, or with the reason why it has none."""
    jobs = list(jobs)
    waiting = {job.kernel.file: job.kernel for job in jobs if native.is_native(job.kernel.file)}
    if not waiting:
        return jobs
    with ThreadPoolExecutor(workers) as pool:
        building = {file: pool.submit(_built, kernel, within) for file, kernel in waiting.items()}
        built = {}
        for number, (file, future) in enumerate(building.items()):
            progress(f"building {Path(file or '').name}", number, len(building))
            built[file] = future.result()
    return [replace(job, kernel=built.get(job.kernel.file, job.kernel)) for job in jobs]


def _built(kernel: Kernel, within: Within) -> Kernel:
    try:
        done = native.build(native.Unit.of_file(Path(kernel.file or "")), within=within)
    except native.BuildError as error:
        return replace(kernel, broken=error.reason)
    except OpforgeError as error:  # no compiler, no headers
        return replace(kernel, broken=f"cannot be built: {error}")
    return replace(kernel, library=str(done.library))
