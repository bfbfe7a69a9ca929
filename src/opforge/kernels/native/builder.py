"""Build sources into shared libraries, cached by content.

Each entry has a digest and a lock, and is never visible half-written.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from opforge import cache
from opforge.errors import OpforgeError
from opforge.kernels.native import compiler, sources, toolchain
from opforge.kernels.native.compiler import COMPILE_LIMIT_S, BuildError
from opforge.runtime import untrusted_files as files

__all__ = ["BuildError", "BuiltLibrary", "LibrarySpec", "build"]

NAMESPACE_MACROS = ("OPFORGE_NAMESPACE", "TORCH_EXTENSION_NAME")
"""Macros for the library's namespace in its sources."""
_CACHE_LAYOUT_VERSION = "1"
"""Version of the cache layout; a new version ignores old entries."""

ConfinementPrefix = Callable[[Path, Sequence[Path]], Sequence[str]]
"""Returns the command prefix that confines a compiler, given its output folder and the sources."""


def unconfined(_folder: Path, _sources: Sequence[Path]) -> Sequence[str]:
    """Run a compiler without confinement, with the user's rights."""
    return ()


@dataclass(frozen=True, slots=True)
class LibrarySpec:
    """The sources and settings of one library."""

    name: str
    files: tuple[Path, ...]
    folder: Path
    """The folder to search for headers; errors name files relative to it."""
    namespace: str = ""
    """Value of OPFORGE_NAMESPACE and TORCH_EXTENSION_NAME; the name by default."""
    flags: tuple[str, ...] = ()
    oldest_torch: str = toolchain.OLDEST_TORCH
    """The oldest torch that a stable-ABI library must support."""

    @classmethod
    def of_file(cls, file: Path) -> LibrarySpec:
        """Return the unit of a kernel's own file."""
        return cls(re.sub(r"\W", "_", file.stem), (file,), file.parent)

    @property
    def effective_namespace(self) -> str:
        return self.namespace or self.name


@dataclass(frozen=True, slots=True)
class BuiltLibrary:
    """A built library."""

    name: str
    library: Path
    cached: bool
    abi: str
    """``stable`` or ``full``."""
    seconds: float
    """Duration of this call."""


@dataclass(frozen=True, slots=True)
class _Recipe:
    """The build commands of a unit, and everything the library depends on.

    Headers outside the unit's folder are found only during the build.
    """

    unit: LibrarySpec
    abi: str
    compile: tuple[tuple[str, ...], ...]
    link: tuple[str, ...]
    suffix: str
    """``.so``, or Python's extension suffix for a library built for this Python."""
    installed: tuple[str, ...]
    """Folders with headers that change only with a version; the version is part of the key."""
    key: str


def build(
    unit: LibrarySpec, *, confinement_prefix: ConfinementPrefix = unconfined, limit_s: float = COMPILE_LIMIT_S
) -> BuiltLibrary:
    """Return the unit's library, building it unless it is cached.

    Waits for any other process that is building it.
    """
    start = time.perf_counter()
    recipe = _recipe(unit)
    root = cache.root() / "native"
    if (known := _cached_library(root, recipe)) is not None:
        return BuiltLibrary(unit.name, known, True, recipe.abi, time.perf_counter() - start)
    root.mkdir(parents=True, exist_ok=True)
    patience_s = limit_s * (len(unit.files) + 1)
    try:
        with FileLock(root / f"{recipe.key}.lock", timeout=patience_s):
            known = _cached_library(root, recipe)
            library = known or _build(root, recipe, confinement_prefix, limit_s)
    except Timeout:
        raise BuildError(unit.name, f"another process has been building it for more than {patience_s:g} s") from None
    return BuiltLibrary(unit.name, library, known is not None, recipe.abi, time.perf_counter() - start)


