"""Find or build the native runtime's library for this torch.

Libraries for known torches are shipped in ``prebuilt``. Others are built once with the local compiler, into the cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from .. import RUNTIME_VERSION  # noqa: TID252  # packages carry these files under another name
from . import torch_layout

NAMESPACE = f"opforge_native_{RUNTIME_VERSION}"
"""Namespace of the operators by which the library calls Python. Other runtimes in a process have others."""
SOURCES = Path(__file__).parent / "csrc"
PREBUILT = Path(__file__).parent / "prebuilt"
"""Folder of shipped libraries. Wheels and packages have it; a checkout has it after ``make native-binaries``."""
FLAGS = (
    "-O2", "-std=c++20", "-fPIC", "-shared", "-fvisibility=hidden", "-fno-plt", f"-DOPFORGE_NAMESPACE={NAMESPACE}",
)  # fmt: skip
_LIMIT_S = 600.0
_SELF_TEST = (
    "import importlib, json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "importlib.import_module(sys.argv[2]).self_test(sys.argv[3])"
)


class NativeError(Exception):
    """The native runtime cannot be used; the message says why, and what to do."""


class NotBuiltError(NativeError):
    """There is no library yet; the message says how it will be built."""


def build(*, only_find: bool = False) -> Path:
    """Return the library for this torch: a shipped one, one in the cache, or one that is built now.

    A library is used only after it passed its self-test in another process. With ``only_find``,
    NotBuiltError is raised instead of building one.
    """
    if sys.platform != "linux":
        raise NativeError(f"the native runtime is for Linux, and this is {sys.platform}")
    shipped = PREBUILT / prebuilt_name(torch_layout.verified_minor(), platform.machine())
    misfit = _misfit(shipped) if shipped.is_file() else ""
    if shipped.is_file() and not misfit:
        return shipped
    try:
        return _built(only_find=only_find)
    except NotBuiltError:
        raise
    except NativeError as error:
        raise NativeError(f"{misfit}; {error}" if misfit else str(error)) from None


def prebuilt_name(minor: str, machine: str) -> str:
    """Return the file name of a shipped library. It has the sources' digest: a file of other sources is not found."""
    return f"runtime-{minor}-{machine}-{_digest(FLAGS)}.so"


def ship(folder: Path) -> Path:
    """Copy the library for this torch into a folder of shipped libraries; raise NativeError if there is none."""
    minor = torch_layout.verified_minor()
    if not minor:
        known = ", ".join(torch_layout.KNOWN_LAYOUTS)
        raise NativeError(f"torch {torch.__version__} is not a published build of a known version ({known})")
    library = build()
    folder.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copyfile(library, folder / prebuilt_name(minor, platform.machine())))


def _misfit(library: Path) -> str:
    """Return why a shipped library does not fit; empty if it does. The answer is stored, if that is possible."""
    answer: Path | None = None
    misfit = ""
    try:
        contents = hashlib.sha256(library.read_bytes()).hexdigest()
        with contextlib.suppress(OSError, NativeError):
            answer = cache_folder() / f"runtime-{_digest(contents, _torch(), torch_layout.KNOWN_LAYOUTS)}.tested"
            return answer.read_text(encoding="utf-8")
        _test(library)
    except (OSError, NativeError) as error:
        misfit = f"{library.name} does not fit: {error}"
    if answer is not None:
        with contextlib.suppress(OSError):
            stored = misfit and f"{misfit}; delete {answer} to try again"
            _write(answer, stored)
            return stored
    return misfit


def _built(*, only_find: bool) -> Path:
    """Return the library in the cache, built if need be.

    Any compiler's library will do. A failure is stored: later processes do not try again until the sources, torch or
    the compiler change.
    """
    flags, links = _flags_for_torch()
    name = f"runtime-{_digest(flags, links, _torch())}"
    folder = cache_folder()
    library = folder / f"{name}.so"
    try:
        if library.is_file():
            return library
        compiler = _compiler()
        version = _run([*compiler, "--version"], "the compiler").partition("\n")[0]
        failure = folder / f"{name}-{_digest(compiler, version, torch_layout.KNOWN_LAYOUTS)}.failed"
        with _lock(folder / f"{name}.lock"):
            if failure.is_file():
                raise NativeError(f"{failure.read_text(encoding='utf-8')}; delete {failure} to try again")
            if only_find and not library.is_file():
                raise NotBuiltError(f"it will be built on first use, with {compiler[0]}, in {folder}")
            if not library.is_file():
                _compile((*compiler, *flags), links, library, failure)
    except OSError as error:
        raise NativeError(
            f"{folder} cannot be used ({error.strerror}); set OPFORGE_CACHE to a folder of yours"
        ) from None
    return library


def _flags_for_torch() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the compiler's flags before and after the source."""
    abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)  # noqa: SLF001  # torch has no public name for it
    include, libraries = (str(Path(torch.__path__[0]) / name) for name in ("include", "lib"))
    flags = (*FLAGS, f"-D_GLIBCXX_USE_CXX11_ABI={abi}", "-isystem", include)
    return flags, (f"-L{libraries}", "-ltorch_cpu", "-lc10")


def cache_folder() -> Path:
    """Return the folder of built libraries, which opforge's own builds use too."""
    if own := os.environ.get("OPFORGE_CACHE"):
        return Path(own) / "native"
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "opforge" / "native"
    except RuntimeError:
        raise NativeError("this user has no home folder; set OPFORGE_CACHE to a folder of yours") from None


def _torch() -> tuple[str, ...]:
    """Return what tells one torch from another."""
    return platform.machine(), torch.__version__, str(torch.version.git_version)


def _digest(*facts: Any) -> str:
    """Return a digest of the sources and of facts."""
    hasher = hashlib.sha256(json.dumps(facts).encode())
    for path in sorted(SOURCES.iterdir()):
        hasher.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return hasher.hexdigest()[:16]


def _compiler() -> list[str]:
    """Return the compiler's command, which ``CXX`` may begin with a launcher: ``ccache g++``."""
    named = os.environ.get("CXX")
    for name in [named] if named else ["g++", "c++", "clang++"]:
        if (path := shutil.which(name)) is not None:
            return [path]
    try:
        program, *arguments = shlex.split(named or "")
        if arguments and (path := shutil.which(program)) is not None:
            return [path, *arguments]
    except ValueError:  # nothing named, or an open quotation
        pass
    problem = f"CXX names {named!r}, which is not there" if named else "there is no C++ compiler on the PATH"
    raise NativeError(f"{problem}; install one (`apt install g++`), or set CXX to its path")


def _compile(command: tuple[str, ...], links: tuple[str, ...], library: Path, failure: Path) -> None:
    if sys.stderr.isatty():
        print("opforge: building the native runtime, once for this torch", file=sys.stderr)  # noqa: T201
    with tempfile.TemporaryDirectory(dir=library.parent, prefix=".runtime-") as work:
        built = Path(work) / library.name
        try:
            _run([*command, str(SOURCES / "runtime.cpp"), "-o", str(built), *links], "building the native runtime")
            _test(built)
        except NativeError as error:
            _write(failure, str(error))
            raise
        built.replace(library)


def _test(library: Path) -> None:
    """Run a library's self-test in another process; raise NativeError if it fails."""
    binding = f"{__package__}.binding"
    _run([sys.executable, "-c", _SELF_TEST, json.dumps(sys.path), binding, str(library)], "its self-test")


def _write(path: Path, text: str) -> None:
    """Write a whole file or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)


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
