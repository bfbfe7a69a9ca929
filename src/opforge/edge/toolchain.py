"""Find the ExecuTorch package's headers and libraries, and compile sources with them.

Needs no torch.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import sys
import tempfile
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import jinja2

from opforge.errors import OpforgeError, UnknownNameError
from opforge.kernels.native import compiler
from opforge.kernels.native.toolchain import cxx

INSTALL_COMMAND = 'pip install "opforge[executorch]"'
_BUILD_VERSION = re.compile(r'set\(EXECUTORCH_BUILD_VERSION "([^"]+)"\)')
TOOLS = ("direct", "cmake")
"""Build tools: the compiler itself, or CMake with the package's own configuration."""
STANDARD = 17
DEFINES = ("C10_USING_CUSTOM_GENERATED_MACROS", "ET_EVENT_TRACER_ENABLED", "ET_USE_THREADPOOL")
"""Macros that the package's libraries were built with.

Without them headers do not compile, or have another meaning.
"""
COMPILE_OPTIONS = ("-O2", "-fPIC", "-fvisibility=hidden", "-ffunction-sections", "-fdata-sections", "-ffp-contract=off")
"""Options for the compiler.

Hidden symbols and separate sections let the linker drop code that nothing registers. Products are
rounded before they are added (no FMA), as in PyTorch, so that every CPU computes the same.
"""
LINK_OPTIONS = ("-Wl,-z,defs", "-Wl,--gc-sections")
"""Options for the linker.

A missing function is an error when linking, not on the device. Unreachable code is dropped.
"""
ARM_PAGE_BYTES = 16384
"""Largest page of the Arm devices that the linker lays out for, unless this machine's is larger.

Its own default is 64 KiB: it pads each library to that. Android wants 16 KiB.
"""
LIBRARIES = ("executorch", "executorch_threadpool")


@dataclass(frozen=True, slots=True)
class ExecuTorch:
    """The installed ExecuTorch package."""

    version: str
    path: Path

    @property
    def include_folders(self) -> tuple[Path, ...]:
        """Return the folders of its headers."""
        root = self.path / "include"
        return (root, root / "executorch" / "runtime" / "core" / "portable_type" / "c10")

    @property
    def library_folder(self) -> Path:
        """Return the folder of its libraries."""
        return self.path / "lib"


@dataclass(frozen=True, slots=True)
class Product:
    """A library or program to compile."""

    name: str
    sources: tuple[Path, ...]
    include_folders: tuple[Path, ...] = ()
    """Header folders besides ExecuTorch's."""
    libraries: tuple[str, ...] = LIBRARIES
    """Libraries of the package, without ``lib`` and ``.so``."""
    defines: tuple[str, ...] = DEFINES
    compile_options: tuple[str, ...] = COMPILE_OPTIONS
    link_options: tuple[str, ...] = LINK_OPTIONS
    shared: bool = True
    """Whether it is a shared library; otherwise it is a program."""
    rpath: str = ""
    """Where it searches for the package's libraries at run time.

    By default, their location on this machine.
    """


@dataclass(frozen=True, slots=True)
class Target:
    """Another machine to compile for, by a toolchain file of CMake's."""

    toolchain_file: Path
    package: ExecuTorch
    """The machine's ExecuTorch package."""


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """How to compile."""

    tool: str = "direct"
    limit_s: float = compiler.COMPILE_LIMIT_S
    """Time limit of one compiler."""
    target: Target | None = None
    """None compiles for this machine."""


FOR_THIS_MACHINE = BuildOptions()


def read_target(toolchain_file: Path, executorch: Path | None) -> Target:
    """Return the target of a toolchain file and an unpacked ExecuTorch package; by default, the installed one."""
    if not toolchain_file.is_file():
        raise OpforgeError(
            f"there is no toolchain file {str(toolchain_file)!r}; give a .cmake file that sets CMAKE_SYSTEM_NAME and "
            "CMAKE_CXX_COMPILER, such as android.toolchain.cmake of the NDK"
        )
    installed = find_executorch()
    if executorch is None:
        return Target(toolchain_file.resolve(), installed)
    package = ExecuTorch(_built_version(executorch).partition("+")[0], executorch.resolve())
    if package.version != installed.version.partition("+")[0]:
        raise OpforgeError(
            f"{str(executorch)!r} is ExecuTorch {package.version}, and the installed one is {installed.version}, which "
            "generates the registration; unpack the target's wheel of the same version"
        )
    return Target(toolchain_file.resolve(), package)


def _built_version(folder: Path) -> str:
    """Return the version of an unpacked ExecuTorch package; raise if it is none."""
    config = folder / "share" / "cmake" / "executorch-config-version.cmake"
    text = config.read_text() if config.is_file() and (folder / "lib" / "libexecutorch.so").is_file() else ""
    if (match := _BUILD_VERSION.search(text)) is None:
        raise OpforgeError(
            f"{str(folder)!r} is not an ExecuTorch package with lib/libexecutorch.so; give the folder executorch of "
            "the target's unpacked wheel (pip download --no-deps --platform …, then unzip)"
        )
    return match[1]


