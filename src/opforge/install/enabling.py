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
from opforge.kernels.proofs import proof_of
from opforge.kernels.source import UNREADABLE
from opforge.ops import table
from opforge.runtime import RUNTIME, enabling
from opforge.runtime.enabling import POLICIES, Enabled, Source


def enable(
    source: str | Path, *, device: str | None = None, policy: str = "proven", ops: Sequence[str] | str | None = None
) -> Enabled:
    """Put the kernels of a directory, or of a registered backend, in ATen's place in this process.

    ``policy`` is ``proven`` (calls that a run has proven right, at sizes at which the kernel is not slower), ``right`` (proven
    right, however fast) or ``all``. ``ops`` limits it to some operators: a bare name is the whole packet. What is returned
    counts calls, says what was refused, and takes the kernels out again by ``disable()`` or as a context.
    """
    if policy not in POLICIES:
        raise OpforgeError(
            f"policy {policy!r} is unknown; there are {', '.join(f'{p} ({w})' for p, w in POLICIES.items())}"
        )
    names = ops.split(",") if isinstance(ops, str) else ops
    wanted = None if names is None else {op.name for op in table().select(names)}
    made: Enabled = _runtime().enable(sources(_kernels(source)), device=device, policy=policy, ops=wanted)
    return made


@contextmanager
def enabled(source: str | Path, **options: Any) -> Iterator[Enabled]:
    """Enable kernels within a block; options are those of ``enable``."""
    made = enable(source, **options)
    try:
        yield made
    finally:
        made.disable()


def disable() -> None:
    """Take out all kernels that are enabled; afterwards the dispatcher is what it was before."""
    _runtime().disable()


def _runtime() -> Any:
    """Return the runtime: that of a packed backend, if one is in this process already, so that all know of each other."""
    return sys.modules.setdefault(f"_opforge_runtime_{RUNTIME}", enabling)


def sources(kernels: Iterable[Kernel]) -> list[Source]:
    """Return kernels as the runtime takes them; C++ and CUDA sources are built."""
    return [_source(kernel) for kernel in kernels]


def _kernels(source: str | Path) -> list[Kernel]:
    path = Path(source)
    if isinstance(source, Path) or path.is_dir() or "/" in source or source not in registry.names("backends"):
        backend = registry.load("backends", "directory")(BackendOptions(ops_directory=path))
    else:
        backend = registry.load("backends", source)(BackendOptions())
    found: list[Kernel] = backend.kernels([op.name for op in table()])
    served = [kernel for kernel in found if kernel.file is not None]
    if not served:
        raise OpforgeError(f"backend {str(source)!r} has no kernels of its own to enable")
    return served


def _source(kernel: Kernel) -> Source:
    file = Path(kernel.file or "")
    library = kernel.library
    if native.is_native(file) and not library:
        library = str(native.build(native.Unit.of_file(file)).library)
    return Source(
        name=kernel.name,
        primary=kernel.primary,
        serves=tuple((served.op, served.required) for served in kernel.serves),
        file=file,
        entries=kernel.entries,
        digest=kernel.digest,
        proof=proof_of(file) if kernel.digest != UNREADABLE else None,
        library=library,
    )
