"""C++ sources for tests, and compilers that misbehave."""

from __future__ import annotations

import shutil
from pathlib import Path

RELU = """
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

using torch::stable::Tensor;

Tensor relu(const Tensor& self) {
  STD_TORCH_CHECK(self.scalar_type() == torch::headeronly::ScalarType::Float, "float32 only");
  Tensor input = torch::stable::contiguous(self), result = torch::stable::empty_like(input);
  const float* from = static_cast<const float*>(input.const_data_ptr());
  float* to = static_cast<float*>(result.mutable_data_ptr());
  const int64_t count = input.numel();
  for (int64_t i = 0; i < count; ++i) {
    to[i] = from[i] < 0 ? 0 : from[i];
  }
  return result;
}

STABLE_TORCH_LIBRARY(OPFORGE_NAMESPACE, m) {
  m.def("relu_kernel_impl(Tensor self) -> Tensor");
  m.def("something_else(Tensor self) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(OPFORGE_NAMESPACE, CPU, m) {
  m.impl("relu_kernel_impl", TORCH_BOX(&relu));
}
"""
"""A right kernel for relu, with the stable ABI."""

RELU_OF_ATEN = """
#include <ATen/core/Tensor.h>
#include <ATen/ops/relu.h>
#include <torch/library.h>

at::Tensor relu(const at::Tensor& self) { return at::relu(self); }

TORCH_LIBRARY(cheat, m) { m.def("relu(Tensor self) -> Tensor", &relu); }
"""
"""A kernel that calls what it replaces; with torch's full headers, it is slow to compile."""

NO_OPERATOR = "int answer() { return 42; }\n"
"""A library that registers nothing; it needs no header, so it compiles at once."""

ABORTS = "#include <cstdlib>\n__attribute__((constructor)) static void begin() { abort(); }\n"
CRASHES = "#include <csignal>\n__attribute__((constructor)) static void begin() { raise(SIGSEGV); }\n"
DOES_NOT_COMPILE = "int one = 1;\nint two = three;\n"


def registering(macro: str, operator: str, namespace: str = "shared") -> str:
    """Return a source that registers one operator."""
    return f"""
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
torch::stable::Tensor same(const torch::stable::Tensor& self) {{ return self; }}
{macro}({namespace}, m) {{ m.def("{operator}(Tensor self) -> Tensor"); }}
STABLE_TORCH_LIBRARY_IMPL({namespace}, CPU, m) {{ m.impl("{operator}", TORCH_BOX(&same)); }}
"""


def write(folder: Path, source: str, name: str = "source.cpp") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(source)
    return path


def compiler(path: Path, first: str) -> Path:
    """Write a compiler that does something before it compiles, but not when it is asked for its version."""
    path.write_text(f'#!/bin/sh\nif [ "$1" != --version ]; then\n{first}\nfi\nexec {shutil.which("c++")} "$@"\n')
    path.chmod(0o755)
    return path
