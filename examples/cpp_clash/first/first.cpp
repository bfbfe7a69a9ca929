// Claims the namespace `shared`, as the library beside it does: plain torch ends the process that loads both.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

torch::stable::Tensor first(const torch::stable::Tensor& self) {
  return self;
}

STABLE_TORCH_LIBRARY(shared, m) {
  m.def("first(Tensor(a) self) -> Tensor(a)");
}

STABLE_TORCH_LIBRARY_IMPL(shared, CPU, m) {
  m.impl("first", TORCH_BOX(&first));
}
