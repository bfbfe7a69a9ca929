"""Build a program that runs a ``.pte`` on a device, without Python and torch.

It consists of the selected kernels and ExecuTorch's runtime.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from opforge.edge import toolchain
from opforge.edge.bindings import Selection
from opforge.edge.build import GeneratedCode, OperatorFolder, compile_cached, generate_registration, library_product
from opforge.edge.elf import loaded_bytes
from opforge.edge.program import program_operators
from opforge.edge.toolchain import FOR_THIS_MACHINE, BuildOptions
from opforge.errors import OpforgeError

SOURCES = Path(__file__).parent / "cpp"
RUNTIME_LIBRARY = "executorch"
ATEN_LIBRARY = "executorch_kernels_optimized"
QUANTIZED_LIBRARY = "executorch_kernels_quantized"
XNNPACK_LIBRARY = "executorch_backend_xnnpack"
THREADPOOL_LIBRARY = "executorch_threadpool"
_KERNEL_LIBRARIES = {"aten": ATEN_LIBRARY, "dim_order_ops": ATEN_LIBRARY, "quantized_decomposed": QUANTIZED_LIBRARY}
"""Library of the package with the kernels of a namespace."""
_BACKEND_LIBRARIES = {b"XnnpackBackend": XNNPACK_LIBRARY}
"""Library of the package for a backend. A program that uses it contains these bytes."""


@dataclass(frozen=True, slots=True)
class RunnerOptions:
    """Options for building a runner."""

    libraries: tuple[str, ...] = ()
    """Libraries of the package besides the runtime: ``ATEN``, ``QUANTIZED``, ``XNNPACK``."""
    copy_libraries: bool = False
    """Whether the libraries are copied beside the runner.

    It then finds them there, on any machine.
    """
    build: BuildOptions = FOR_THIS_MACHINE


@dataclass(frozen=True, slots=True)
class BuiltRunner:
    """A runner that was built."""

    path: Path
    bytes: int
    loaded_bytes: int
    """Bytes of code and data, without the padding of the file."""
    operators: tuple[str, ...]
    """Operators with kernels in the runner itself, not in the package's libraries."""
    origin: str
    """How the operators were selected."""
    libraries: tuple[str, ...]
    """Files of the package that it needs to run."""
    library_bytes: int
    cached: bool
    seconds: float

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "path": str(self.path)}


def needed_libraries(model: Path) -> tuple[str, ...]:
    """Return the package's libraries that a ``.pte`` needs besides the runtime."""
    namespaces = {name.partition("::")[0] for name in program_operators(model)}
    libraries = {_KERNEL_LIBRARIES[name] for name in namespaces if name in _KERNEL_LIBRARIES}
    data = model.read_bytes()
    libraries |= {library for mark, library in _BACKEND_LIBRARIES.items() if mark in data}
    return tuple(sorted(libraries))


def build_runner(
    folder: OperatorFolder, chosen: Selection, out: Path, options: RunnerOptions = RunnerOptions()
) -> BuiltRunner:  # frozen
    """Build a runner with the selected operators of an operator folder.

    Kernels that are not selected leave no code in it.
    """
    start = time.perf_counter()
    package = toolchain.find_executorch() if options.build.target is None else options.build.target.package
    if out.is_dir():
        raise OpforgeError(f"{str(out)!r} is a folder; give -o a file for the runner, such as {str(out / 'runner')!r}")
    out = out.absolute()
    needed = _files(package, options.libraries)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="opforge-runner-") as place:
        generated = generate_registration(folder.bindings_file, chosen, Path(place) / "generated")
        for path in SOURCES.iterdir():
            shutil.copy(path, generated.folder)
        cached = compile_cached(folder, _product(folder, generated, options), out, options.build)
    files = tuple(name for name in needed if options.libraries or _is_used(out, name))
    if options.copy_libraries:
        for name in files:
            shutil.copy2(package.library_folder / name, out.parent / name)
    size = sum((package.library_folder / name).stat().st_size for name in files)
    seconds = time.perf_counter() - start
    return BuiltRunner(
        out, out.stat().st_size, loaded_bytes(out), generated.operators, chosen.origin, files, size, cached, seconds
    )


def _product(folder: OperatorFolder, generated: GeneratedCode, options: RunnerOptions) -> toolchain.Product:
    # Kernel libraries register themselves. Nothing calls into them, so a linker would drop them.
    keep = "-Wl,--no-as-needed" if options.libraries else "-Wl,--as-needed"
    product = library_product(folder, generated)
    return replace(
        product,
        name=f"{folder.name}_runner",
        sources=(*product.sources, generated.folder / "runner.cpp"),
        libraries=(RUNTIME_LIBRARY, THREADPOOL_LIBRARY, *options.libraries),
        link_options=(*toolchain.LINK_OPTIONS, "-Wl,-s", keep),
        shared=False,
        rpath="$ORIGIN" if options.copy_libraries or options.build.target is not None else "",
    )


def _files(package: toolchain.ExecuTorch, libraries: Sequence[str]) -> list[str]:
    names = [f"lib{name}.so" for name in (RUNTIME_LIBRARY, THREADPOOL_LIBRARY, *libraries)]
    if missing := [name for name in names if not (package.library_folder / name).is_file()]:
        raise OpforgeError(
            f"executorch {package.version} has no {missing[0]} in {package.library_folder}; "
            "install another version of it"
        )
    return names


def _is_used(program: Path, library: str) -> bool:
    """Whether a program loads a library."""
    return library.encode() + b"\0" in program.read_bytes()
