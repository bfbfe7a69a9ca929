// One pass over the elements, where the reference makes two.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/Dispatch_v2.h>

using torch::stable::Tensor;

Tensor clamp_scale(const Tensor& x, double scale) {
  Tensor input = torch::stable::contiguous(x);
  Tensor result = torch::stable::empty_like(input);
  const int64_t count = input.numel();
  THO_DISPATCH_V2(input.scalar_type(), "clamp_scale", AT_WRAP(([&] {
    const auto* from = static_cast<const scalar_t*>(input.const_data_ptr());
    auto* to = static_cast<scalar_t*>(result.mutable_data_ptr());
    const auto factor = static_cast<scalar_t>(scale);
    for (int64_t i = 0; i < count; ++i) {
      const scalar_t scaled = from[i] * factor;
      to[i] = scaled < scalar_t(-1) ? scalar_t(-1) : scaled > scalar_t(1) ? scalar_t(1) : scaled;  // NaN stays
    }
  })), AT_EXPAND(AT_FLOATING_TYPES));
  return result;
}

STABLE_TORCH_LIBRARY(OPFORGE_NAMESPACE, m) {
  m.def("clamp_scale(Tensor x, float scale) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(OPFORGE_NAMESPACE, CPU, m) {
  m.impl("clamp_scale", TORCH_BOX(&clamp_scale));
}
