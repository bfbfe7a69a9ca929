"""Record a kernel's attempts to break out of its confinement, for its verdict.

Confinement works without this. Libraries probe files and variables and are not accused: an attempt
counts only if the nearest code outside the standard library is the kernel's own. A kernel that
bypasses Python is stopped as well, but its attempt is not named.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import sysconfig
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from opforge.kernels.native.aten_calls import rejection_reason, stems_of
from opforge.procs import linux
from opforge.sandbox.guard import readable_paths
from opforge.sandbox.guard.confinement import Confinement
from opforge.sandbox.guard.secret_names import looks_secret

_MAX_ATTEMPTS = 8
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_SECRET_FILES = (
    "/etc/shadow",
    "/etc/gshadow",
    "/etc/sudoers",
    "/etc/ssh",
    "/root",
    "/home",
    "/var/lib",
    "/run/secrets",
)
_SECRET_AT_HOME = {".ssh", ".aws", ".gnupg", ".netrc", ".pypirc", ".git-credentials", ".docker", ".kube", ".azure",
                   ".bashrc", ".bash_profile", ".bash_history", ".profile", ".zshrc", ".env", ".anthropic",
                   ".openai", ".huggingface"}  # fmt: skip
_PRIVATE_PROC_FILES = {"environ", "mem", "maps", "fd", "root", "cwd", "auxv", "stack"}
_OWN_DEVICES = (
    "/dev/null",
    "/dev/zero",
    "/dev/full",
    "/dev/random",
    "/dev/urandom",
    "/dev/tty",
    "/dev/nvidia",
    "/dev/dri",
)
_TORCH_SYMBOL = re.compile(r"_ZNK?(?:2at|5torch)|aoti_torch|torch_call")
_LOOKUP_FUNCTIONS = ("dlsym", "dlvsym", "dlopen", "dlmopen", "__libc_dlsym", "_dl_sym", "mprotect", "pkey_mprotect")
_STANDARD = sysconfig.get_path("stdlib") + os.sep
_PACKAGES = tuple(f"{_STANDARD}{name}{os.sep}" for name in ("site-packages", "dist-packages"))

Handler = Callable[["AuditHook", tuple[Any, ...]], None]


class AuditHook:
    """Records the kernel's attempts until they are popped."""

    def __init__(self, confinement: Confinement, homes: tuple[str, ...]) -> None:
        self._confinement = confinement
        self._homes = homes
        self._worker_home = f"{confinement.folder}/home"
        folders = {os.path.dirname(path) for path in confinement.reads} & {*confinement.lists}
        self._kernel_folders = tuple(f"{path}{os.sep}" for path in folders)
        self._kernel_files = frozenset(confinement.reads)
        self._readable = tuple(
            p.rstrip("/") for p in (*readable_paths.shared_rights(), *confinement.reads, confinement.folder)
        )
        self._attempts: list[str] = []
        self._any_succeeded = False
        """Whether an attempt succeeded because confinement does not prevent it."""
        self._stems: frozenset[str] = frozenset()
        self._system = (
            "/usr", "/lib", "/lib64", "/opt", "/nix/store", sys.prefix, sys.base_prefix, _real(torch.__path__[0]) or "",
        )  # fmt: skip

    def start(self) -> None:
        """Install the audit hook, until the process ends."""
        handlers = _HANDLERS
        sys.addaudithook(lambda event, args: self._handle_event(handlers[event], args) if event in handlers else None)
        for variables in (os.environ, os.environb):
            variables.__class__ = _watched(type(variables), self)

    def pop_attempts(self) -> str | None:
        """Return the attempts as one sentence and clear them; None if there were none."""
        tried, self._attempts = self._attempts, []
        if not tried:
            return None
        sentence = f"tried to {', to '.join(tried)}"
        return f"{sentence}; all of it was blocked" if self._confinement.held and not self._any_succeeded else sentence

    def record(self, attempt: str) -> None:
        if attempt not in self._attempts and len(self._attempts) < _MAX_ATTEMPTS:
            self._attempts.append(attempt[:300])

    def record_variable_lookup(self, name: Any) -> None:
        """Record a lookup of a missing variable with a secret-looking name."""
        name = os.fsdecode(name) if isinstance(name, bytes) else name
        if isinstance(name, str) and looks_secret(name) and self._from_kernel():
            self.record(f"read the environment variable {name}")

    def _handle_event(self, handler: Handler, args: tuple[Any, ...]) -> None:
        try:
            handler(self, args)
        except Exception:  # noqa: BLE001  # an unreadable event accuses nobody, and must not disturb the call
            return

    def _from_kernel(self, *, nearest: bool = True) -> bool:
        """Whether the kernel's code does this.

        ``nearest`` looks at the nearest frame outside the standard library, otherwise any frame
        counts.
        """
        frame: FrameType | None = sys._getframe(1)  # noqa: SLF001  # no other way to read the stack
        while frame is not None:
            name = frame.f_code.co_filename
            if name.startswith("<frozen importlib"):
                return False
            if self._is_kernel(name):
                return True
            if nearest and name != __file__ and not _is_standard(name):
                return False
            frame = frame.f_back
        return False

    def _is_kernel(self, name: str) -> bool:
        if name.startswith("<"):
            return not name.startswith("<frozen")  # code compiled from text
        return name in self._kernel_files or name.startswith(self._kernel_folders)

    def record_write(self, path: Any) -> None:
        """Record a file that is written, created, moved or deleted."""
        if not self._from_kernel() or (real_path := _real(path)) is None:
            return
        if real_path.startswith(self._kernel_folders) and not real_path.endswith(".py"):
            return  # a cache beside its source: refused, and the kernel's error says so
        if _lies_in(real_path, self._confinement.folder):
            if self._is_of_home(real_path):
                self.record(f"write {self._name(real_path)}")
        elif not real_path.startswith((*_OWN_DEVICES, f"/proc/{os.getpid()}/")):
            self.record(f"write {self._name(real_path)}")

    def record_read(self, path: Any) -> None:
        """Record a file or folder that is read."""
        if not self._from_kernel() or (real_path := _real(path)) is None:
            return
        if real_path.startswith(self._kernel_folders):
            return  # a file outside its digest: refused, and the kernel's error says so
        if _is_of_other_process(real_path):
            self.record(f"read {real_path}")
        elif self._is_of_home(real_path):
            if not os.path.lexists(real_path):
                self.record(f"read {self._name(real_path)}")
        elif _lies_in(real_path, self._confinement.run, *self._homes, *_SECRET_FILES) and not _lies_in(
            real_path, *self._readable
        ):
            self.record(f"read {self._name(real_path)}")

    def record_signal(self, pid: Any, number: Any) -> None:
        """Record a signal to a foreign process."""
        if isinstance(pid, int) and pid != 0 and number and not _is_family(abs(pid)) and self._from_kernel():
            target = "every process of the user" if pid == -1 else f"process {pid}"
            names = {s.value: s.name for s in signal.Signals}
            self.record(f"send {names.get(number, f'signal {number}')} to {target}")

    def record_socket(self, family: int) -> None:
        if family != socket.AF_UNIX and self._from_kernel():
            self.record(f"open a socket ({socket.AddressFamily(family).name})")

    def check_library(self, name: Any) -> None:
        """Check a library before it is loaded; its file may be gone when the judge looks."""
        real_path = _real(name) if name and self._stems else None
        if real_path is None or _lies_in(real_path, *self._system) or not os.path.isfile(real_path):
            return
        if (reason := rejection_reason(Path(real_path), self._stems)) is not None:
            self._record_success(reason.replace("has loaded", "load", 1))

    def forbid(self, operators: Iterable[str]) -> None:
        """Add operators that the kernel may not call, not even past the dispatcher."""
        self._stems |= stems_of(operators)

    def record_symbol_lookup(self, name: Any) -> None:
        """Record a lookup of torch's functions, or of functions that look up others unseen."""
        if isinstance(name, str) and _TORCH_SYMBOL.match(name):
            if self._from_kernel(nearest=False):
                self._record_success(f"call {name}, a function of torch's libraries, past the dispatcher")
        elif name in _LOOKUP_FUNCTIONS and self._from_kernel():
            self._record_success(f"reach functions or memory with {name}")

    def _record_success(self, attempt: str) -> None:
        self.record(attempt)
        self._any_succeeded = True

    def record_host_lookup(self, name: Any) -> None:
        if name not in (None, "", b"", "localhost", "127.0.0.1", "::1") and self._from_kernel(nearest=False):
            self.record(f"look up the host {os.fsdecode(name)}")

    def _name(self, real_path: str) -> str:
        if self._confinement.run and _lies_in(real_path, self._confinement.run):
            return f"the run's own {os.path.relpath(real_path, self._confinement.run)}"
        for home in (self._worker_home, *self._homes):
            if _lies_in(real_path, home):
                return f"~{real_path[len(home) :]} in the home folder"
        return real_path

    def _is_of_home(self, real_path: str) -> bool:
        """Whether a path lies in the stand-in home folder, outside the libraries' caches."""
        if not real_path.startswith(f"{self._worker_home}/"):
            return False
        first = real_path[len(self._worker_home) + 1 :].split("/", 1)[0]
        return first in _SECRET_AT_HOME or not first.startswith(".")


