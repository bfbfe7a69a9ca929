"""Enable the kernels of a directory or of a backend in this process."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from opforge import registry
from opforge.backends import BackendOptions
from opforge.errors import OpforgeError
from opforge.kernels import Kernel, native
from opforge.kernels.proof import proof_path
from opforge.kernels.source import UNREADABLE
from opforge.ops import table
from opforge.runtime import RUNTIME_VERSION, enabling
from opforge.runtime.enabling import POLICIES, Enabled, Source
from opforge.runtime.learning import LEARN
from opforge.runtime.plan_files import plans_path


def enable(
    source: str | Path,
    *,
    device: str | None = None,
    policy: str = "proven",
    ops: Sequence[str] | str | None = None,
    learn: str = "background",
) -> Enabled:
    """Replace ATen's kernels in this process by those of a directory or a registered backend.

    ``policy`` is ``proven`` (calls that a run has proven right, at sizes where the kernel is not
    slower), ``right`` (proven right, at any speed) or ``all``. ``ops`` limits the operators: a bare
    name means the whole packet. The returned object counts calls and lists refused operators.
    Its ``disable()``, or leaving it as a context manager, removes the kernels.

    ``learn`` says when launch plans are made for Triton kernels on a GPU: in the ``background``, on
    ``request`` (by the returned object's ``learn()``), or ``never``.
    """
    if policy not in POLICIES:
        raise OpforgeError(
            f"policy {policy!r} is unknown; allowed: {', '.join(f'{p} ({w})' for p, w in POLICIES.items())}"
        )
    names = ops.split(",") if isinstance(ops, str) else ops
    wanted = None if names is None else {op.name for op in table().select(names)}
    if learn not in LEARN:
        raise OpforgeError(f"learn={learn!r} is unknown; allowed: {', '.join(f'{k} ({w})' for k, w in LEARN.items())}")
    installed: Enabled = _runtime().enable(
        sources(_kernels(source)), device=device, policy=policy, ops=wanted, learn=learn
    )
    return installed


@contextmanager
def enabled(source: str | Path, **options: Any) -> Iterator[Enabled]:
    """Enable kernels within a block, with the options of ``enable``."""
    installed = enable(source, **options)
    try:
        yield installed
    finally:
        installed.disable()


def disable() -> None:
    """Remove all enabled kernels and restore the dispatcher to its earlier state."""
    _runtime().disable()


def _runtime() -> Any:
    """Return the process's runtime: that of a loaded packed backend, else opforge's.

    All kernels of a process share one runtime, so they know of each other.
    """
    return sys.modules.setdefault(f"_opforge_runtime_{RUNTIME_VERSION}", enabling)


def sources(kernels: Iterable[Kernel]) -> list[Source]:
    """Convert kernels to sources for the runtime; build C++ and CUDA kernels."""
    return [_source(kernel) for kernel in kernels]


def _kernels(source: str | Path) -> list[Kernel]:
    path = Path(source)
    if isinstance(source, Path) or path.is_dir() or "/" in source or source not in registry.names("backends"):
        backend = registry.load("backends", "directory")(BackendOptions(ops_directory=path))
    else:
        backend = registry.load("backends", source)(BackendOptions())
    kernels: list[Kernel] = backend.kernels([op.name for op in table()])
    file_kernels = [kernel for kernel in kernels if kernel.file is not None]
    if not file_kernels:
        raise OpforgeError(f"backend {str(source)!r} has no kernels of its own to enable")
    return file_kernels


def _source(kernel: Kernel) -> Source:
    file = Path(kernel.file or "")
    library = kernel.library
    if native.is_native(file) and not library:
        library = str(native.build(native.LibrarySpec.of_file(file)).library)
    return Source(
        name=kernel.name,
        primary=kernel.primary,
        serves=tuple((served.op, served.required) for served in kernel.serves),
        file=file,
        entries=kernel.entries,
        digest=kernel.digest,
        proof=proof_path(file) if kernel.digest != UNREADABLE else None,
        plans=plans_path(file) if kernel.digest != UNREADABLE else None,
        library=library,
    )
