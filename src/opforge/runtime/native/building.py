"""Build the native runtime's library once for this torch and this compiler, into opforge's cache."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from .. import RUNTIME_VERSION  # noqa: TID252  # packages carry these files under another name

NAMESPACE = f"opforge_native_{RUNTIME_VERSION}"
"""Namespace of the operators by which the library calls Python. Other runtimes in a process have others."""
SOURCES = Path(__file__).parent / "csrc"
_LIMIT_S = 600.0
_SELF_TEST = (
    "import importlib, json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "importlib.import_module(sys.argv[2]).self_test(sys.argv[3])"
)


class NativeError(Exception):
    """The native runtime cannot be used; the message says why, and what to do."""


class NotBuiltError(NativeError):
    """There is no library yet; the message says how it will be built."""


@dataclass(frozen=True, slots=True)
class _Build:
    """A compiler's command without sources and output, and the key of what it makes."""

    command: tuple[str, ...]
    libraries: tuple[str, ...]
    key: str


def build(*, only_find: bool = False) -> Path:
    """Return the library for this torch, building it unless it is cached.

    A library is stored only after it passed its self-test in another process. A failure is stored
    too: later processes do not try again until the sources, torch or the compiler change. With
    ``only_find``, NotBuiltError is raised instead of building it.
    """
    if sys.platform != "linux":
        raise NativeError(f"the native runtime is for Linux, and this is {sys.platform}")
    recipe = _recipe()
    folder = cache_folder()
    library, failure = folder / f"runtime-{recipe.key}.so", folder / f"runtime-{recipe.key}.failed"
    try:
        if library.is_file():
            return library
        with _lock(folder / f"runtime-{recipe.key}.lock"):
            if failure.is_file():
                raise NativeError(f"{failure.read_text(encoding='utf-8')}; delete {failure} to try again")
            if only_find and not library.is_file():
                raise NotBuiltError(f"it will be built on first use, with {recipe.command[0]}, in {folder}")
            if not library.is_file():
                _build(recipe, library, failure)
    except OSError as error:
        raise NativeError(
            f"{folder} cannot be used ({error.strerror}); set OPFORGE_CACHE to a folder of yours"
        ) from None
    return library


def cache_folder() -> Path:
    """Return the folder of built libraries, which opforge's own builds use too."""
    if own := os.environ.get("OPFORGE_CACHE"):
        return Path(own) / "native"
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "opforge" / "native"
    except RuntimeError:
        raise NativeError("this user has no home folder; set OPFORGE_CACHE to a folder of yours") from None


def _recipe() -> _Build:
    compiler = _compiler()
    root = Path(torch.__path__[0])
    abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)  # noqa: SLF001  # torch has no public name for it
    macros = (f"-D_GLIBCXX_USE_CXX11_ABI={abi}", f"-DOPFORGE_NAMESPACE={NAMESPACE}")
    flags = ("-O2", "-std=c++20", "-fPIC", "-shared", "-fvisibility=hidden", "-fno-plt")
    command = (compiler, *flags, *macros, "-isystem", str(root / "include"))
    libraries = (f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10")
    version = _run([compiler, "--version"], "the compiler").partition("\n")[0]
    facts = (platform.machine(), version, torch.__version__, torch.version.git_version, command, libraries)
    hasher = hashlib.sha256(json.dumps(facts).encode())
    for path in sorted(SOURCES.iterdir()):
        hasher.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return _Build(command, libraries, hasher.hexdigest()[:32])


def _compiler() -> str:
    named = os.environ.get("CXX")
    for name in [named] if named else ["g++", "c++", "clang++"]:
        if (path := shutil.which(name)) is not None:
            return path
    problem = f"CXX names {named!r}, which is not there" if named else "there is no C++ compiler on the PATH"
    raise NativeError(f"{problem}; install one (`apt install g++`), or set CXX to its path")


def _build(recipe: _Build, library: Path, failure: Path) -> None:
    if sys.stderr.isatty():
        print("opforge: building the native runtime, once for this torch", file=sys.stderr)  # noqa: T201
    with tempfile.TemporaryDirectory(dir=library.parent, prefix=".runtime-") as work:
        built = Path(work) / library.name
        command = [*recipe.command, str(SOURCES / "runtime.cpp"), "-o", str(built), *recipe.libraries]
        binding = f"{__package__}.binding"
        try:
            _run(command, "building the native runtime")
            _run([sys.executable, "-c", _SELF_TEST, json.dumps(sys.path), binding, str(built)], "its self-test")
        except NativeError as error:
            failure.write_text(str(error), encoding="utf-8")
            raise
        built.replace(library)


def _run(command: list[str], step: str) -> str:
    """Run a command and return its output; a failure's first error is in the message."""
    environment = {name: value for name, value in os.environ.items() if name != "OPFORGE_BACKEND"}
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_LIMIT_S, check=False, env=environment
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeError(f"{step} failed: {error}") from None
    if process.returncode:
        lines = [line.strip() for line in process.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if "error" in line.lower()]
        cause = errors[0] if errors and command[0] != sys.executable else lines[-1] if lines else "no output"
        raise NativeError(f"{step} failed with exit status {process.returncode}: {cause[:300]}")
    return process.stdout


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold a file's lock; wait for another process that builds."""
    import fcntl  # not at the top: only Linux is sure to have it

    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
