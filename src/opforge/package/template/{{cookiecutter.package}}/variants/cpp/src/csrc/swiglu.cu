// swiglu and its gradient: the kernels for CUDA. The schemas stand in swiglu.cpp.
#include "cuda_common.h"

namespace {

template <typename W>
__device__ W sigmoid(W x) {
  return W(1) / (W(1) + exp(-x));
}

template <typename T>
__global__ void swiglu_kernel(const T* gate, const T* up, T* result, int64_t count) {
  for (int64_t i = first_index(); i < count; i += index_step()) {
    const auto x = static_cast<Wide<T>>(gate[i]);
    result[i] = static_cast<T>(x * sigmoid(x) * static_cast<Wide<T>>(up[i]));
  }
}

template <typename T>
__global__ void swiglu_backward_kernel(const T* grad, const T* gate, const T* up, T* to_gate, T* to_up, int64_t count) {
  for (int64_t i = first_index(); i < count; i += index_step()) {
    const auto dy = static_cast<Wide<T>>(grad[i]), x = static_cast<Wide<T>>(gate[i]), s = sigmoid(x);
    to_gate[i] = static_cast<T>(dy * static_cast<Wide<T>>(up[i]) * s * (1 + x * (1 - s)));
    to_up[i] = static_cast<T>(dy * x * s);
  }
}

Tensor swiglu(const Tensor& gate, const Tensor& up) {
  check_same("swiglu", "up", up, "gate", gate);
  const OnDevice device("swiglu", gate);
  const Tensor dense_gate = as_contiguous(gate), dense_up = as_contiguous(up);
  const Tensor result = new_result(gate, shape_of(gate));
  const int64_t count = result.numel();
  dispatch("swiglu", gate, [&](auto zero) {
    using T = decltype(zero);
    if (count == 0) {
      return;  // a launch without blocks is an error
    }
    swiglu_kernel<T><<<blocks_for(count, kThreads), kThreads, 0, device.stream()>>>(
        data<T>(dense_gate), data<T>(dense_up), mutable_data<T>(result), count);
    check_launch("swiglu");
  });
  return result;
}

std::tuple<Tensor, Tensor> swiglu_backward(const Tensor& grad, const Tensor& gate, const Tensor& up) {
  check_same("swiglu_backward", "up", up, "gate", gate);
  check_same("swiglu_backward", "grad", grad, "gate", gate);
  const OnDevice device("swiglu_backward", gate);
  const Tensor dense_grad = as_contiguous(grad), dense_gate = as_contiguous(gate), dense_up = as_contiguous(up);
  const Tensor grad_gate = new_result(gate, shape_of(gate)), grad_up = new_result(gate, shape_of(gate));
  const int64_t count = gate.numel();
  dispatch("swiglu_backward", gate, [&](auto zero) {
    using T = decltype(zero);
    if (count == 0) {
      return;
    }
    swiglu_backward_kernel<T><<<blocks_for(count, kThreads), kThreads, 0, device.stream()>>>(
        data<T>(dense_grad), data<T>(dense_gate), data<T>(dense_up), mutable_data<T>(grad_gate), mutable_data<T>(grad_up), count);
    check_launch("swiglu_backward");
  });
  return {grad_gate, grad_up};
}

}  // namespace

{% if cookiecutter.abi == "stable" %}STABLE_{% endif %}TORCH_LIBRARY_IMPL({{ cookiecutter.package }}, CUDA, m) {
  m.impl("swiglu", {% if cookiecutter.abi == "stable" %}TORCH_BOX(&swiglu){% else %}TORCH_FN(swiglu){% endif %});
  m.impl("swiglu_backward", {% if cookiecutter.abi == "stable" %}TORCH_BOX(&swiglu_backward){% else %}TORCH_FN(swiglu_backward){% endif %});
}