def _recipe(unit: LibrarySpec) -> _Recipe:
    try:
        headers = sources.headers_in(unit.folder)
        contents = {path: files.read(path) for path in (*unit.files, *headers)}
    except OSError as error:
        raise BuildError(unit.name, f"{error.filename} cannot be read: {error.strerror}") from None
    texts = [data.decode(errors="replace") for data in contents.values()]
    included = sources.includes(texts)
    full, python = sources.needs_full_headers(included), sources.needs_python(included)
    cuda = any(path.suffix == ".cu" for path in unit.files)
    facts, cxx = toolchain.torch_build(), toolchain.cxx()
    nvcc = toolchain.nvcc() if cuda else None
    common = _common(unit, full=full, python=python, own_target=any("TORCH_TARGET_VERSION" in text for text in texts))
    host_command = (cxx.path, *common, "-fPIC", "-fvisibility=hidden")
    device_command = _nvcc_command(nvcc.path, cxx.path, facts, common) if nvcc is not None else ()
    compile_commands = tuple(
        (*(device_command if path.suffix == ".cu" else host_command), *unit.flags) for path in unit.files
    )
    link_command = _link_command(facts, device_command[:1] or (cxx.path,), python=python, cuda=cuda, full=full)
    versions = (
        _CACHE_LAYOUT_VERSION,
        platform.machine(),
        cxx.version,
        nvcc.version if nvcc else "",
        *(sys.version if python else "",),
    )
    torch = (facts.version, facts.cuda, facts.cxx11_abi) if full or cuda else (facts.version,)
    settings = [os.environ.get(name, "") for name in compiler.COMPILER_VARIABLES]
    hasher = hashlib.sha256(json.dumps([unit.name, versions, torch, settings, compile_commands, link_command]).encode())
    for path, data in contents.items():
        hasher.update(os.path.relpath(path, unit.folder).encode() + b"\0" + hashlib.sha256(data).digest())
    suffix = str(sysconfig.get_config_var("EXT_SUFFIX")) if python else ".so"
    install_folders = [facts.path, *([str(Path(nvcc.path).resolve().parents[1])] if nvcc else [])]
    installed = tuple(os.path.realpath(folder) + os.sep for folder in install_folders)
    return _Recipe(
        unit, "full" if full else "stable", compile_commands, link_command, suffix, installed, hasher.hexdigest()[:32]
    )


def _common(unit: LibrarySpec, *, full: bool, python: bool, own_target: bool) -> tuple[str, ...]:
    """Return the flags for both compilers: language, macros, header paths."""
    flags = ["-O3", "-std=c++20", *(f"-D{macro}={unit.effective_namespace}" for macro in NAMESPACE_MACROS)]
    facts = toolchain.torch_build()
    if full:
        flags.append(f"-D_GLIBCXX_USE_CXX11_ABI={int(facts.cxx11_abi)}")
    elif not own_target:
        flags.append(f"-DTORCH_TARGET_VERSION={toolchain.target_version(unit.oldest_torch)}")
    folders = [*facts.include_folders, *([toolchain.python_include()] if python else [])]
    return (*flags, *(word for folder in folders for word in ("-isystem", folder)))


def _nvcc_command(nvcc: str, cxx: str, facts: toolchain.TorchBuild, common: tuple[str, ...]) -> tuple[str, ...]:
    host_flags = ("-Xcompiler", "-fPIC,-fvisibility=hidden", "-ccbin", cxx)
    return (nvcc, *common, "-DUSE_CUDA", *facts.nvcc_flags, *toolchain.cuda_architecture_flags(), *host_flags)


def _link_command(
    facts: toolchain.TorchBuild, linker: Sequence[str], *, python: bool, cuda: bool, full: bool
) -> tuple[str, ...]:
    names = ["torch_cpu", "torch", "c10", *(["torch_python"] if python else [])]
    if cuda and facts.cuda is not None:
        names += ["torch_cuda", *(["c10_cuda"] if full else [])]
    folders = [f"-L{folder}" for folder in facts.library_folders]
    as_needed = ["-Xlinker", "--as-needed"]
    return (*linker, "-shared", *folders, *as_needed, *(f"-l{name}" for name in names))


