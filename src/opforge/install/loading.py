"""Load the files of kernels in this process, and put them in ATen's place with all that they serve."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from opforge.install.installation import Installation, RefusedError
from opforge.sandbox.loader import LoadedKernel, without_gradients


def install_kernel(
    installation: Installation, description: Mapping[str, Any], ops: Iterable[tuple[str, bool]]
) -> dict[str, str]:
    """Load a kernel, put it in the place of operators (each with whether it may not decline), and return those refused with reasons.

    Raises KernelLoadError when the file cannot be loaded.
    """
    loaded = LoadedKernel(dict(description), without_gradients)
    refused: dict[str, str] = {}
    for op, required in ops:
        try:
            function = loaded.callable_for(op)
            installation.put(op, function, kernel=description["name"], required=required)
        except (RefusedError, NotImplementedError) as error:
            refused[op] = str(error)
    return refused
