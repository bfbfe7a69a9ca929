"""PyTorch itself as a backend: judging ATen tests the judge and the suite."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from opforge.backends.base import BackendOptions
from opforge.cache import torch_version
from opforge.kernels import Kernel, ServedOperator
from opforge.ops import table


class AtenBackend:
    """PyTorch itself: the baseline of every other backend."""

    name = "aten"

    def __init__(self, options: BackendOptions) -> None:
        del options  # ATen has no options

    def kernels(self, ops: Iterable[str]) -> list[Kernel]:
        packets: dict[str, list[str]] = defaultdict(list)
        for name in ops:
            if (op := table().get(name)) is not None:
                packets[op.packet].append(name)
        digest = f"torch-{torch_version()}"
        return [
            Kernel("aten", names[0], tuple(ServedOperator(n) for n in names), digest=digest)
            for _packet, names in sorted(packets.items())
        ]