def _cached_library(root: Path, recipe: _Recipe) -> Path | None:
    """Return a recipe's library if it is built and no header outside its folder has changed."""
    entry = cache.read_json(root / f"{recipe.key}.json")
    if entry is None:
        return None
    library: Path = root / entry["library"]
    if not library.is_file() or _digests(recipe.unit.folder, entry["headers"]) != entry["headers"]:
        return None
    return library


def _digests(folder: Path, names: Sequence[str] | dict[str, str]) -> dict[str, str]:
    """Return the digests of headers, named relative to the unit's folder."""
    digests = {}
    for name in names:
        try:
            digests[name] = hashlib.sha256((folder / name).read_bytes()).hexdigest()[:32]
        except OSError:
            digests[name] = "missing"
    return digests


def _build(root: Path, recipe: _Recipe, confinement_prefix: ConfinementPrefix, limit_s: float) -> Path:
    unit = recipe.unit
    for leftover in root.glob(f".{recipe.key}-*"):
        shutil.rmtree(leftover, ignore_errors=True)  # left by a killed build
    work = Path(tempfile.mkdtemp(dir=root, prefix=f".{recipe.key}-"))
    try:
        output_folder = work / "made"
        output_folder.mkdir()
        library = output_folder / f"{unit.name}{recipe.suffix}"
        prefix = tuple(confinement_prefix(work, unit.files))
        objects = [work / f"{number}.o" for number in range(len(unit.files))]
        for path, step, object_file in zip(unit.files, recipe.compile, objects, strict=True):
            search = ("-I", str(unit.folder), "-MMD", "-MF", f"{object_file}.d")
            name = os.path.relpath(path, unit.folder)
            _run(unit, (*prefix, *step, *search, "-c", name, "-o", str(object_file)), limit_s)
        linker, link_flags = recipe.link[0], recipe.link[1:]
        _run(unit, (*prefix, linker, *map(str, objects), "-o", str(library), *link_flags), limit_s)
        headers = _digests(unit.folder, _headers(unit, objects, recipe.installed))
        return _store(root, recipe, output_folder, library.name, headers)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _run(unit: LibrarySpec, command: Sequence[str], limit_s: float) -> None:
    compiler.run(unit.name, command, unit.folder, limit_s)


def _headers(unit: LibrarySpec, objects: Sequence[Path], installed: tuple[str, ...]) -> list[str]:
    """Return the headers that the compiler lists as read.

    Those of the system, Python and torch are left out.
    """
    listed_headers: set[str] = set()
    for path in objects:
        try:
            dependencies = Path(f"{path}.d").read_text(errors="replace").partition(":")[2]
        except OSError:
            continue
        listed_headers.update(
            name.replace("\\ ", " ") for name in re.split(r"(?<!\\)\s+", dependencies.replace("\\\n", " ")) if name
        )
    unit_files = {os.path.realpath(path) for path in unit.files}
    paths = {os.path.realpath(unit.folder / name) for name in listed_headers} - unit_files
    return sorted(
        os.path.relpath(path, os.path.realpath(unit.folder)) for path in paths if not path.startswith(installed)
    )


def _store(root: Path, recipe: _Recipe, built_folder: Path, name: str, headers: dict[str, str]) -> Path:
    """Move a finished library into the cache in one step; its path depends on its content."""
    key = hashlib.sha256(f"{recipe.key}{json.dumps(headers, sort_keys=True)}".encode()).hexdigest()[:32]
    (built_folder / name).chmod(0o755)
    built_folder.chmod(0o755)  # a confined worker may run as another user
    entry_folder = root / key
    if not (entry_folder / name).is_file():
        shutil.rmtree(entry_folder, ignore_errors=True)
        built_folder.rename(entry_folder)
    cache.write_atomically(root / f"{recipe.key}.json", json.dumps({"library": f"{key}/{name}", "headers": headers}))
    return entry_folder / name


def checked_namespace(name: str) -> str:
    """Return a valid operator namespace; raises with the rules otherwise."""
    if not re.fullmatch(r"[A-Za-z_]\w*", name):
        raise OpforgeError(
            f"{name!r} cannot be a namespace of operators: letters, digits and underscores, not a digit first; "
            "rename the folder or give --namespace"
        )
    return name
