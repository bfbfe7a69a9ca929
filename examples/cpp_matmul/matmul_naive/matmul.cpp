// The matrix product as it stands in the book: three loops, in the order that reads memory in rows.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/Dispatch_v2.h>

using torch::stable::Tensor;

namespace {

template <typename T>
void multiply(const T* a, const T* b, T* c, int64_t rows, int64_t inner, int64_t columns) {
  for (int64_t i = 0; i < rows; ++i) {
    T* row = c + i * columns;
    for (int64_t j = 0; j < columns; ++j) {
      row[j] = T(0);
    }
    for (int64_t k = 0; k < inner; ++k) {
      const T left = a[i * inner + k];
      for (int64_t j = 0; j < columns; ++j) {
        row[j] += left * b[k * columns + j];
      }
    }
  }
}

Tensor mm(const Tensor& a, const Tensor& b) {
  STD_TORCH_CHECK(a.dim() == 2 && b.dim() == 2, "mm: expected two matrices, got ", a.dim(), " and ", b.dim(), " dimensions");
  STD_TORCH_CHECK(a.size(1) == b.size(0), "mm: ", a.size(0), "x", a.size(1), " and ", b.size(0), "x", b.size(1), " do not go together");
  STD_TORCH_CHECK(a.scalar_type() == b.scalar_type(), "mm: the matrices have different dtypes");
  Tensor left = torch::stable::contiguous(a), right = torch::stable::contiguous(b);
  Tensor product = torch::stable::new_empty(left, {left.size(0), right.size(1)});
  THO_DISPATCH_V2(left.scalar_type(), "mm", AT_WRAP(([&] {
    multiply<scalar_t>(static_cast<const scalar_t*>(left.const_data_ptr()), static_cast<const scalar_t*>(right.const_data_ptr()),
                       static_cast<scalar_t*>(product.mutable_data_ptr()), left.size(0), left.size(1), right.size(1));
  })), AT_EXPAND(AT_FLOATING_TYPES), AT_EXPAND(AT_INTEGRAL_TYPES));
  return product;
}

}  // namespace

STABLE_TORCH_LIBRARY(OPFORGE_NAMESPACE, m) {
  m.def("mm(Tensor a, Tensor b) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(OPFORGE_NAMESPACE, CPU, m) {
  m.impl("mm", TORCH_BOX(&mm));
}
