// add_scaled_(x, y, alpha): x += alpha * y in place. Schema, and the kernel for the CPU.
#include "common.h"

namespace {

void add_scaled_(const Tensor& x, const Tensor& y, double alpha) {
  check_same("add_scaled_", "y", y, "x", x);
  const Tensor written = as_contiguous(x);
  dispatch("add_scaled_", x, [&](auto zero) {
    using T = decltype(zero);
    const Tensor read = apart_from(written, as_contiguous(y), sizeof(T));
    const T* from = data<T>(read);
    T* to = mutable_data<T>(written);
    const auto factor = static_cast<Wide<T>>(alpha);
    parallel(x.numel(), 1, [=](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) {
        to[i] = static_cast<T>(static_cast<Wide<T>>(to[i]) + factor * static_cast<Wide<T>>(from[i]));
      }
    });
  });
  if (!x.is_contiguous()) {
    copy_into(written, x);
  }
}

}  // namespace

{% if cookiecutter.abi == "stable" %}STABLE_{% endif %}TORCH_LIBRARY_FRAGMENT({{ cookiecutter.package }}, m) {
  m.def("add_scaled_(Tensor(a!) x, Tensor y, float alpha=1.0) -> ()");
}

{% if cookiecutter.abi == "stable" %}STABLE_{% endif %}TORCH_LIBRARY_IMPL({{ cookiecutter.package }}, CPU, m) {
  m.impl("add_scaled_", {% if cookiecutter.abi == "stable" %}TORCH_BOX(&add_scaled_){% else %}TORCH_FN(add_scaled_){% endif %});
}
