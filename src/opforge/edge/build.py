"""Build the library of an operator folder: generate code for the selected operators and compile it.

Each step is timed. The same content is compiled only once. Needs no torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock

from opforge import cache
from opforge.edge import toolchain
from opforge.edge.bindings import BindingEntry, BindingError, Selection, read_bindings
from opforge.edge.child import Message, ask
from opforge.edge.elf import loaded_bytes, machine
from opforge.edge.toolchain import FOR_THIS_MACHINE, BuildOptions, Product, Target
from opforge.errors import NothingToJudgeError, OpforgeError
from opforge.kernels.native import compiler
from opforge.kernels.native.compiler import BuildError
from opforge.kernels.native.sources import HEADER_SUFFIXES, SKIPPED_FOLDERS, without_comments
from opforge.kernels.native.toolchain import cxx
from opforge.procs.child import run_command

BINDINGS_FILE, KERNELS_FOLDER, DEFINITIONS_FILE, MODEL_FILE = "ops.yaml", "kernels", "ops.py", "model.py"
"""Contents of an operator folder.

Bindings of operators to kernels, C++ sources, ahead-of-time registration, and a model that uses the
operators.
"""
TEMPLATES = Path(__file__).parent / "templates" / "codegen"
"""Templates for the generator. The wheel has the generator but not its templates."""
SOURCE_NAME = "RegisterCodegenUnboxedKernels_0.cpp"
_CODEGEN_LIMIT_S = 120.0
_REGISTRATION_PATTERN = re.compile(r'^\s*Kernel\(\s*"([^"]+)"', re.MULTILINE)
_SOURCE_SUFFIXES = (".cpp", ".cc", ".cxx")
_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)
_ONE_DIMENSION = re.compile(r"(;\d+),(?=[|\"])")
"""A dimension order of one dimension in a kernel's key."""
_OTHER_MACHINE = re.compile(r"skipping incompatible|file in wrong format|is incompatible with")
_UNDEFINED = re.compile(r"undefined (?:reference to|symbol:?) [`']?(?P<what>[\w:]+)\(")


@dataclass(frozen=True, slots=True)
class OperatorFolder:
    """An operator folder."""

    path: Path
    entries: tuple[BindingEntry, ...]
    sources: tuple[Path, ...]

    @property
    def name(self) -> str:
        return re.sub(r"\W", "_", self.path.resolve().name) or "ops"

    @property
    def bindings_file(self) -> Path:
        return self.path / BINDINGS_FILE


@dataclass(frozen=True, slots=True)
class Definitions(Message):
    """A folder's registration, and the entries that it must register."""

    file: Path
    entries: tuple[BindingEntry, ...]


@dataclass(frozen=True, slots=True)
class EdgeLibrary:
    """A library that was built."""

    library: Path
    operators: tuple[str, ...]
    """The operators that it registers."""
    left_out: tuple[str, ...]
    selection: str
    tool: str
    cached: bool
    seconds: dict[str, float] = field(default_factory=dict)
    """Time of each step."""
    bytes: int = 0
    loaded_bytes: int = 0
    """Bytes of code and data, without the padding of the file."""
    machine: str = ""
    """The machine that it is for, such as ``aarch64``."""


@dataclass(frozen=True, slots=True)
class GeneratedCode:
    """The generated registration."""

    source: Path
    folder: Path
    """Folder of the generated headers."""
    operators: tuple[str, ...]
    """The operators that the source registers."""


def read_folder(path: Path) -> OperatorFolder:
    """Read an operator folder; raise if something is missing."""
    if not path.is_dir():
        raise OpforgeError(f"there is no folder {str(path)!r}; `opforge edge init {path}` makes one")
    entries = read_bindings(path / BINDINGS_FILE)
    kernels = path / KERNELS_FOLDER
    sources = (
        sorted(source for source in kernels.rglob("*") if source.suffix in _SOURCE_SUFFIXES) if kernels.is_dir() else []
    )
    if not sources:
        raise OpforgeError(
            f"{str(kernels)!r} holds no C++ source ({', '.join(_SOURCE_SUFFIXES)}); kernels go there, one file or more"
        )
    return OperatorFolder(path, entries, tuple(sources))


def check_registration(folder: OperatorFolder) -> bool:
    """Compare the entries with the folder's ahead-of-time registration, in a child process.

    Returns whether the folder has a registration.
    """
    definitions = folder.path / DEFINITIONS_FILE
    if not definitions.is_file():
        return False
    ask(compare_schemas, Definitions(definitions.resolve(), folder.entries), label=f"importing {definitions}")
    return True


