// add_scaled_: the kernel for CUDA. The schema stands in add_scaled_.cpp.
#include "cuda_common.h"

namespace {

template <typename T>
__global__ void add_scaled_kernel(T* x, const T* y, Wide<T> alpha, int64_t count) {
  for (int64_t i = first_index(); i < count; i += index_step()) {
    x[i] = static_cast<T>(static_cast<Wide<T>>(x[i]) + alpha * static_cast<Wide<T>>(y[i]));
  }
}

void add_scaled_(const Tensor& x, const Tensor& y, double alpha) {
  check_same("add_scaled_", "y", y, "x", x);
  const OnDevice device("add_scaled_", x);
  const Tensor written = as_contiguous(x);
  const int64_t count = x.numel();
  dispatch("add_scaled_", x, [&](auto zero) {
    using T = decltype(zero);
    if (count == 0) {
      return;  // a launch without blocks is an error
    }
    const Tensor read = apart_from(written, as_contiguous(y), sizeof(T));
    add_scaled_kernel<T><<<blocks_for(count, kThreads), kThreads, 0, device.stream()>>>(
        mutable_data<T>(written), data<T>(read), static_cast<Wide<T>>(alpha), count);
    check_launch("add_scaled_");
  });
  if (!x.is_contiguous()) {
    copy_into(written, x);
  }
}

}  // namespace

{% if cookiecutter.abi == "stable" %}STABLE_{% endif %}TORCH_LIBRARY_IMPL({{ cookiecutter.package }}, CUDA, m) {
  m.impl("add_scaled_", {% if cookiecutter.abi == "stable" %}TORCH_BOX(&add_scaled_){% else %}TORCH_FN(add_scaled_){% endif %});
}
