"""Holds that a Triton package is fit for a GPU where there is none: kernels are compiled for one, and operators traced as for one.

Run with the package's name. Prints each kernel that was compiled, and for each operator the kernels that torch.compile found in it.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import pkgutil
import sys
from typing import Any

import torch
import triton
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import JITFunction, driver

TARGET = GPUTarget("cuda", 90, 32)
NUMBERS = {"alpha": "fp64", "eps": "fp64", "count": "i32", "size": "i32", "rows": "i32"}


class PretendDriver:
    """As much of a GPU's driver as torch asks for when it looks at what a kernel writes."""

    def get_current_target(self) -> GPUTarget:
        return TARGET

    def get_benchmarker(self) -> Any:
        return None


def compile_kernels(package: str) -> None:
    folder = importlib.import_module(f"{package}.kernels")
    for module in (
        importlib.import_module(f"{folder.__name__}.{m.name}") for m in pkgutil.iter_modules(folder.__path__)
    ):
        for name in sorted(n for n in vars(module) if n.endswith("_kernel")):
            kernel = getattr(module, name)
            kernel = kernel if isinstance(kernel, JITFunction) else kernel.fn
            for dtype in ("fp32", "bf16"):
                compile_one(kernel, dtype)


def compile_one(kernel: Any, dtype: str) -> None:
    fixed = {p.name: {"BLOCK": 256, "ROWS": 4}.get(p.name, True) for p in kernel.params if p.is_constexpr}
    types = {n: "constexpr" if n in fixed else NUMBERS.get(n, f"*{dtype}") for n in kernel.arg_names}
    made = triton.compile(ASTSource(kernel, types, {(kernel.arg_names.index(n),): v for n, v in fixed.items()}), TARGET)
    print("compiled", kernel.__name__, dtype, len(made.asm["cubin"]) > 0)


def trace_operators(package: str) -> None:
    """Trace each operator as torch.compile would for a GPU; the kernels that it finds are not run."""
    driver.set_active(PretendDriver())
    own = importlib.import_module(package)
    for name, module in sys.modules.items():
        if name.startswith(f"{package}.ops."):
            module.on_device = lambda _: contextlib.nullcontext()
    for name in own.__all__:
        for dynamic in (False, True):
            print("traced", name, "dynamic" if dynamic else "fixed", *sorted(traced(getattr(own, name), dynamic)))


def traced(function: Any, dynamic: bool) -> set[str]:
    found: set[str] = set()

    def look(graph: Any, _: Any) -> Any:
        from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

        for node in graph.graph.nodes:
            if "triton_kernel_wrapper" in str(node.target):
                kernel = kernel_side_table.get_kernel(node.kwargs["kernel_idx"])
                found.add((kernel if isinstance(kernel, JITFunction) else kernel.fn).__name__)
        (results,) = (node.args[0] for node in graph.graph.nodes if node.op == "output")
        shapes = [[s if isinstance(s, int) else s.node.hint for s in r.meta["val"].shape] for r in results]
        return make_boxed_func(lambda *_: [torch.zeros(shape) for shape in shapes])

    count = sum(p.default is p.empty for p in inspect.signature(function).parameters.values())
    torch.compiler.reset()
    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend=aot_autograd(fw_compiler=look))
    compiled(*(torch.randn(3, 7) for _ in range(count)))
    return found


if __name__ == "__main__":
    compile_kernels(sys.argv[1])
    trace_operators(sys.argv[1])
