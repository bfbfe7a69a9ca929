"""Connection to a provider: its options, address and key, and sockets that can be ended."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from opforge import registry
from opforge.errors import OpforgeError
from opforge.generate.prices import Prices
from opforge.generate.provider import MissingKeyError, Provider
from opforge.generate.retry import RetryPolicy

_KEY_LIKE = re.compile(r"\b(sk|pk|rk)-[\w*.\-]{6,}")
"""Pattern of common API keys, also when a server shows only a part of one."""


@dataclass(frozen=True, slots=True)
class ProviderOptions:
    """Settings of a provider. The key is not among them; it comes from the environment."""

    url: str = ""
    """Address of the server; empty for the provider's own."""
    transcript: Path | None = None
    """Transcript to replay."""
    prices: Prices = field(default_factory=Prices.load)
    retries: RetryPolicy = field(default_factory=RetryPolicy)
    timeout_s: float = 300.0
    """Maximum time that a server may be silent."""
    limit_s: float = 1800.0
    """Maximum duration of one try, however much data arrives."""
    sleep: Callable[[float], object] | None = None
    """Function that waits between tries; None to wait in real time."""

    def __post_init__(self) -> None:
        for name, value in (("timeout_s", self.timeout_s), ("limit_s", self.limit_s)):
            if not value > 0:
                raise OpforgeError(f"{name} {value} is too small; it must be more than 0")
        if self.url:
            check_address(self.url)


@contextlib.contextmanager
def open_provider(name: str, options: ProviderOptions | None = None) -> Iterator[Provider]:
    """Yield the provider registered under a name, and close it afterwards."""
    provider = registry.load("providers", name)(options or ProviderOptions())
    try:
        yield provider
    finally:
        if (close := getattr(provider, "close", None)) is not None:
            close()


def check_address(url: str) -> None:
    """Raise if this is not the address of a server."""
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid:
        redacted = re.sub(r"[^/]*@", "", url)  # without a password
        raise OpforgeError(f"{redacted!r} is not the address of a server; expected one like http://localhost:8000/v1")


def redacted_url(url: str) -> str:
    """Return an address without user name, password and query."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="").geturl()


def require_key(variable: str, provider: str) -> str:
    """Return the key in the environment; raise if there is none."""
    key = read_key(variable)
    if not key:
        raise MissingKeyError(
            f"{provider} needs a key, and {variable} is not set; export it in the shell that runs opforge"
        )
    return key


def read_key(variable: str) -> str:
    """Return the key in the environment, or an empty string.

    A key that could not be sent to any server is an error; the message does not show it.
    """
    key = os.environ.get(variable, "").strip()
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise MissingKeyError(
            f"{variable} holds characters that are not allowed in a key; export it again, without spaces and quotes"
        )
    return key


class Scrubber:
    """Removes the key and the password from a text."""

    def __init__(self, key: str, url: str = "") -> None:
        password = urlsplit(url).password or ""
        self._secrets = sorted({key, password, unquote(password)} - {""}, key=len, reverse=True)

    def __call__(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "[key]")
        return _KEY_LIKE.sub("[key]", text)

    def __repr__(self) -> str:
        return "Scrubber()"


class Connections:
    """The open connections of a client, collected from trace events of the HTTP library.

    They can be ended while a thread waits on them. Closing a client does not do this.
    """

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

    def _on_trace_event(self, event: str, info: Mapping[str, Any]) -> None:
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
