// The matrix product in blocks: pieces of both matrices that fit into the caches are used many times before the next ones come.
#include <algorithm>
#include <vector>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/Dispatch_v2.h>

#include "tile.h"

using torch::stable::Tensor;

namespace {

// One stripe of rows: a block of B is copied side by side once, and every tile of rows runs over it.
template <typename T>
void multiply(const T* a, const T* b, T* c, int64_t first, int64_t last, int64_t inner, int64_t columns) {
  std::vector<T> packed(kDepth * kWidth);
  for (int64_t j = 0; j < columns; j += kWidth) {
    const int64_t width = std::min(kWidth, columns - j);
    for (int64_t k = 0; k < inner; k += kDepth) {
      const int64_t depth = std::min(kDepth, inner - k);
      for (int64_t p = 0; p < depth; ++p) {
        std::copy_n(b + (k + p) * columns + j, width, packed.data() + p * width);
      }
      for (int64_t i = first; i < last; i += kRows) {
        tile(a + i * inner + k, packed.data(), c + i * columns + j, std::min(kRows, last - i), depth, width, inner, columns);
      }
    }
  }
}

Tensor mm(const Tensor& a, const Tensor& b) {
  STD_TORCH_CHECK(a.dim() == 2 && b.dim() == 2, "mm: expected two matrices, got ", a.dim(), " and ", b.dim(), " dimensions");
  STD_TORCH_CHECK(a.size(1) == b.size(0), "mm: ", a.size(0), "x", a.size(1), " and ", b.size(0), "x", b.size(1), " do not go together");
  STD_TORCH_CHECK(a.scalar_type() == b.scalar_type(), "mm: the matrices have different dtypes");
  Tensor left = torch::stable::contiguous(a), right = torch::stable::contiguous(b);
  Tensor product = torch::stable::new_zeros(left, {left.size(0), right.size(1)});
  const int64_t inner = left.size(1), columns = right.size(1);
  THO_DISPATCH_V2(left.scalar_type(), "mm", AT_WRAP(([&] {
    const auto* from = static_cast<const scalar_t*>(left.const_data_ptr());
    const auto* with = static_cast<const scalar_t*>(right.const_data_ptr());
    auto* to = static_cast<scalar_t*>(product.mutable_data_ptr());
    torch::stable::parallel_for(0, left.size(0), kStripe, [&](int64_t first, int64_t last) {
      multiply<scalar_t>(from, with, to, first, last, inner, columns);
    });
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
