"""API keys: read them, and keep them out of all messages."""

from __future__ import annotations

import os
import re
from urllib.parse import unquote, urlsplit

from opforge.generate.provider import MissingKeyError

_KEY_LIKE = re.compile(r"\b(sk|pk|rk)-[\w*.\-]{6,}")
"""Pattern of common API keys, also when a server shows only a part of one."""


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
    """Removes secrets from a text."""

    def __init__(self, key: str, url: str = "") -> None:
        password = urlsplit(url).password or ""
        self._secrets = sorted({key, password, unquote(password)} - {""}, key=len, reverse=True)

    def __call__(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "[key]")
        return _KEY_LIKE.sub("[key]", text)

    def __repr__(self) -> str:
        return "Scrubber()"


def redacted_url(url: str) -> str:
    """Return an address without user name, password and query."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="").geturl()
