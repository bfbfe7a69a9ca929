"""Many tiny kernels of one operator, some of which crash or hang, and a suite of a few small cases for them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from opforge.cases import Case
from opforge.kernels import Kernel, ServedOperator
from opforge.suites.given import GivenSuite, performance_case

OP = "relu.default"
_HONEST = "import torch\ndef relu_kernel_impl(self):\n    return torch.where(self <= 0, 0, self)\n"
_CRASH = "import os\ndef relu_kernel_impl(self):\n    os.abort()\n"
_HANG = "def relu_kernel_impl(self):\n    while True:\n        pass\n"


def suite(count: int, *, timed: bool = False) -> GivenSuite:
    """Return small cases of one operator, and one to be timed if that is asked for."""
    cases = [Case.make(OP, f"((T([{n + 1}, 3], f32),), {{}})") for n in range(count)]
    return GivenSuite([*cases, performance_case(OP, "((T([32, 33], f32),), {})")] if timed else cases)


class TinyBackend:
    """So many kernels; of each hundred the first crashes and the second hangs where that is asked for."""

    name = "tiny"

    def __init__(self, root: Path, count: int, *, faults: bool) -> None:
        self._root = root
        self._count = count
        self._faults = faults

    def kernels(self, ops: Iterable[str]) -> list[Kernel]:  # noqa: ARG002  # there is one operator
        return [self._kernel(number) for number in range(self._count)]

    def fault(self, number: int) -> str:
        return {0: "crashed", 1: "timed_out"}.get(number % 100, "passed") if self._faults else "passed"

    def _kernel(self, number: int) -> Kernel:
        name = f"relu_{number:06}"
        file = self._root / name / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text({"crashed": _CRASH, "timed_out": _HANG, "passed": _HONEST}[self.fault(number)])
        return Kernel(name, OP, (ServedOperator(OP),), str(file), ("relu_kernel_impl",), "tiny")
