"""Build a folder of C++ and CUDA libraries, each into a shared library and a Python package."""

from __future__ import annotations

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from opforge.authoring.package import write_package
from opforge.errors import NothingToJudgeError, OpforgeError
from opforge.kernels.native import building, clashes, compiler, looking, sources, toolchain
from opforge.suites.base import Progress, silent


@dataclass(frozen=True, slots=True)
class Library:
    """The result of building one library."""

    name: str
    namespace: str
    files: tuple[str, ...]
    status: str
    """``built``, ``cached`` (built earlier) or ``failed``."""
    seconds: float = 0.0
    abi: str = ""
    package: str = ""
    """Folder of the Python package; empty if there is none."""
    operators: dict[str, str] | None = None
    """Schemas by operator name."""
    error: str = ""

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "operators": self.operators or {}}


@dataclass(frozen=True, slots=True)
class Wishes:
    """Build options."""

    out: Path | None = None
    """Folder for the packages; by default ``build`` in the source folder."""
    namespace: str = ""
    """Namespace that replaces the folder's name; for one library only."""
    flags: tuple[str, ...] = ()
    target: str = toolchain.OLDEST_TARGET
    workers: int = 2
    timeout_s: float = compiler.LIMIT_S


def units_in(directory: Path, wishes: Wishes = Wishes()) -> list[building.Unit]:  # frozen
    """Return the libraries of a folder: itself if it holds sources, else its subfolders that do."""
    if not directory.is_dir():
        raise OpforgeError(f"there is no folder {str(directory)!r} to build; give one that holds C++ or CUDA sources")
    toolchain.target_version(wishes.target)
    folder = directory.resolve()
    own_sources = [path for path in folder.iterdir() if path.suffix in sources.SOURCES]
    subfolders = [
        f
        for f in sorted(folder.iterdir())
        if f.is_dir() and not f.name.startswith((".", "_")) and f.name not in sources.SKIPPED
    ]
    files_by_folder = {f: files for f in ([folder] if own_sources else subfolders) if (files := sources.sources_in(f))}
    if not files_by_folder:
        kinds = ", ".join(sources.SOURCES)
        raise NothingToJudgeError(
            f"nothing to build in {str(directory)!r}: neither it nor a folder in it holds a source ({kinds}); one folder is one library"
        )
    if wishes.namespace and len(files_by_folder) > 1:
        names = ", ".join(f.name for f in files_by_folder)
        raise OpforgeError(
            f"--namespace {wishes.namespace} goes with one library, and {str(directory)!r} holds {names}; name one of them"
        )
    return [_unit(f, files, wishes) for f, files in files_by_folder.items()]


def _unit(folder: Path, files: Sequence[Path], wishes: Wishes) -> building.Unit:
    name = building.checked_namespace(re.sub(r"[-.\s]", "_", folder.name))
    namespace = building.checked_namespace(wishes.namespace or name)
    return building.Unit(name, tuple(files), folder, namespace, wishes.flags, wishes.target)


def registrations_of(unit: building.Unit) -> list[sources.Registration]:
    """Return the registrations found in the sources of a unit, as far as they can be parsed."""
    names = dict.fromkeys(building.NAMESPACE_MACROS, unit.own_namespace)
    return [block for file in unit.files for block in sources.registrations(file, names)]


def build_folder(directory: Path, wishes: Wishes = Wishes(), progress: Progress = silent) -> list[Library]:  # frozen
    """Build the libraries of a folder.

    Failed libraries are part of the result. Clashes between sources raise before any build.
    """
    units = units_in(directory, wishes)
    if source_clashes := clashes.clashes_of_sources({unit.name: registrations_of(unit) for unit in units}):
        raise clashes.ClashError(source_clashes)
    out = (wishes.out or directory / "build").absolute()
    outcomes = _make(units, wishes, progress)
    built = [result for result in outcomes.values() if isinstance(result, building.Built)]
    progress("looking at what was built", len(units), len(units) + 1)
    looks = (
        dict(zip((result.name for result in built), looking.look([[result.library] for result in built]), strict=True))
        if built
        else {}
    )
    library_clashes = {
        clash.second: clash
        for clash in clashes.clashes_of_libraries([look for look in looks.values() if not look.error])
    }
    return [_library(unit, outcomes[unit.name], looks.get(unit.name), library_clashes, out) for unit in units]


def _make(
    units: Sequence[building.Unit], wishes: Wishes, progress: Progress
) -> dict[str, building.Built | building.BuildError]:
    outcomes: dict[str, building.Built | building.BuildError] = {}
    with ThreadPoolExecutor(wishes.workers) as pool:
        units_by_future = {pool.submit(building.build, unit, limit_s=wishes.timeout_s): unit for unit in units}
        progress(f"building {', '.join(unit.name for unit in units)}", 0, len(units) + 1)
        for future in as_completed(units_by_future):
            name = units_by_future[future].name
            try:
                outcomes[name] = future.result()
            except building.BuildError as error:
                outcomes[name] = error
            progress(f"building {name}", len(outcomes), len(units) + 1)
    return outcomes


def _library(
    unit: building.Unit,
    outcome: building.Built | building.BuildError,
    look: looking.Look | None,
    library_clashes: dict[str, clashes.Clash],
    out: Path,
) -> Library:
    row = Library(unit.name, unit.own_namespace, tuple(map(str, unit.files)), "failed")
    if isinstance(outcome, building.BuildError) or look is None:
        return replace(row, error=str(outcome).removeprefix(f"{unit.name} "))
    row = replace(row, abi=outcome.abi, seconds=outcome.seconds)
    if look.error:
        return replace(row, error=f"cannot be loaded: {look.error}")
    if str(outcome.library) in library_clashes:
        return replace(row, error=str(library_clashes[str(outcome.library)]))
    if not look.operators:
        return replace(row, error=_no_operator(unit))
    package = write_package(out / unit.name, unit, outcome, look)
    status = "cached" if outcome.cached else "built"
    return replace(row, status=status, package=str(package), operators=look.operators)


def _no_operator(unit: building.Unit) -> str:
    return (
        "registers no operator: write a block STABLE_TORCH_LIBRARY(OPFORGE_NAMESPACE, m) "
        f'{{ m.def("name(Tensor self) -> Tensor"); }}, where OPFORGE_NAMESPACE stands for {unit.own_namespace}'
    )
