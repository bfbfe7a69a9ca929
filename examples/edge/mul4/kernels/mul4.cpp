// my_ops::mul4.out for the ExecuTorch runtime.
#include <executorch/runtime/kernel/kernel_includes.h>

namespace custom::native {

using executorch::aten::ScalarType;
using executorch::aten::Tensor;
using executorch::runtime::Error;
using executorch::runtime::KernelRuntimeContext;

namespace {

template <typename T>
void fill(const Tensor& x, Tensor& out) {
  const T* from = x.const_data_ptr<T>();
  T* to = out.mutable_data_ptr<T>();
  const auto count = x.numel();
  for (ssize_t i = 0; i < count; ++i) {
    to[i] = 4 * from[i];
  }
}

}  // namespace

Tensor& mul4_out(KernelRuntimeContext& context, const Tensor& x, Tensor& out) {
  ET_KERNEL_CHECK_MSG(
      context, executorch::runtime::resize_tensor(out, x.sizes()) == Error::Ok, InvalidArgument, out, "mul4: out cannot have x's shape");
  ET_KERNEL_CHECK_MSG(context, out.scalar_type() == x.scalar_type(), InvalidArgument, out, "mul4: x and out differ in dtype");
  switch (x.scalar_type()) {
    case ScalarType::Float:
      fill<float>(x, out);
      break;
    case ScalarType::Int:
      fill<int32_t>(x, out);
      break;
    case ScalarType::Long:
      fill<int64_t>(x, out);
      break;
    default:
      ET_KERNEL_CHECK_MSG(context, false, InvalidArgument, out, "mul4: x must be of float32, int32 or int64");
  }
  return out;
}

}  // namespace custom::native
