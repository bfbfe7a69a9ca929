"""Tokens of clients. Only their digests are kept in memory, and none is written anywhere."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from opforge.errors import OpforgeError

LOCAL_CLIENT = "local"
"""The client of a server without tokens, which only listens on this machine."""
_LINE = re.compile(r"(?P<client>[\w.-]{1,64})\s+(?P<token>\S{16,512})")


class Tokens:
    """Clients by their tokens. Without any, everybody who can connect is the same client."""

    def __init__(self, clients: dict[bytes, str]) -> None:
        self._clients = clients

    @classmethod
    def read(cls, path: Path | None) -> Tokens:
        """Read a file with a client's name and its token in each line."""
        if path is None:
            return cls({})
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise OpforgeError(f"--tokens {str(path)!r} cannot be read: {error}") from None
        clients: dict[bytes, str] = {}
        for number, line in enumerate(lines, 1):
            text = line.partition("#")[0].strip()
            if not text:
                continue
            if (match := _LINE.fullmatch(text)) is None:
                raise OpforgeError(
                    f"{path}, line {number}: not a name and a token of at least 16 characters, such as: "
                    "ana 5f3c0d7e9b1a4c2d"
                )
            clients[_digest(match["token"])] = match["client"]
        if not clients:
            raise OpforgeError(f"--tokens {str(path)!r} has no token; each line is a client's name and its token")
        return cls(clients)

    def __bool__(self) -> bool:
        return bool(self._clients)

    def client(self, authorization: str | None) -> str | None:
        """Return the client that sends this header; None if its token is unknown."""
        if not self._clients:
            return LOCAL_CLIENT
        scheme, _, token = (authorization or "").partition(" ")
        return self._clients.get(_digest(token.strip())) if scheme.lower() == "bearer" else None


def _digest(token: str) -> bytes:
    """Return what is compared: digests tell nothing by the time that comparing them takes."""
    return hashlib.sha256(token.encode()).digest()
