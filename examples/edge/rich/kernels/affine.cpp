// rich_ops::affine.out: a number, a tensor that may be missing, and text.
#include "common.h"

#include <string_view>

namespace rich::native {

Tensor& affine_out(
    KernelRuntimeContext& context,
    const Tensor& x,
    const Scalar& factor,
    const std::optional<Tensor>& offset,
    std::string_view activation,
    Tensor& out) {
  ET_KERNEL_CHECK_MSG(context, is_float(x) && is_float(out), InvalidArgument, out, "affine: tensors must be float32");
  ET_KERNEL_CHECK_MSG(
      context, executorch::runtime::resize_tensor(out, x.sizes()) == Error::Ok, InvalidArgument, out, "affine: out cannot have x's shape");
  const bool relu = activation == "relu";
  ET_KERNEL_CHECK_MSG(context, relu || activation == "none", InvalidArgument, out, "affine: activation must be none or relu");
  const float* added = nullptr;
  if (offset.has_value()) {
    ET_KERNEL_CHECK_MSG(
        context, is_float(*offset) && offset->sizes().equals(x.sizes()), InvalidArgument, out, "affine: offset must be like x");
    added = offset->const_data_ptr<float>();
  }
  const auto scale = static_cast<float>(factor.isFloatingPoint() ? factor.to<double>() : static_cast<double>(factor.to<int64_t>()));
  const float* from = x.const_data_ptr<float>();
  float* to = out.mutable_data_ptr<float>();
  for (ssize_t i = 0; i < x.numel(); ++i) {
    const float scaled = from[i] * scale;
    const float y = added ? scaled + added[i] : scaled;
    to[i] = relu && y < 0 ? 0 : y;
  }
  return out;
}

}  // namespace rich::native
