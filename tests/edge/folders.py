"""Operator folders for tests, with kernels that are right, wrong, or worse."""

from __future__ import annotations

from pathlib import Path

HEAD = """
#include <executorch/runtime/kernel/kernel_includes.h>
using executorch::aten::ScalarType;
using executorch::aten::Tensor;
using executorch::runtime::Error;
using executorch::runtime::KernelRuntimeContext;
"""
RESIZES = (
    "ET_KERNEL_CHECK(context, executorch::runtime::resize_tensor(out, x.sizes()) == Error::Ok, InvalidArgument, out);"
)
TIMES_3 = """
  ET_SWITCH_REALHBF16_TYPES(x.scalar_type(), context, "op", CTYPE, [&]() {
    for (ssize_t i = 0; i < x.numel(); ++i) {
      out.mutable_data_ptr<CTYPE>()[i] = static_cast<CTYPE>(x.const_data_ptr<CTYPE>()[i] * 3);
    }
  });
"""


def kernel(name: str, body: str, namespace: str = "my_ops") -> str:
    """Return the source of a kernel with this body."""
    head = f"Tensor& {name}_out(KernelRuntimeContext& context, const Tensor& x, Tensor& out) {{"
    return f"{HEAD}namespace {namespace}::native {{\n{head}\n{body}\nreturn out;\n}}\n}}\n"


RIGHT = f"{RESIZES}{TIMES_3}"
BODIES = {
    "mul3": RIGHT,
    "also3": RIGHT,
    "add": RIGHT,
    "unsized": TIMES_3,
    "wrong_ints": f"{RIGHT} if (x.scalar_type() == ScalarType::Int) {{ out.mutable_data_ptr<int32_t>()[0] += 1; }}",
    "aborts": 'ET_CHECK_MSG(x.numel() < 0, "a kernel that gives up");',
    "refuses": 'ET_KERNEL_CHECK_MSG(context, x.dim() == 7, InvalidArgument, out, "seven dimensions are wanted");',
    "hangs": "for (volatile int i = 0;; i = i + 1) {}",
}
"""By operator: what its kernel does. All are x * 3 in eager PyTorch."""


def binding(name: str, namespace: str = "my_ops") -> str:
    func = f"{namespace}::{name}.out(Tensor x, *, Tensor(a!) out) -> Tensor(a!)"
    return f"- func: {func}\n  kernels:\n    - arg_meta: null\n      kernel_name: {namespace}::{name}_out\n"


def make(folder: Path, *names: str, together: bool = False) -> Path:
    """Make an operator folder with some of the kernels above, perhaps in one file, which compiles faster; it has no model."""
    (folder / "kernels").mkdir(parents=True)
    for name in names:
        with (folder / "kernels" / f"{'all' if together else name}.cpp").open("a") as file:
            file.write(kernel(name, BODIES[name]))
    (folder / "ops.yaml").write_text("".join(binding(name) for name in names))
    definitions = [f'define("my_ops::{name}(Tensor x) -> Tensor", lambda x: x * 3)\n' for name in names]
    (folder / "ops.py").write_text("from opforge.edge.define import define\n\n" + "".join(definitions))
    return folder


SPECIALIZED = """
- func: my_ops::mul3.out(Tensor x, *, Tensor(a!) out) -> Tensor(a!)
  type_alias:
    F: [Float]
    I: [Int, Long]
  dim_order_alias:
    D1: [0]
    D2: [0, 1]
  kernels:
    - arg_meta: null
      kernel_name: my_ops::mul3_out
    - arg_meta: {x: [F, D1], out: [F, D1]}
      kernel_name: my_ops::mul3_row
    - arg_meta: {x: [I, D2], out: [I, D2]}
      kernel_name: my_ops::mul3_integers
"""
"""The YAML file of an operator with three kernels."""


OVERRIDES = f"""
{HEAD}
#include <executorch/runtime/kernel/operator_registry.h>
namespace {{
const executorch::runtime::Kernel kernels[] = {{executorch::runtime::Kernel(
    "aten::add.out", [](KernelRuntimeContext&, executorch::runtime::Span<executorch::runtime::EValue*>) {{}})}};
const auto registered = executorch::runtime::register_kernels(executorch::runtime::Span<const executorch::runtime::Kernel>(kernels, 1));
}}
"""
"""A library that registers an operator of ATen's, past all that opforge checks."""
