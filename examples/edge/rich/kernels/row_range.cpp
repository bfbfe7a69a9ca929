// rich_ops::row_range.out: two results.
#include "common.h"

#include <algorithm>
#include <tuple>

namespace rich::native {

std::tuple<Tensor&, Tensor&> row_range_out(
    KernelRuntimeContext& context, const Tensor& x, bool keepdim, Tensor& out0, Tensor& out1) {
  std::tuple<Tensor&, Tensor&> both(out0, out1);
  ET_KERNEL_CHECK_MSG(
      context, is_float(x) && x.dim() > 0 && x.size(x.dim() - 1) > 0, InvalidArgument, both, "row_range: x must be float32, of rows that are not empty");
  Tensor::SizesType sizes[executorch::runtime::kTensorDimensionLimit];
  std::copy(x.sizes().begin(), x.sizes().end(), sizes);
  const ssize_t width = x.size(x.dim() - 1);
  sizes[x.dim() - 1] = 1;
  const ArrayRef<Tensor::SizesType> shape(sizes, keepdim ? x.dim() : x.dim() - 1);
  ET_KERNEL_CHECK_MSG(
      context,
      executorch::runtime::resize_tensor(out0, shape) == Error::Ok && executorch::runtime::resize_tensor(out1, shape) == Error::Ok,
      InvalidArgument, both, "row_range: the results cannot have that shape");
  const float* row = x.const_data_ptr<float>();
  for (ssize_t i = 0; i < out0.numel(); ++i, row += width) {
    const auto [least, largest] = std::minmax_element(row, row + width);
    out0.mutable_data_ptr<float>()[i] = *least;
    out1.mutable_data_ptr<float>()[i] = *largest;
  }
  return both;
}

}  // namespace rich::native
