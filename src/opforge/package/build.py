"""Build a folder of C++ and CUDA libraries, each into a shared library and a Python package."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from opforge.errors import NothingToJudgeError, OpforgeError
from opforge.kernels.native import builder, clashes, compiler, inspect, sources, toolchain
from opforge.package.library_package import write_library_package
from opforge.package.new import torch_namespaces
from opforge.suites.base import Progress, no_progress


@dataclass(frozen=True, slots=True)
class LibraryResult:
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
class BuildOptions:
    """Build options."""

    out: Path | None = None
    """Folder for the packages; by default ``build`` in the source folder."""
    namespace: str = ""
    """Namespace that replaces the folder's name; for one library only."""
    flags: tuple[str, ...] = ()
    target: str = toolchain.OLDEST_TORCH
    workers: int = 2
    timeout_s: float = compiler.COMPILE_LIMIT_S


def units_in(directory: Path, options: BuildOptions = BuildOptions()) -> list[builder.LibrarySpec]:  # frozen
    """Return the libraries of a folder: itself if it holds sources, else its subfolders that do."""
    if not directory.is_dir():
        raise OpforgeError(f"there is no folder {str(directory)!r} to build; give one that holds C++ or CUDA sources")
    toolchain.check_target(options.target)
    folder = directory.resolve()
    own_sources = [path for path in folder.iterdir() if path.suffix in sources.SOURCE_SUFFIXES]
    subfolders = [
        f
        for f in sorted(folder.iterdir())
        if f.is_dir() and not f.name.startswith((".", "_")) and f.name not in sources.SKIPPED_FOLDERS
    ]
    files_by_folder = {f: files for f in ([folder] if own_sources else subfolders) if (files := sources.sources_in(f))}
    if not files_by_folder:
        kinds = ", ".join(sources.SOURCE_SUFFIXES)
        raise NothingToJudgeError(
            f"nothing to build in {str(directory)!r}: neither it nor a folder in it holds a source ({kinds}); one "
            "folder is one library"
        )
    if options.namespace and len(files_by_folder) > 1:
        names = ", ".join(f.name for f in files_by_folder)
        raise OpforgeError(
            f"--namespace {options.namespace} requires one library, and {str(directory)!r} holds {names}; name one "
            "of them"
        )
    return [_unit(f, files, options) for f, files in files_by_folder.items()]


def _unit(folder: Path, files: Sequence[Path], options: BuildOptions) -> builder.LibrarySpec:
    name = builder.checked_namespace(re.sub(r"[-.\s]", "_", folder.name))
    namespace = builder.checked_namespace(options.namespace or name)
    return builder.LibrarySpec(name, tuple(files), folder, namespace, options.flags, options.target)


def registrations_of(unit: builder.LibrarySpec) -> list[sources.Registration]:
    """Return the registrations found in the sources of a unit, as far as they can be parsed."""
    flags = (flag.removeprefix("-D").partition("=") for flag in unit.flags if flag.startswith("-D"))
    macros = {name: value for name, _, value in flags}
    macros |= dict.fromkeys(builder.NAMESPACE_MACROS, unit.effective_namespace)
    headers = sources.headers_in(unit.folder)
    return [block for file in unit.files for block in sources.registrations(file, macros, headers)]


def _refuse_torchs_namespaces(blocks: Iterable[sources.Registration]) -> None:
    for block in blocks:
        if block.namespace_known and block.namespace in torch_namespaces():
            raise OpforgeError(
                f"{block.file}:{block.line} registers operators in {block.namespace!r}, a namespace of torch itself; "
                "use a name of your own, as the folder's name or with --namespace"
            )


def build_folder(
    directory: Path, options: BuildOptions = BuildOptions(), progress: Progress = no_progress
) -> list[LibraryResult]:  # frozen
    """Build the libraries of a folder.

    Failed libraries are part of the result. Clashes between sources raise before any build.
    """
    units = units_in(directory, options)
    blocks = {unit.name: registrations_of(unit) for unit in units}
    _refuse_torchs_namespaces(itertools.chain.from_iterable(blocks.values()))
    if source_clashes := clashes.clashes_of_sources(blocks):
        raise clashes.ClashError(source_clashes)
    out = (options.out or directory / "build").absolute()
    outcomes = _build_all(units, options, progress)
    built = [result for result in outcomes.values() if isinstance(result, builder.BuiltLibrary)]
    progress("inspecting what was built", len(units), len(units) + 1)
    looks = (
        dict(
            zip(
                (result.name for result in built),
                inspect.inspect_libraries([[result.library] for result in built]),
                strict=True,
            )
        )
        if built
        else {}
    )
    library_clashes = {
        clash.second: clash
        for clash in clashes.clashes_of_libraries([look for look in looks.values() if not look.error])
    }
    return [_library(unit, outcomes[unit.name], looks.get(unit.name), library_clashes, out) for unit in units]


def _build_all(
    units: Sequence[builder.LibrarySpec], options: BuildOptions, progress: Progress
) -> dict[str, builder.BuiltLibrary | builder.BuildError]:
    outcomes: dict[str, builder.BuiltLibrary | builder.BuildError] = {}
    with ThreadPoolExecutor(options.workers) as pool:
        units_by_future = {pool.submit(builder.build, unit, limit_s=options.timeout_s): unit for unit in units}
        progress(f"building {', '.join(unit.name for unit in units)}", 0, len(units) + 1)
        for future in as_completed(units_by_future):
            name = units_by_future[future].name
            try:
                outcomes[name] = future.result()
            except builder.BuildError as error:
                outcomes[name] = error
            progress(f"building {name}", len(outcomes), len(units) + 1)
    return outcomes


def _library(
    unit: builder.LibrarySpec,
    outcome: builder.BuiltLibrary | builder.BuildError,
    look: inspect.LibraryInspection | None,
    library_clashes: dict[str, clashes.Clash],
    out: Path,
) -> LibraryResult:
    row = LibraryResult(unit.name, unit.effective_namespace, tuple(map(str, unit.files)), "failed")
    if isinstance(outcome, builder.BuildError) or look is None:
        return replace(row, error=str(outcome).removeprefix(f"{unit.name} "))
    row = replace(row, abi=outcome.abi, seconds=outcome.seconds)
    if look.error:
        return replace(row, error=f"cannot be loaded: {look.error}")
    if str(outcome.library) in library_clashes:
        return replace(row, error=str(library_clashes[str(outcome.library)]))
    if not look.operators:
        return replace(row, error=_no_operator(unit))
    package = write_library_package(out / unit.name, unit, outcome, look)
    status = "cached" if outcome.cached else "built"
    return replace(row, status=status, package=str(package), operators=look.operators)


def _no_operator(unit: builder.LibrarySpec) -> str:
    return (
        "registers no operator: write a block STABLE_TORCH_LIBRARY(OPFORGE_NAMESPACE, m) "
        f'{{ m.def("name(Tensor self) -> Tensor"); }}, where OPFORGE_NAMESPACE stands for {unit.effective_namespace}'
    )
