// Claims the namespace `shared`, as the library beside it does: plain torch ends the process that loads both.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

torch::stable::Tensor second(const torch::stable::Tensor& self) {
  return self;
}

STABLE_TORCH_LIBRARY(shared, m) {
  m.def("second(Tensor(a) self) -> Tensor(a)");
}

STABLE_TORCH_LIBRARY_IMPL(shared, CPU, m) {
  m.impl("second", TORCH_BOX(&second));
}
