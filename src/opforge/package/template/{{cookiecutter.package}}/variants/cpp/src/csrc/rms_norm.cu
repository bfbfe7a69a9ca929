// rms_norm: the kernel for CUDA, with a block for each row. The schema stands in rms_norm.cpp.
#include "cuda_common.h"

namespace {

template <typename T>
__global__ void rms_norm_kernel(const T* x, const T* weight, T* result, int64_t rows, int64_t width, Wide<T> eps) {
  using W = Wide<T>;
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const T* from = x + row * width;
    T* to = result + row * width;
    W squares = 0;
    for (int64_t i = threadIdx.x; i < width; i += blockDim.x) {
      const W value = static_cast<W>(from[i]);
      squares += value * value;
    }
    const W scale = W(1) / sqrt(block_sum(squares) / static_cast<W>(width) + eps);
    for (int64_t i = threadIdx.x; i < width; i += blockDim.x) {
      const W normed = static_cast<W>(from[i]) * scale;
      to[i] = static_cast<T>(weight ? normed * static_cast<W>(weight[i]) : normed);
    }
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
  const OnDevice device("rms_norm", x);
  const Tensor dense = as_contiguous(x);
  const Tensor factors = weight ? as_contiguous(*weight) : dense;  // of which nothing is read without a weight
  const Tensor result = new_result(x, shape_of(x));
  dispatch("rms_norm", x, [&](auto zero) {
    using T = decltype(zero);
    if (result.numel() == 0) {
      return;  // a launch without blocks is an error
    }
    rms_norm_kernel<T><<<blocks_for(rows.count), kThreads, 0, device.stream()>>>(
        data<T>(dense), weight ? data<T>(factors) : nullptr, mutable_data<T>(result), rows.count, rows.width,
        static_cast<Wide<T>>(eps));
    check_launch("rms_norm");
  });
  return result;
}

}  // namespace

{% if cookiecutter.abi == "stable" %}STABLE_{% endif %}TORCH_LIBRARY_IMPL({{ cookiecutter.package }}, CUDA, m) {
  m.impl("rms_norm", {% if cookiecutter.abi == "stable" %}TORCH_BOX(&rms_norm){% else %}TORCH_FN(rms_norm){% endif %});
}
