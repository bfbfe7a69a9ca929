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
    own = [path for path in folder.iterdir() if path.suffix in sources.SOURCES]
    inside = [
        f
        for f in sorted(folder.iterdir())
        if f.is_dir() and not f.name.startswith((".", "_")) and f.name not in sources.SKIPPED
    ]
    found = {f: files for f in ([folder] if own else inside) if (files := sources.sources_in(f))}
    if not found:
        kinds = ", ".join(sources.SOURCES)
        raise NothingToJudgeError(
            f"nothing to build in {str(directory)!r}: neither it nor a folder in it holds a source ({kinds}); one folder is one library"
        )
    if wishes.namespace and len(found) > 1:
        names = ", ".join(f.name for f in found)
        raise OpforgeError(
            f"--namespace {wishes.namespace} goes with one library, and {str(directory)!r} holds {names}; name one of them"
        )
    return [_unit(f, files, wishes) for f, files in found.items()]


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
    if found := clashes.clashes_of_sources({unit.name: registrations_of(unit) for unit in units}):
        raise clashes.ClashError(found)
    out = (wishes.out or directory / "build").absolute()
    made = _make(units, wishes, progress)
    built = [one for one in made.values() if isinstance(one, building.Built)]
    progress("looking at what was built", len(units), len(units) + 1)
    looks = (
        dict(zip((one.name for one in built), looking.look([[one.library] for one in built]), strict=True))
        if built
        else {}
    )
    twice = {
        clash.second: clash
        for clash in clashes.clashes_of_libraries([look for look in looks.values() if not look.error])
    }
    return [_library(unit, made[unit.name], looks.get(unit.name), twice, out) for unit in units]


def _make(
    units: Sequence[building.Unit], wishes: Wishes, progress: Progress
) -> dict[str, building.Built | building.BuildError]:
    made: dict[str, building.Built | building.BuildError] = {}
    with ThreadPoolExecutor(wishes.workers) as pool:
        waiting = {pool.submit(building.build, unit, limit_s=wishes.timeout_s): unit for unit in units}
        progress(f"building {', '.join(unit.name for unit in units)}", 0, len(units) + 1)
        for future in as_completed(waiting):
            name = waiting[future].name
            try:
                made[name] = future.result()
            except building.BuildError as error:
                made[name] = error
            progress(f"building {name}", len(made), len(units) + 1)
    return made


def _library(
    unit: building.Unit,
    made: building.Built | building.BuildError,
    look: looking.Look | None,
    twice: dict[str, clashes.Clash],
    out: Path,
) -> Library:
    row = Library(unit.name, unit.own_namespace, tuple(map(str, unit.files)), "failed")
    if isinstance(made, building.BuildError) or look is None:
        return replace(row, error=str(made).removeprefix(f"{unit.name} "))
    row = replace(row, abi=made.abi, seconds=made.seconds)
    if look.error:
        return replace(row, error=f"cannot be loaded: {look.error}")
    if str(made.library) in twice:
        return replace(row, error=str(twice[str(made.library)]))
    if not look.operators:
        return replace(row, error=_no_operator(unit))
    package = write_package(out / unit.name, unit, made, look)
    status = "cached" if made.cached else "built"
    return replace(row, status=status, package=str(package), operators=look.operators)


def _no_operator(unit: building.Unit) -> str:
    return (
        "registers no operator: write a block STABLE_TORCH_LIBRARY(OPFORGE_NAMESPACE, m) "
        f'{{ m.def("name(Tensor self) -> Tensor"); }}, where OPFORGE_NAMESPACE stands for {unit.own_namespace}'
    )
