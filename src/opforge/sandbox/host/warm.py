"""A fork server that outlives single commands.

`opforge warm` runs it, OPFORGE_SERVER names it, `connect` uses it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from opforge import cache
from opforge.errors import InternalError, OpforgeError
from opforge.procs.channel import Channel, ChannelClosedError
from opforge.sandbox.host.admission import Hello, ServerRefusedError, Version, check_socket, peer_user
from opforge.sandbox.host.client import ForkServerProcess, Spawner, server_environment

_CONNECT_LIMIT_S = 150.0
"""The server imports torch before it answers, and answers one request at a time."""
_MAX_PATH = 100
"""Longest path of a Unix socket, with some margin."""


class WarmServer:
    """A warm server, for a command that uses it."""

    def __init__(self, channel: Channel) -> None:
        self._spawner = Spawner(channel)

    @property
    def spawner(self) -> Spawner:
        """Return the connection to the server."""
        return self._spawner

    def close(self) -> None:
        """Hang up; the server ends everything that it started for us, and keeps running."""
        self._spawner.close()


@contextlib.contextmanager
def warm_server(
    path: str, roles: Mapping[str, str], device_settings: Mapping[str, str]
) -> Iterator[tuple[str, ForkServerProcess]]:
    """Start a warm server behind a socket, at a path or in a new folder.

    Leaving the block ends the server and removes the socket.
    """
    with contextlib.ExitStack() as stack:
        if not path:
            path = f"{stack.enter_context(tempfile.TemporaryDirectory(prefix='opforge-warm-'))}/server"
        if len(path) > _MAX_PATH:
            raise OpforgeError(
                f"the socket {path!r} has {len(path)} characters; {_MAX_PATH} are allowed: give a shorter one with "
                "--socket"
            )
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        _bind(listener, path)
        stack.callback(Path(path).unlink, missing_ok=True)
        server = ForkServerProcess(roles, device_settings, listener)
        stack.callback(server.close)
        yield path, server


def _bind(listener: socket.socket, path: str) -> None:
    """Bind a socket to a path, so that only this user may connect."""
    mask = os.umask(0o177)
    try:
        listener.bind(path)
    except OSError as error:
        raise OpforgeError(
            f"the socket {path!r} cannot be made: {error.strerror}; give another with --socket, or remove what a "
            "killed server left"
        ) from None
    finally:
        os.umask(mask)
    listener.listen(128)


def connect(path: str, device_settings: Mapping[str, str]) -> WarmServer | None:
    """Return the warm server behind a socket; None if it serves another kind of device.

    Raises ServerRefusedError with the reason if it cannot be used.
    """
    check_socket(path)
    channel = Channel(_connected(path))
    hello = Hello(Version.here(), server_environment(device_settings), str(Path.cwd()), str(cache.root().resolve()))
    try:
        channel.send(hello.wire(), [2])
        reply = channel.receive(_CONNECT_LIMIT_S)
    except (ChannelClosedError, TimeoutError) as error:
        channel.close()
        raise InternalError(f"the server at OPFORGE_SERVER={path} does not answer: {error}") from error
    if "refused" not in reply:
        return WarmServer(channel)
    channel.close()
    if reply["other_device"]:
        return None
    raise ServerRefusedError(f"OPFORGE_SERVER={path} cannot be used: {reply['refused']}; or unset OPFORGE_SERVER")


def _connected(path: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(path)
    except OSError as error:
        connection.close()
        raise ServerRefusedError(
            f"no server answers at OPFORGE_SERVER={path} ({error.strerror}); start one with `opforge warm`, or unset "
            "the variable"
        ) from None
    if (user := peer_user(connection)) != os.geteuid():
        connection.close()
        raise ServerRefusedError(
            f"the server at OPFORGE_SERVER={path} is run by user {user}, and you are user {os.geteuid()}"
        )
    return connection
