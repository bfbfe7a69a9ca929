"""Find providers by name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from opforge import registry
from opforge.generate.provider import Provider
from opforge.generate.provider_options import ProviderOptions


@contextmanager
def open_provider(name: str, options: ProviderOptions | None = None) -> Iterator[Provider]:
    """Yield the provider registered under a name, and close it afterwards."""
    provider = registry.load("providers", name)(options or ProviderOptions())
    try:
        yield provider
    finally:
        if (close := getattr(provider, "close", None)) is not None:
            close()
