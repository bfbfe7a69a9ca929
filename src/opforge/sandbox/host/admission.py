"""Admit commands to a warm fork server: same user, opforge, torch, Python, similar environment."""

from __future__ import annotations

import os
import socket
import stat
import struct
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from opforge import cache
from opforge.errors import OpforgeError
from opforge.procs.child import settings_read_at_import
from opforge.sandbox.guard import landlock, readable_paths

_CREDENTIALS = struct.Struct("3i")


class ServerRefusedError(OpforgeError):
    """A warm server that this command may not use."""

    exit_code = 2


class OtherDeviceError(ServerRefusedError):
    """A warm server for another kind of device."""


@dataclass(frozen=True, slots=True)
class Version:
    """Versions that must be equal in a server and in the commands that use it."""

    opforge: str
    """The package's folder, size and newest change: an edited checkout needs a new server."""
    torch: str
    python: str

    @classmethod
    def here(cls) -> Version:
        package = Path(__file__).resolve().parents[2]
        files = [path.stat() for path in package.rglob("*.py")]
        newest = max(facts.st_mtime_ns for facts in files)
        source = f"{package} ({sum(facts.st_size for facts in files)} bytes in {len(files)} files, changed at {newest})"
        return cls(source, cache.torch_version(), f"{sys.version.split()[0]} in {sys.prefix}")


@dataclass(frozen=True, slots=True)
class Hello:
    """First message of a command to a warm server; its stderr comes along as a file descriptor."""

    version: Version
    environment: dict[str, str]
    folder: str
    cache: str

    def wire(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_wire(cls, message: Mapping[str, Any]) -> Hello:
        fields = dict(message)
        return cls(Version(**fields.pop("version")), **fields)


@dataclass(frozen=True, slots=True)
class ClientCommand:
    """An admitted command."""

    environment: Mapping[str, str]
    folder: str
    stderr: int


def admit(connection: socket.socket, hello: Hello, fds: list[int], version: Version) -> ClientCommand:
    """Return the command if a server may serve it; raise ServerRefusedError with reason and advice."""
    _check_user(connection)
    _check_version(version, hello.version)
    _check_environment(hello.environment)
    _check_folders(hello)
    (stderr,) = fds
    return ClientCommand(hello.environment, hello.folder, stderr)


def check_socket(path: str) -> None:
    """Refuse a socket that is missing, or that another user could have put there."""
    try:
        facts = os.stat(path)
    except OSError as error:
        raise ServerRefusedError(
            f"OPFORGE_SERVER={path}: {error.strerror}; start a server with `opforge warm`, or unset the variable"
        ) from None
    if not stat.S_ISSOCK(facts.st_mode):
        raise ServerRefusedError(f"OPFORGE_SERVER={path} is not a socket; name the one that `opforge warm` prints")
    if facts.st_uid != os.geteuid():
        raise ServerRefusedError(
            f"OPFORGE_SERVER={path} belongs to user {facts.st_uid}, and you are user {os.geteuid()}; start a server "
            "of your own with `opforge warm`"
        )


def peer_user(connection: socket.socket) -> int:
    """Return the user at the other end of a Unix socket, as reported by the system."""
    row = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _pid, user, _group = _CREDENTIALS.unpack(row)
    return int(user)


def _check_user(connection: socket.socket) -> None:
    if (user := peer_user(connection)) != os.geteuid():
        raise ServerRefusedError(f"the server belongs to user {os.geteuid()}, and you are user {user}")


def _check_version(ours: Version, theirs: Version) -> None:
    for name in ("opforge", "torch", "python"):
        mine, other = getattr(ours, name), getattr(theirs, name)
        if mine != other:
            raise ServerRefusedError(
                f"the server has another {name}: {mine}, and this command has {other}; restart `opforge warm`"
            )


def _check_environment(theirs: Mapping[str, str]) -> None:
    ours = settings_read_at_import(os.environ)
    wanted = settings_read_at_import(theirs)
    interpret = "TRITON_INTERPRET"
    if ours.get(interpret) != wanted.get(interpret):
        raise OtherDeviceError("the server is for another kind of device")
    for name in sorted({*ours, *wanted}):
        if ours.get(name) != wanted.get(name):
            raise ServerRefusedError(
                f"the server was started with {name}={ours.get(name)!r}, and this command has {wanted.get(name)!r}; "
                "restart `opforge warm`"
            )


def _check_folders(hello: Hello) -> None:
    """Refuse a working folder or cache that workers could read.

    Their readable paths are fixed when the server starts.
    """
    readable = [Path(path) for path, rights in readable_paths.shared_rights().items() if rights == landlock.READ]
    for label, folder in (("working folder", hello.folder), ("cache", hello.cache)):
        if any(Path(folder).is_relative_to(path) for path in readable):
            raise ServerRefusedError(
                f"kernels in this server could read your {label} {folder}; start `opforge warm` in that folder, or "
                "unset OPFORGE_SERVER"
            )
