// my_ops::mul4 for PyTorch on the development machine: schemas of the functional and the out variant, kernels for the CPU, and the
// shapes of results for export. A FRAGMENT adds to the namespace, which Python code may have claimed.
#include <cstdint>
#include <stdexcept>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

namespace {

template <typename T>
void fill(const Tensor& dense, const Tensor& out) {
  const T* from = static_cast<const T*>(dense.const_data_ptr());
  T* to = static_cast<T*>(out.mutable_data_ptr());
  const int64_t count = dense.numel();
  for (int64_t i = 0; i < count; ++i) {
    to[i] = 4 * from[i];
  }
}

Tensor mul4(const Tensor& x) {
  const Tensor dense = torch::stable::contiguous(x), out = torch::stable::empty_like(dense);
  switch (x.scalar_type()) {
    case ScalarType::Float:
      fill<float>(dense, out);
      break;
    case ScalarType::Double:  // not for the device: its results are compared with those in float64
      fill<double>(dense, out);
      break;
    case ScalarType::Int:
      fill<int32_t>(dense, out);
      break;
    case ScalarType::Long:
      fill<int64_t>(dense, out);
      break;
    default:
      throw std::runtime_error("mul4: x must be of float32, float64, int32 or int64");
  }
  return out;
}

Tensor mul4_out(const Tensor& x, Tensor out) {
  torch::stable::copy_(out, mul4(x));
  return out;
}

Tensor mul4_shape(const Tensor& x) { return torch::stable::empty_like(x); }

Tensor mul4_out_shape(const Tensor&, Tensor out) { return out; }

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(my_ops, m) {
  m.def("mul4(Tensor x) -> Tensor");
  m.def("mul4.out(Tensor x, *, Tensor(a!) out) -> Tensor(a!)");
}

STABLE_TORCH_LIBRARY_IMPL(my_ops, CPU, m) {
  m.impl("mul4", TORCH_BOX(&mul4));
  m.impl("mul4.out", TORCH_BOX(&mul4_out));
}

STABLE_TORCH_LIBRARY_IMPL(my_ops, Meta, m) {
  m.impl("mul4", TORCH_BOX(&mul4_shape));
  m.impl("mul4.out", TORCH_BOX(&mul4_out_shape));
}
