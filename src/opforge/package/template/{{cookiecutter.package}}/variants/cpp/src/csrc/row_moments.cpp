// row_moments(x): mean and variance of each row. Schema, and the kernel for the CPU.
#include "common.h"

namespace {

template <typename T>
void moments(const T* row, int64_t width, T* mean, T* variance) {
  double sum = 0, squares = 0;
  for (int64_t i = 0; i < width; ++i) {
    sum += static_cast<double>(row[i]);
  }
  const double middle = sum / static_cast<double>(width);  // NaN for an empty row, as torch.mean gives
  for (int64_t i = 0; i < width; ++i) {
    const double apart = static_cast<double>(row[i]) - middle;
    squares += apart * apart;
  }
  *mean = static_cast<T>(middle);
  *variance = static_cast<T>(squares / static_cast<double>(width));
}

std::tuple<Tensor, Tensor> row_moments(const Tensor& x) {
  const Rows rows = rows_of("row_moments", x);
  Shape sizes = shape_of(x);
  sizes.pop_back();
  const Tensor dense = as_contiguous(x);
  const Tensor mean = new_result(x, sizes), variance = new_result(x, sizes);
  dispatch("row_moments", x, [&](auto zero) {
    using T = decltype(zero);
    const T* from = data<T>(dense);
    T* to_mean = mutable_data<T>(mean);
    T* to_variance = mutable_data<T>(variance);
    parallel(rows.count, rows.width, [=](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; ++row) {
        moments(from + row * rows.width, rows.width, to_mean + row, to_variance + row);
      }
    });
  });
  return {mean, variance};
}

}  // namespace

{% if cookiecutter.abi == "stable" %}STABLE_{% endif %}TORCH_LIBRARY_FRAGMENT({{ cookiecutter.package }}, m) {
  m.def("row_moments(Tensor x) -> (Tensor, Tensor)");
}

{% if cookiecutter.abi == "stable" %}STABLE_{% endif %}TORCH_LIBRARY_IMPL({{ cookiecutter.package }}, CPU, m) {
  m.impl("row_moments", {% if cookiecutter.abi == "stable" %}TORCH_BOX(&row_moments){% else %}TORCH_FN(row_moments){% endif %});
}
