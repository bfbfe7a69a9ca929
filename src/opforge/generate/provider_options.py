"""User options that all providers share."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from opforge.errors import OpforgeError
from opforge.generate.prices import Prices
from opforge.generate.retry import RetryPolicy


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
