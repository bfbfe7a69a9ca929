"""Stress the native runtime in a process of its own, without Triton: python -m tests.runtime.stress LIBRARY STANDIN.

Eight threads call operators of random geometries, while kernels come and go, plans are attached, replayed and refused.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from opforge.runtime.dispatch import InstalledKernel
from opforge.runtime.native import binding, building
from opforge.runtime.native.launch_plan import Allocation, KernelLaunch, LaunchPlan, Pointer, Result
from opforge.runtime.native.recording import number_bits
from opforge.runtime.native_slots import NativeSlot
from opforge.runtime.operator_schema import schema_of

THREADS, CALLS, SIZES = 8, 400, 24
CPU = torch.device("cpu")
Function = Callable[..., Any]


def plan_of(function: int, factor: float, given: torch.Tensor, inputs: int) -> list[int]:
    """Return the plan for a kernel that writes the product of a tensor and a factor to a new one."""
    count = given.numel()
    arguments = (Pointer(False, 0, 0), Pointer(True, 0, 0), count, number_bits("fp32", factor))
    result = Allocation(torch.float32, (count,), (1,))
    launch = KernelLaunch(function, (-(-count // 64), 1, 1), 128, 0, arguments)
    return LaunchPlan(CPU, inputs, (result,), (launch,), (Result(True, 0, torch.float32, 0, (count,), (1,)),)).encode()


class Stress:
    """Slots, with kernels that offer a plan for each of their calls."""

    def __init__(self, standin: Path) -> None:
        self.library = binding.load()
        self.library.load_driver(str(standin))
        self.standin = ctypes.CDLL(str(standin))
        self._scaled = ctypes.cast(self.standin.scaled, ctypes.c_void_p).value or 0
        self.wrong: list[str] = []
        self.slots: list[tuple[NativeSlot, InstalledKernel]] = []
        for name, factor, inputs in (("neg.default", -1.0, 1), ("mul.Tensor", 2.0, 2), ("cat.default", 1.0, 1)):
            schema = schema_of(name)
            kernel = InstalledKernel(schema, name, self._kernel(factor, inputs), None, unadapted=True)
            self.slots.append((NativeSlot(schema, "CPU", self.library), kernel))

    def _kernel(self, factor: float, inputs: int) -> Function:
        def kernel(given: Any, *_rest: Any) -> torch.Tensor:
            tensor = given[0] if isinstance(given, list) else given
            if tensor.is_contiguous() and tensor.dim() == 1:
                self.library.offer_plan(self.library.make_plan(plan_of(self._scaled, factor, tensor, inputs)))
            return torch.from_numpy(tensor.detach().numpy() * factor)

        return kernel

    def call(self, seed: int) -> None:
        """Call operators, and note wrong answers."""
        choose = random.Random(seed)
        memory = torch.arange(256.0)
        for _ in range(CALLS):
            offset, size = choose.choice((0, 1, 4)), choose.randrange(1, SIZES)
            value = memory[offset : offset + size]
            expected = [float(offset + i) for i in range(size)]
            try:
                answers = (torch.neg(value), torch.mul(value, 2.0), torch.cat([value]))
            except RuntimeError as error:
                if "refused a kernel's launch" not in str(error):
                    self.wrong.append(str(error))
                continue
            for answer, factor in zip(answers, (-1.0, 2.0, 1.0), strict=True):
                if answer.tolist() != [x * factor for x in expected]:
                    self.wrong.append(f"{size} at {offset}, times {factor}: {answer.tolist()}")

    def change_kernels(self, threads: list[threading.Thread]) -> int:
        """Put kernels in and take them out until all threads have ended; return how often."""
        changes = 0
        while any(thread.is_alive() for thread in threads):
            for slot, kernel in self.slots:
                slot.kernels = (kernel, kernel) if changes % 3 else ()
                slot.collect_counts()
            if changes % 16 == 8:
                slot.restore()
                slot._native.install(slot._python.name)
            if changes % 4 == 0:
                self.standin.standin_fail_with((701, 700)[changes % 8 // 4])
            self.library.describe([torch.ones(2, 3).t(), torch.ones(()), torch.ones(0)])
            changes += 1
        return changes

    def bad_plans(self) -> None:
        """Make plans of words that are cut off or changed; a plan is made, or an error says why not."""
        words = plan_of(self._scaled, 1.0, torch.ones(4), 1)
        choose = random.Random(0)
        for _ in range(2000):
            bad = words[: choose.randrange(len(words) + 1)] if choose.random() < 0.3 else list(words)
            for _ in range(choose.randrange(3) if bad else 0):
                bad[choose.randrange(len(bad))] = choose.choice((-1, 0, 1, 2, 3, 9, 1 << 40, -(1 << 62), 1 << 62))
            with contextlib.suppress(building.NativeError):
                self.library.make_plan(bad)


def main(library: str, standin: str, fork: str) -> None:
    """Run it; end with exit status 1 and a line if an answer was wrong."""
    torch.set_num_threads(1)
    binding.build = lambda: Path(library)
    stress = Stress(Path(standin))
    stress.bad_plans()
    threads = [threading.Thread(target=stress.call, args=(seed,)) for seed in range(THREADS)]
    for thread in threads:
        thread.start()
    changes = stress.change_kernels(threads)
    for thread in threads:
        thread.join()
    stress.standin.standin_fail_with(0)
    if fork == "fork":
        child = os.fork()
        if not child:
            stress.call(0)
            os._exit(bool(stress.wrong))
        if os.waitpid(child, 0)[1]:
            stress.wrong.append("a forked child was wrong")
    for slot, _kernel in stress.slots:
        slot.kernels = ()
        slot.restore()
    if stress.wrong:
        sys.exit(stress.wrong[0])
    print(f"{THREADS * CALLS * 3} calls, kernels were changed {changes} times")


if __name__ == "__main__":
    main(*sys.argv[1:])