def _real(path: Any) -> str | None:
    """Return the real path; None for a file descriptor or anything that is not a path."""
    if isinstance(path, int) or path is None:
        return None
    return os.path.realpath(os.fsdecode(path))


def _lies_in(path: str, *folders: str) -> bool:
    return any(path == folder or path.startswith(f"{folder}/") for folder in folders if folder)


def _is_family(pid: int) -> bool:
    """Whether a process is this one, a descendant, or gone."""
    own = os.getpid()
    return pid == own or not os.path.exists(f"/proc/{pid}") or pid in linux.descendants(own, 1000)


def _is_of_other_process(real_path: str) -> bool:
    parts = real_path.split("/")
    is_secret = len(parts) > 3 and parts[1] == "proc" and parts[2].isdigit() and parts[3] in _PRIVATE_PROC_FILES
    return is_secret and not _is_family(int(parts[2]))


def _is_standard(name: str) -> bool:
    return name.startswith("<frozen") or (name.startswith(_STANDARD) and not name.startswith(_PACKAGES))


def _opened(hook: AuditHook, args: tuple[Any, ...]) -> None:
    path, _mode, flags = args
    if isinstance(flags, int) and flags & _WRITES:
        hook.record_write(path)
    else:
        hook.record_read(path)


def _writes_first(hook: AuditHook, args: tuple[Any, ...]) -> None:
    hook.record_write(args[0])


