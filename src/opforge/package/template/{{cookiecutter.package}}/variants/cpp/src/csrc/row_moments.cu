// row_moments: the kernel for CUDA, with a block for each row. The schema stands in row_moments.cpp.
#include "cuda_common.h"

namespace {

template <typename T>
__global__ void row_moments_kernel(const T* x, T* mean, T* variance, int64_t rows, int64_t width) {
  using W = Wide<T>;
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const T* from = x + row * width;
    W sum = 0;
    for (int64_t i = threadIdx.x; i < width; i += blockDim.x) {
      sum += static_cast<W>(from[i]);
    }
    const W middle = block_sum(sum) / static_cast<W>(width);
    W apart = 0, squares = 0;
    for (int64_t i = threadIdx.x; i < width; i += blockDim.x) {
      const W difference = static_cast<W>(from[i]) - middle;
      apart += difference;
      squares += difference * difference;
    }
    // By how much the mean is off through rounding: what it adds to the squares is taken out again.
    const W off = block_sum(apart) / static_cast<W>(width);
    const W spread = block_sum(squares) / static_cast<W>(width) - off * off;
    if (threadIdx.x == 0) {
      mean[row] = static_cast<T>(middle);
      variance[row] = static_cast<T>(spread);
    }
  }
}

std::tuple<Tensor, Tensor> row_moments(const Tensor& x) {
  const Rows rows = rows_of("row_moments", x);
  Shape sizes = shape_of(x);
  sizes.pop_back();
  const OnDevice device("row_moments", x);
  const Tensor dense = as_contiguous(x);
  const Tensor mean = new_result(x, sizes), variance = new_result(x, sizes);
  dispatch("row_moments", x, [&](auto zero) {
    using T = decltype(zero);
    if (rows.count == 0) {
      return;  // a launch without blocks is an error
    }
    row_moments_kernel<T><<<blocks_for(rows.count), kThreads, 0, device.stream()>>>(
        data<T>(dense), mutable_data<T>(mean), mutable_data<T>(variance), rows.count, rows.width);
    check_launch("row_moments");
  });
  return {mean, variance};
}

}  // namespace

{% if cookiecutter.abi == "stable" %}STABLE_{% endif %}TORCH_LIBRARY_IMPL({{ cookiecutter.package }}, CUDA, m) {
  m.impl("row_moments", {% if cookiecutter.abi == "stable" %}TORCH_BOX(&row_moments){% else %}TORCH_FN(row_moments){% endif %});
}
