// rich_ops::weighted_sum.out: a list of tensors and a list of whole numbers.
#include "common.h"

namespace rich::native {

Tensor& weighted_sum_out(
    KernelRuntimeContext& context, ArrayRef<Tensor> tensors, ArrayRef<int64_t> weights, Tensor& out) {
  ET_KERNEL_CHECK_MSG(
      context, !tensors.empty() && tensors.size() == weights.size(), InvalidArgument, out, "weighted_sum: as many weights as tensors");
  for (const Tensor& tensor : tensors) {
    ET_KERNEL_CHECK_MSG(
        context, is_float(tensor) && tensor.sizes().equals(tensors[0].sizes()), InvalidArgument, out, "weighted_sum: tensors must be float32 and of one shape");
  }
  ET_KERNEL_CHECK_MSG(
      context, executorch::runtime::resize_tensor(out, tensors[0].sizes()) == Error::Ok, InvalidArgument, out, "weighted_sum: out cannot have that shape");
  float* to = out.mutable_data_ptr<float>();
  for (ssize_t i = 0; i < out.numel(); ++i) {
    float total = 0;
    for (size_t k = 0; k < tensors.size(); ++k) {
      total += tensors[k].const_data_ptr<float>()[i] * static_cast<float>(weights[k]);
    }
    to[i] = total;
  }
  return out;
}

}  // namespace rich::native
