"""Load kernel files in this process and install them for the operators they serve."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from opforge.install.installation import Installation, RefusedError
from opforge.sandbox.guest.loader import LoadedKernel, without_gradients


def install_kernel(
    installation: Installation, description: Mapping[str, Any], ops: Iterable[tuple[str, bool]]
) -> dict[str, str]:
    """Load a kernel, install it for operators, and return the refused operators with reasons.

    ``ops`` holds each operator with whether the kernel is required to answer it.
    Raises KernelLoadError when the file cannot be loaded.
    """
    loaded = LoadedKernel(dict(description), without_gradients)
    refused: dict[str, str] = {}
    for op, required in ops:
        try:
            function = loaded.callable_for(op)
            installation.install(op, function, kernel=description["name"], required=required)
        except (RefusedError, NotImplementedError) as error:
            refused[op] = str(error)
    return refused