def find_executorch() -> ExecuTorch:
    """Find the installed package without importing it; raise with the install command if absent."""
    spec = importlib.util.find_spec("executorch")
    try:
        number = version("executorch")
    except PackageNotFoundError:
        number = ""
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    if not places or not number:
        raise OpforgeError(f"executorch is not installed in {sys.prefix}; install it with `{INSTALL_COMMAND}`")
    package = ExecuTorch(number, Path(places[0]))
    needed = (
        *package.include_folders,
        package.library_folder / "libexecutorch.so",
        package.path / "codegen" / "gen.py",
    )
    if missing := [str(path) for path in needed if not path.exists()]:
        raise OpforgeError(
            f"executorch {number} at {package.path} has no {missing[0]}; "
            f"opforge needs the wheel of 1.5 or newer: `{INSTALL_COMMAND} --upgrade`"
        )
    return package


def tags_file() -> Path:
    """Return the path of torchgen's tags.yaml, which code generation reads."""
    spec = importlib.util.find_spec("torchgen")
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    path = Path(places[0]) / "packaged" / "ATen" / "native" / "tags.yaml" if places else Path("torchgen")
    if not path.is_file():
        raise OpforgeError(f"there is no {path}, which comes with torch; install torch again")
    return path


def compile_arguments(package: ExecuTorch, product: Product) -> tuple[str, ...]:
    """Return the compiler's arguments, without its name, the source and the object."""
    folders = [word for path in product.include_folders for word in ("-I", str(path))]
    system = [word for path in package.include_folders for word in ("-isystem", str(path))]
    defines = [f"-D{name}" for name in product.defines]
    return (f"-std=c++{STANDARD}", *product.compile_options, *defines, *folders, *system)


def link_arguments(package: ExecuTorch, product: Product) -> tuple[str, ...]:
    """Return the linker's arguments after the objects."""
    kind = ("-shared",) if product.shared else ()
    place = (f"-L{package.library_folder}", f"-Wl,-rpath,{product.rpath or package.library_folder}")
    pages = (f"-Wl,-z,max-page-size={arm_page_bytes()}",) if platform.machine() in ("aarch64", "arm64") else ()
    return (*kind, *product.link_options, *pages, *place, *(f"-l{name}" for name in product.libraries))


def arm_page_bytes() -> int:
    return max(ARM_PAGE_BYTES, os.sysconf("SC_PAGE_SIZE"))


def compile_product(product: Product, out: Path, options: BuildOptions = FOR_THIS_MACHINE) -> None:
    """Compile a product to the file ``out``, which appears whole or not at all.

    The error of a failure holds the compiler's output.
    """
    if options.tool not in TOOLS:
        raise UnknownNameError("build tool", options.tool, TOOLS)
    if not product.sources:
        raise OpforgeError(f"{product.name} has no sources to compile")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as place:
        work = Path(place)
        make = _compile_with_cmake if options.tool == "cmake" else _compile_directly
        draft = make(product, work, out.name, options)
        draft.replace(out)


def _compile_directly(product: Product, work: Path, name: str, options: BuildOptions) -> Path:
    package, program, limit_s = find_executorch(), cxx().path, options.limit_s
    arguments = compile_arguments(package, product)
    objects = []
    for number, source in enumerate(product.sources):
        object_file = work / f"{number}.o"
        command = (program, *arguments, "-c", str(source.resolve()), "-o", str(object_file))
        compiler.run(product.name, command, work, limit_s)
        objects.append(str(object_file))
    out = work / name
    compiler.run(product.name, (program, *objects, "-o", str(out), *link_arguments(package, product)), work, limit_s)
    return out


def _compile_with_cmake(product: Product, work: Path, name: str, options: BuildOptions) -> Path:
    program, target, limit_s = find_cmake(), options.target, options.limit_s
    (work / "CMakeLists.txt").write_text(cmake_text(product, name))
    build = work / "build"
    ninja = _program("ninja")
    generator = ("-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}") if ninja else ()
    compiler_option = (
        f"-DCMAKE_CXX_COMPILER={cxx().path}" if target is None else f"-DCMAKE_TOOLCHAIN_FILE={target.toolchain_file}"
    )
    package = find_executorch() if target is None else target.package
    # Not by CMAKE_PREFIX_PATH: many toolchain files search in the target's system only.
    place = f"-Dexecutorch_DIR={package.path / 'share' / 'cmake'}"
    configure = (program, "-S", str(work), "-B", str(build), *generator, place, compiler_option)
    compiler.run(product.name, configure, work, limit_s)
    compiler.run(product.name, (program, "--build", str(build)), work, limit_s)
    return build / name


def cmake_text(product: Product, output: str) -> str:
    """Return a product's CMakeLists.txt. It needs no opforge, so it also builds elsewhere."""
    return (
        templates("")
        .get_template("CMakeLists.txt.j2")
        .render(
            name=product.name,
            output=output,
            shared=product.shared,
            sources=[path.resolve() for path in product.sources],
            include=[path.resolve() for path in product.include_folders],
            libraries=product.libraries,
            defines=product.defines,
            compile_options=product.compile_options,
            link_options=product.link_options,
            page_bytes=arm_page_bytes(),
            rpath=product.rpath.replace("$", "\\$"),
            standard=STANDARD,
        )
    )


def templates(folder: str) -> jinja2.Environment:
    """Return the templates in a folder of ``edge/templates``."""
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates" / folder),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        autoescape=False,  # noqa: S701  # source files
    )


def find_cmake() -> str:
    """Return the CMake on the PATH, else the one of this Python's environment."""
    if (program := _program("cmake")) is None:
        raise OpforgeError(
            "there is no cmake on the PATH or beside this Python; "
            "install it with `pip install cmake ninja`, or use `--with direct`"
        )
    return program


def _program(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path=os.fspath(Path(sys.executable).parent))