def compare_schemas(question: Definitions) -> Message:
    """Import the registration, and compare its schemas with the entries: a step of the child."""
    from opforge.edge.model_loading import check_schemas, import_definitions

    import_definitions(question.file)
    check_schemas(question.entries, question.file.name)
    return Message()


def build(
    folder: OperatorFolder,
    selection: Selection,
    out: Path | None = None,
    options: BuildOptions = FOR_THIS_MACHINE,
) -> EdgeLibrary:
    """Build a folder's library with the selected operators.

    ``out`` is the output folder, by default ``build`` in the operator folder.
    """
    place = out or folder.path / "build"
    start = time.perf_counter()
    generated = generate_registration(folder.bindings_file, selection, place / "generated")
    middle = time.perf_counter()
    product = library_product(folder, generated)
    library = place / f"{product.name}.so"
    (place / "CMakeLists.txt").write_text(toolchain.cmake_text(product, library.name))
    cached = compile_cached(folder, product, library, options)
    end = time.perf_counter()
    left_out = tuple(entry.name for entry in folder.entries if entry.name not in generated.operators)
    seconds = {"generate": middle - start, "compile": end - middle}
    return EdgeLibrary(
        library, generated.operators, left_out, selection.origin, options.tool, cached, seconds,
        library.stat().st_size, loaded_bytes(library), machine(library),
    )  # fmt: skip


def generate_registration(bindings: Path, selection: Selection, folder: Path) -> GeneratedCode:
    """Generate the registration of the selected operators in a folder.

    Raises if it does not register exactly these.
    """
    if not selection.names:
        raise NothingToJudgeError(
            f"no operator of {bindings} is selected ({selection.origin}); there is nothing to build"
        )
    entries = [entry for entry in read_bindings(bindings) if entry.name in selection.names]
    if missing := sorted(set(selection.names) - {entry.name for entry in entries}):
        raise BindingError(f"{', '.join(missing)} is selected, and {bindings} has no entry for it; add one")
    toolchain.find_executorch()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    # The generator writes no headers for an operator with several kernels: they come from the first one's.
    _run_generator(folder, [entry.as_row(entry.kernels[:1], specialized=False) for entry in entries])
    if any(entry.is_specialized for entry in entries):
        _declare_other_kernels(folder / "NativeFunctions.h", entries)
        _run_generator(folder, [entry.as_row(entry.kernels) for entry in entries], "--generate", "sources")
    (folder / "RegisterCodegenUnboxedKernelsEverything.cpp").unlink(missing_ok=True)  # a copy of the same
    source = folder / SOURCE_NAME
    source.write_text(_ONE_DIMENSION.sub(r"\1", source.read_text()))  # the generator writes (0,) as "0,"
    return GeneratedCode(source, folder, _registered_operators(source, entries))


def _registered_operators(source: Path, entries: Sequence[BindingEntry]) -> tuple[str, ...]:
    """Return the operators that a source registers; raise if its kernels are not those of the entries."""
    registered = Counter(_REGISTRATION_PATTERN.findall(source.read_text()))
    expected = Counter({entry.name: entry.registrations for entry in entries})
    if wrong := [name for name in expected | registered if registered[name] != expected[name]]:
        raise BindingError(
            f"code generation registers {registered[wrong[0]]} kernels for {wrong[0]}, not {expected[wrong[0]]}; "
            "check its entry in the YAML file"
        )
    return tuple(registered)


def _declare_other_kernels(header: Path, entries: Sequence[BindingEntry]) -> None:
    """Declare the kernels of each entry beside its first one, which has the same arguments."""
    text = header.read_text()
    for entry in entries:
        first, *others = dict.fromkeys(kernel.function for kernel in entry.kernels)
        for other in others:
            text = re.sub(rf"^(.*\b){first}(\(.*)$", rf"\g<0>\n\g<1>{other}\g<2>", text, flags=re.MULTILINE)
    header.write_text(text)


def _run_generator(folder: Path, rows: Sequence[dict[str, Any]], *arguments: str) -> None:
    """Generate code for entries in the form of the YAML file."""
    bindings, chosen, empty = (folder / name for name in ("bindings.yaml", "selected_operators.yaml", "aten.yaml"))
    bindings.write_text(yaml.safe_dump(list(rows), sort_keys=False))
    chosen.write_text("include_all_operators: true\n")
    empty.write_text("[]\n")
    module = "executorch.codegen.gen"
    command = [
        sys.executable, "-P", "-m", module, "--source-path", str(TEMPLATES), "--install-dir", str(folder),
        "--tags-path", str(toolchain.tags_file()), "--aten-yaml-path", str(empty),
        "--op-selection-yaml-path", str(chosen), "--functions-yaml-path", str(bindings), *arguments,
    ]  # fmt: skip
    done = run_command(command, label=module, limit_s=_CODEGEN_LIMIT_S)
    if done.returncode:
        last_line = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        raise BindingError(f"ExecuTorch's code generation ({module}) failed; output: {last_line}")


