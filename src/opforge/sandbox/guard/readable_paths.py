"""Paths that every worker may read: the system, Python and packages.

Not readable: the user's home, the cache, and the working folder.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import os
import pwd
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from opforge import cache
from opforge.kernels.native.sources import HEADER_SUFFIXES, SOURCE_SUFFIXES
from opforge.kernels.source import dependencies
from opforge.sandbox.guard import landlock

_SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/libx32", "/bin", "/sbin", "/opt", "/nix/store", "/gnu/store",
           "/run/opengl-driver", "/proc", "/sys/bus", "/sys/class", "/sys/dev", "/sys/devices", "/sys/fs/cgroup",
           "/sys/kernel/mm", "/sys/module")  # fmt: skip
_ETC = ("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "ld.so.preload", "alternatives", "localtime", "timezone",
        "nsswitch.conf", "passwd", "group", "os-release", "lsb-release", "debian_version", "locale.alias",
        "locale.conf", "OpenCL", "vulkan", "nvidia", "python3*")  # fmt: skip
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_GPU_DEVICES = ("/dev/nvidia*", "/dev/dri", "/dev/kfd")
_SETTINGS = ("PATH", "LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_PATH")
"""Variables that hold folders of tools and libraries."""


@functools.cache
def shared_rights() -> Mapping[str, int]:
    """Return the rights by path that all workers have.

    Call once before forking: it looks at every module loaded so far.
    """
    allowed: dict[str, int] = {}
    shut = _closed_folders()
    for paths, rights in ((_readable(shut), landlock.READ), (_listed(shut), landlock.LIST)):
        for path in sorted({os.path.realpath(path) for path in paths if os.path.exists(path)}):
            if path not in allowed and not any(str(parent) in allowed for parent in Path(path).parents):
                allowed[path] = rights
    return allowed | dict.fromkeys((*_DEVICES, *gpu_devices()), landlock.DEVICE)


def gpu_devices() -> list[str]:
    """Return the device files of GPUs."""
    return [path for pattern in _GPU_DEVICES for path in glob.glob(pattern)]


@functools.cache
def home_folders() -> tuple[str, ...]:
    """Return the user's home folder, according to the environment and to the system; a folder in another comes first.

    Call once before a worker's environment is made.
    """
    named = {os.path.expanduser("~")}
    with contextlib.suppress(KeyError):
        named.add(pwd.getpwuid(os.getuid()).pw_dir)
    return tuple(
        sorted((os.path.realpath(name) for name in named if name not in ("", "/", "~")), key=len, reverse=True)
    )


def kernel_readable_paths(file: str | None, library: str | None = None) -> list[str]:
    """Return the additional paths that the kernel in a file may read: those that its digest covers.

    Both names are returned where its folder is a link. A compiled kernel may read its own library
    in the cache.
    """
    if file is None:
        return []
    built = [os.path.realpath(library)] if library else []
    return built + list(
        dict.fromkeys(named(path) for path in _sources(file) for named in (os.path.realpath, os.path.abspath))
    )


def kernel_listable_folders(file: str | None) -> list[str]:
    """Return the folders that the kernel in a file may list, to import readable files from them."""
    folders = {os.path.dirname(os.path.realpath(path)) for path in (_sources(file) if file else ())}
    return sorted({path for folder in folders for path in listable(folder)})


def _sources(file: str) -> list[str]:
    """Return the files of a kernel; only its own if that cannot be read."""
    try:
        return [file, *map(str, dependencies(Path(file)))]
    except OSError:
        return [file]


def compiler_readable_paths(file: str) -> list[str]:
    """Return what a compiler may read for a source: its folder.

    If the folder holds closed folders, only the sources in it.
    """
    folder = os.path.dirname(os.path.realpath(file))
    if not _holds(folder, _closed_folders()):
        return [folder]
    with os.scandir(folder) as entries:
        return [
            entry.path
            for entry in entries
            if entry.is_file() and entry.name.endswith((*SOURCE_SUFFIXES, *HEADER_SUFFIXES))
        ]


def _closed_folders() -> tuple[str, ...]:
    private = (*home_folders(), os.path.realpath(os.getcwd()), os.path.realpath(cache.root()))
    return (*private, "/root", "/home", "/tmp", "/var", "/etc", "/run", "/dev", "/mnt", "/media", "/srv")  # noqa: S108


def _holds(folder: str, shut: tuple[str, ...]) -> bool:
    """Whether a folder is, or contains, a closed one."""
    inside = folder.rstrip("/") + "/"
    return any((path + "/").startswith(inside) for path in shut)


def _open_parts(path: str, shut: tuple[str, ...]) -> Iterator[str]:
    """Yield a folder; if it contains a closed folder, everything in it except the path to that."""
    real = os.path.realpath(path)
    if not _holds(real, shut):
        yield real
    elif real not in shut:
        with contextlib.suppress(OSError), os.scandir(real) as entries:
            for entry in entries:
                yield from _open_parts(entry.path, shut)


def _readable(shut: tuple[str, ...]) -> Iterator[str]:
    for path in _SYSTEM:
        yield from _open_parts(path, shut)
    for name in _ETC:
        yield from glob.glob(f"/etc/{name}")
    for prefix in {sys.prefix, sys.base_prefix, sys.exec_prefix}:
        yield from (f"{prefix}/{part}" for part in ("bin", "lib", "lib64", "include", "share", "pyvenv.cfg"))
        yield from _open_parts(prefix, shut)
    for name in _SETTINGS:
        for folder in filter(os.path.isabs, os.environ.get(name, "").split(os.pathsep)):
            yield from _open_parts(folder, shut)
    for entry in sys.path:
        yield from _importable(entry, shut)
    yield from _loaded()


def _importable(entry: str, shut: tuple[str, ...]) -> Iterator[str]:
    """Yield an installation folder whole, but only the modules of any other folder on sys.path.

    Another folder may be a project with keys in it.
    """
    if not os.path.isabs(entry):
        return
    if os.path.basename(entry) in ("site-packages", "dist-packages") or os.path.isfile(entry):
        yield from _open_parts(entry, shut)
    elif entry not in shut:
        yield from _modules(entry)


def _modules(folder: str) -> Iterator[str]:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            is_package = entry.name.isidentifier() and os.path.isfile(f"{entry.path}/__init__.py")
            if is_package or entry.name.endswith((".py", ".so", ".pyc")):
                yield entry.path


def listable(folder: str) -> list[str]:
    """Return a folder if it may be listed; nothing can be imported from it otherwise."""
    return list(_open_names(folder, _closed_folders()))


def _listed(shut: tuple[str, ...]) -> Iterator[str]:
    """Yield the folders that may be listed but not read: imports need that."""
    for entry in sys.path:
        if os.path.isabs(entry) and os.path.isdir(entry):
            yield from _open_names(entry, shut)


def _open_names(folder: str, shut: tuple[str, ...]) -> Iterator[str]:
    real = os.path.realpath(folder)
    if not any(_holds(real, (path,)) for path in shut if path != os.path.realpath(os.getcwd())):
        yield real


def _loaded() -> Iterator[str]:
    """Yield the paths of loaded packages, and of those that an editable installation maps."""
    for name, module in list(sys.modules.items()):
        if name.startswith("__editable__"):
            for package, place in getattr(module, "MAPPING", {}).items():
                if package.isidentifier():
                    yield place
        file = getattr(module, "__file__", None)
        if "." not in name and name != "__main__" and isinstance(file, str) and os.path.isabs(file):
            yield os.path.dirname(file) if os.path.basename(file).startswith("__init__.") else file
