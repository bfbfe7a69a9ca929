// rms_norm(x, weight, eps): rows divided by the root of their mean square. Schema, and the kernel for the CPU.
#include "common.h"

namespace {

template <typename T>
void norm(const T* row, const T* weight, T* to, int64_t width, double eps) {
  double squares = 0;
  for (int64_t i = 0; i < width; ++i) {
    squares += static_cast<double>(row[i]) * static_cast<double>(row[i]);
  }
  const auto scale = static_cast<Wide<T>>(1 / std::sqrt(squares / static_cast<double>(width) + eps));
  for (int64_t i = 0; i < width; ++i) {
    const Wide<T> normed = static_cast<Wide<T>>(row[i]) * scale;
    to[i] = static_cast<T>(weight ? normed * static_cast<Wide<T>>(weight[i]) : normed);
  }
}

Tensor rms_norm(const Tensor& x, const std::optional<Tensor>& weight, double eps) {
  const Rows rows = rows_of("rms_norm", x);
  if (weight) {
    check_same_kind("rms_norm", "weight", *weight, "x", x);
    if (weight->dim() != 1 || weight->size(0) != rows.width) {
      refuse("rms_norm", "weight has shape ", words(shape_of(*weight)), "; it must be ", words({rows.width}),
             ", as the last dimension of x");
    }
  }
  const Tensor dense = as_contiguous(x);
  const Tensor factors = weight ? as_contiguous(*weight) : dense;  // of which nothing is read without a weight
  const Tensor result = new_result(x, shape_of(x));
  dispatch("rms_norm", x, [&](auto zero) {
    using T = decltype(zero);
    const T* from = data<T>(dense);
    const T* scales = weight ? data<T>(factors) : nullptr;
    T* to = mutable_data<T>(result);
    parallel(rows.count, rows.width, [=](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; ++row) {
        norm(from + row * rows.width, scales, to + row * rows.width, rows.width, eps);
      }
    });
  });
  return result;
}

}  // namespace

{% if cookiecutter.abi == "stable" %}STABLE_{% endif %}TORCH_LIBRARY_FRAGMENT({{ cookiecutter.package }}, m) {
  m.def("rms_norm(Tensor x, Tensor? weight=None, float eps=1e-06) -> Tensor");
}

{% if cookiecutter.abi == "stable" %}STABLE_{% endif %}TORCH_LIBRARY_IMPL({{ cookiecutter.package }}, CPU, m) {
  m.impl("rms_norm", {% if cookiecutter.abi == "stable" %}TORCH_BOX(&rms_norm){% else %}TORCH_FN(rms_norm){% endif %});
}