def library_product(folder: OperatorFolder, generated: GeneratedCode) -> Product:
    """Return the product to compile: the kernels and the generated registration."""
    include = (generated.folder, folder.path / KERNELS_FOLDER, folder.path)
    return Product(f"{folder.name}_kernels", (*folder.sources, generated.source), include)


def compile_cached(folder: OperatorFolder, product: Product, library: Path, options: BuildOptions) -> bool:
    """Compile a product, or copy it from the cache; return whether it was cached."""
    key = _key(folder, product, options)
    if key is None:
        _compile(folder, product, library, options)
        return False
    cached_library = cache.root() / "edge" / key / library.name
    cached_library.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(cached_library.parent.with_suffix(".lock")):
        was_cached = cached_library.is_file()
        if not was_cached:
            _compile(folder, product, cached_library, options)
        fresh = library.with_name(f".{library.name}.new")
        shutil.copy2(cached_library, fresh)
        fresh.replace(library)
    return was_cached


def _compile(folder: OperatorFolder, product: Product, library: Path, options: BuildOptions) -> None:
    try:
        toolchain.compile_product(product, library, options)
    except BuildError as error:
        if options.target is not None and _OTHER_MACHINE.search(error.output):
            message = (
                f"the libraries of {options.target.package.path} are for another machine than "
                f"{options.target.toolchain_file} compiles for; give the target's ExecuTorch package with --executorch"
            )
            raise BuildError(error.name, message, error.output) from None
        raise _explained(error, folder.entries) from None


def _explained(error: BuildError, entries: Sequence[BindingEntry]) -> BuildError:
    """Explain an undefined function: a kernel_name has no kernel."""
    text = f"{error.first_error}\n{error.output}"
    undefined = {match["what"] for match in _UNDEFINED.finditer(text)}
    for bound, kernel in [(entry, kernel) for entry in entries for kernel in entry.kernels]:
        if kernel.cpp_function in undefined:
            message = (
                f"{BINDINGS_FILE} binds {bound.name} to kernel_name {kernel.name}, and no source in "
                f"{KERNELS_FOLDER}/ defines {kernel.cpp_function} with the arguments of {bound.schema!r}, "
                "a KernelRuntimeContext& first. Check its name, its namespace (native is added) and its arguments; "
                "generated/NativeFunctions.h declares it as it must be"
            )
            return BuildError(error.name, message, error.output)
    return error


def _key(folder: OperatorFolder, product: Product, options: BuildOptions) -> str | None:
    """Return a digest of everything that goes into the library.

    None if a source includes a file outside the folder.
    """
    package, program = toolchain.find_executorch(), cxx()
    files = [*product.sources, *sorted(product.include_folders[0].glob("*.h")), *_headers(folder.path)]
    texts = {path: path.read_bytes() for path in files}
    covered = {path.resolve() for path in files}
    for path in files:
        included = _INCLUDE.findall(without_comments(texts[path].decode(errors="replace")))
        if not all(
            _is_covered(name, path, product.include_folders, covered, package.include_folders) for name in included
        ):
            return None
    settings = [os.environ.get(name, "") for name in compiler.COMPILER_VARIABLES]
    key_parts = [
        package.version, str(package.path), program.path, program.version, platform.machine(), options.tool, settings,
        _target_parts(options.target), toolchain.arm_page_bytes(),
        product.name, product.compile_options, product.defines, product.link_options, product.libraries,
        product.shared, product.rpath,
    ]  # fmt: skip
    digest = hashlib.sha256(json.dumps(key_parts).encode())
    for path, text in texts.items():
        digest.update(path.name.encode() + b"\0" + hashlib.sha256(text).digest())
    return digest.hexdigest()[:32]


def _target_parts(target: Target | None) -> list[str]:
    return [] if target is None else [str(target.package.path), target.toolchain_file.read_text(errors="replace")]


def _headers(folder: Path) -> list[Path]:
    """Return the headers in a folder, without generated ones."""
    headers = [path for path in folder.rglob("*") if path.suffix in HEADER_SUFFIXES and path.is_file()]
    return sorted(path for path in headers if not set(path.relative_to(folder).parts) & set(SKIPPED_FOLDERS))


def _is_covered(
    name: str, source: Path, include: Iterable[Path], covered: set[Path], installed: Iterable[Path]
) -> bool:
    """Whether an included file is covered by the key."""
    places = (source.parent, *include)
    included = next((place / name for place in places if (place / name).is_file()), None)
    if included is not None:
        return included.resolve() in covered
    return any((place / name).is_file() for place in installed)
