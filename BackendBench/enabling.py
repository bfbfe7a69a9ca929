"""``enable`` and ``disable``: kernels of a directory in ATen's place, in this process."""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import opforge
from opforge.errors import OpforgeError
from opforge.runtime.enabling import Enabled

DEFAULT_FOLDER = "generated_kernels"
_DEVICES = {"CPU": "cpu", "CUDA": "cuda"}


def enable(
    kernel_dir: str | Path | None = None,
    namespace: str = "aten",
    dispatch_key: str = "CUDA",
    *,
    policy: str = "all",
    **options: Any,
) -> Enabled:
    """Put the kernels of a directory in ATen's place, for the tensors of one device.

    As in BackendBench, they get every call, judged or not. ``policy="proven"`` gives them what a run has proven.
    Further options are those of ``opforge.enable``.
    """
    if namespace != "aten":
        raise OpforgeError(f"namespace {namespace!r} cannot be enabled; allowed: aten")
    if dispatch_key not in _DEVICES:
        raise OpforgeError(f"dispatch key {dispatch_key!r} cannot be enabled; allowed: {', '.join(_DEVICES)}")
    folder = Path(DEFAULT_FOLDER if kernel_dir is None else kernel_dir)
    return opforge.enable(folder, device=_DEVICES[dispatch_key], policy=policy, **options)


def disable() -> None:
    """Remove all enabled kernels; the dispatcher is what it was before."""
    opforge.disable()


class enabled(AbstractContextManager[Enabled]):  # noqa: N801  # used like a function
    """Enable kernels on entry, with the options of ``enable``, and remove them on exit."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._args, self._options = args, options
        self._installed: list[Enabled] = []

    def __enter__(self) -> Enabled:
        self._installed.append(enable(*self._args, **self._options))
        return self._installed[-1]

    def __exit__(self, *_error: object) -> None:
        self._installed.pop().disable()


class BackendBench:
    """``with BackendBench.BackendBench.enable("kernels"): …``."""

    enable = enabled