def _writes_both(hook: AuditHook, args: tuple[Any, ...]) -> None:
    hook.record_write(args[0])
    hook.record_write(args[1])


_HANDLERS: Mapping[str, Handler] = {
    "open": _opened,
    "os.listdir": lambda hook, args: hook.record_read(args[0]),
    "os.scandir": lambda hook, args: hook.record_read(args[0]),
    **dict.fromkeys(
        ("os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.chmod", "os.chown", "os.utime"), _writes_first
    ),
    "os.rename": _writes_both,
    "os.link": lambda hook, args: hook.record_write(args[1]),
    "os.symlink": lambda hook, args: hook.record_write(args[1]),
    "socket.__new__": lambda hook, args: hook.record_socket(args[1]),
    "socket.getaddrinfo": lambda hook, args: hook.record_host_lookup(args[0]),
    "socket.gethostbyname": lambda hook, args: hook.record_host_lookup(args[0]),
    "ctypes.dlopen": lambda hook, args: hook.check_library(args[0]),
    "import": lambda hook, args: hook.check_library(args[1]),
    "ctypes.dlsym": lambda hook, args: hook.record_symbol_lookup(args[1]),
    "ctypes.dlsym/handle": lambda hook, args: hook.record_symbol_lookup(args[1]),
    "os.kill": lambda hook, args: hook.record_signal(args[0], args[1]),
    "os.killpg": lambda hook, args: hook.record_signal(-args[0], args[1]),
}


def _watched(kind: Any, hook: AuditHook) -> Any:
    """Return a subclass of an environment class that reports lookups of missing names."""

    class Environment(kind):  # type: ignore[misc]  # derived from the class that os used
        def __getitem__(self, key: Any) -> Any:
            try:
                return super().__getitem__(key)
            except KeyError:
                hook.record_variable_lookup(key)
                raise

    return Environment
