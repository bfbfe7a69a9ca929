// What the kernels share.
#pragma once

#include <executorch/runtime/kernel/kernel_includes.h>

namespace rich::native {

using executorch::aten::ArrayRef;
using executorch::aten::optional;
using executorch::aten::Scalar;
using executorch::aten::ScalarType;
using executorch::aten::Tensor;
using executorch::runtime::Error;
using executorch::runtime::KernelRuntimeContext;

inline bool is_float(const Tensor& x) { return x.scalar_type() == ScalarType::Float; }

}  // namespace rich::native
