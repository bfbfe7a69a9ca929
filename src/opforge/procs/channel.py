"""Messages between processes over a Unix socket: a length, then JSON. Nothing is pickled.

File descriptors may be sent along.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import time
from collections.abc import Iterable
from typing import Any

_LENGTH = struct.Struct("<I")
MAX_MESSAGE_BYTES = 256 << 20
MAX_FDS = 8


class ChannelClosedError(ConnectionError):
    """The other side has disconnected."""


class Channel:
    """One end of a connection."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    @classmethod
    def pair(cls) -> tuple[Channel, Channel]:
        left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        return cls(left), cls(right)

    @classmethod
    def from_fd(cls, fd: int) -> Channel:
        return cls(socket.socket(fileno=fd))

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    def send(self, message: Any, fds: Iterable[int] = (), *, timeout_s: float | None = None) -> None:
        """Send a message, with file descriptors if any.

        Raises TimeoutError if the other side does not read in time.
        """
        payload = json.dumps(message, separators=(",", ":")).encode()
        self._socket.settimeout(timeout_s)
        try:
            socket.send_fds(self._socket, [_LENGTH.pack(len(payload))], list(fds))
            self._socket.sendall(payload)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise ChannelClosedError(str(error)) from None
        finally:
            self._socket.settimeout(None)

    def receive(self, timeout_s: float | None = None) -> Any:
        """Return the next message.

        Raises ChannelClosedError at the end, and TimeoutError if the message does not arrive in
        time.
        """
        message, fds = self.receive_with_fds(timeout_s)
        for fd in fds:
            os.close(fd)  # not expected here
        return message

    def receive_with_fds(self, timeout_s: float | None = None) -> tuple[Any, list[int]]:
        """Return the next message and the file descriptors that came with it."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            self._wait_until(deadline)
            head, fds, _flags, _address = socket.recv_fds(self._socket, _LENGTH.size, MAX_FDS)
            if not head:
                raise ChannelClosedError("the other side closed the channel")
            head += bytes(self._exactly(_LENGTH.size - len(head), deadline))
            (length,) = _LENGTH.unpack(head)
            if length > MAX_MESSAGE_BYTES:
                raise ChannelClosedError(f"a message of {length} bytes is too long")
            return json.loads(self._exactly(length, deadline)), fds
        except ConnectionResetError as error:
            raise ChannelClosedError(str(error)) from None
        finally:
            self._socket.settimeout(None)

    def _exactly(self, length: int, deadline: float | None) -> bytearray:
        buffer = bytearray(length)
        view = memoryview(buffer)
        while view:
            self._wait_until(deadline)
            received = self._socket.recv_into(view)
            if not received:
                raise ChannelClosedError("the other side closed the channel in the middle of a message")
            view = view[received:]
        return buffer

    def _wait_until(self, deadline: float | None) -> None:
        """Limit the next read to the time until the deadline; slow bytes do not prolong it."""
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            raise TimeoutError("the rest of the message did not come in time")
        self._socket.settimeout(left)
