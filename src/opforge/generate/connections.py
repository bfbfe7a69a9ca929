"""Connections that can be ended while a thread waits on them.

Closing a client does not do this.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import weakref
from typing import Any


class Connections:
    """The open connections of a client, collected from trace events of the HTTP library."""

    def __init__(self) -> None:
        self._streams: weakref.WeakSet[Any] = weakref.WeakSet()
        self._aborted = False
        self._lock = threading.Lock()

    def on_request(self, request: Any) -> None:
        """Make a request report the connection that is opened for it."""
        request.extensions["trace"] = self._on_trace_event

    def abort_all(self) -> None:
        """End all connections, also those being opened; waiting threads get an error."""
        with self._lock:
            self._aborted = True
            for stream in list(self._streams):
                abort(stream)

    def _on_trace_event(self, event: str, info: dict[str, Any]) -> None:
        if event in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
            with self._lock:
                self._streams.add(info["return_value"])
                if self._aborted:
                    abort(info["return_value"])


def abort(stream: Any) -> None:
    """End a connection of the HTTP library in both directions.

    This happens below TLS, so that a thread that reads from it wakes up.
    """
    connection = stream.get_extra_info("socket")
    if connection is not None:
        with contextlib.suppress(OSError):  # it may be closed already
            socket.socket.shutdown(connection, socket.SHUT_RDWR)
