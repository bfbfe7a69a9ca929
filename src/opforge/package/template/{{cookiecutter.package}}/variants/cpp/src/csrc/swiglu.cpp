// swiglu(gate, up) = silu(gate) * up and its gradient: schemas, and the kernels for the CPU.
#include "common.h"

namespace {

template <typename W>
W sigmoid(W x) {
  return W(1) / (W(1) + std::exp(-x));
}

Tensor swiglu(const Tensor& gate, const Tensor& up) {
  check_same("swiglu", "up", up, "gate", gate);
  const Tensor dense_gate = as_contiguous(gate), dense_up = as_contiguous(up);
  const Tensor result = new_result(gate, shape_of(gate));
  dispatch("swiglu", gate, [&](auto zero) {
    using T = decltype(zero);
    const T* g = data<T>(dense_gate);
    const T* u = data<T>(dense_up);
    T* to = mutable_data<T>(result);
    parallel(result.numel(), 1, [=](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) {
        const auto x = static_cast<Wide<T>>(g[i]);
        to[i] = static_cast<T>(x * sigmoid(x) * static_cast<Wide<T>>(u[i]));
      }
    });
  });
  return result;
}

std::tuple<Tensor, Tensor> swiglu_backward(const Tensor& grad, const Tensor& gate, const Tensor& up) {
  check_same("swiglu_backward", "up", up, "gate", gate);
  check_same("swiglu_backward", "grad", grad, "gate", gate);
  const Tensor dense_grad = as_contiguous(grad), dense_gate = as_contiguous(gate), dense_up = as_contiguous(up);
  const Tensor grad_gate = new_result(gate, shape_of(gate)), grad_up = new_result(gate, shape_of(gate));
  dispatch("swiglu_backward", gate, [&](auto zero) {
    using T = decltype(zero);
    const T* d = data<T>(dense_grad);
    const T* g = data<T>(dense_gate);
    const T* u = data<T>(dense_up);
    T* to_gate = mutable_data<T>(grad_gate);
    T* to_up = mutable_data<T>(grad_up);
    parallel(gate.numel(), 1, [=](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) {
        const auto dy = static_cast<Wide<T>>(d[i]), x = static_cast<Wide<T>>(g[i]), s = sigmoid(x);
        to_gate[i] = static_cast<T>(dy * static_cast<Wide<T>>(u[i]) * s * (1 + x * (1 - s)));
        to_up[i] = static_cast<T>(dy * x * s);
      }
    });
  });
  return {grad_gate, grad_up};
}

}  // namespace

{% if cookiecutter.abi == "stable" %}STABLE_{% endif %}TORCH_LIBRARY_FRAGMENT({{ cookiecutter.package }}, m) {
  m.def("swiglu(Tensor gate, Tensor up) -> Tensor");
  m.def("swiglu_backward(Tensor grad, Tensor gate, Tensor up) -> (Tensor, Tensor)");
}

{% if cookiecutter.abi == "stable" %}STABLE_{% endif %}TORCH_LIBRARY_IMPL({{ cookiecutter.package }}, CPU, m) {
  m.impl("swiglu", {% if cookiecutter.abi == "stable" %}TORCH_BOX(&swiglu){% else %}TORCH_FN(swiglu){% endif %});
  m.impl("swiglu_backward", {% if cookiecutter.abi == "stable" %}TORCH_BOX(&swiglu_backward){% else %}TORCH_FN(swiglu_backward){% endif %});
}
