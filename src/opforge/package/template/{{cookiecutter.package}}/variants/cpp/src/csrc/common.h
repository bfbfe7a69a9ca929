// What the operators share: tensors, checks, dtypes and loops. They use torch through these few functions{% if cookiecutter.abi == "stable" %}, and its stable ABI stays in here{% else %}, and its full ABI stays in here{% endif %}.
#pragma once

#include <cmath>
#include <cstdint>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

{% if cookiecutter.abi == "stable" %}
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
{% else %}
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>
{% endif %}
#include <torch/headeronly/core/ScalarType.h>

{% if cookiecutter.abi == "stable" %}
using torch::stable::Tensor;
{% else %}
using at::Tensor;
{% endif %}
using Shape = std::vector<int64_t>;

// The type to compute in: float for the short ones, else the tensor's own.
template <typename T>
using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;

// Refuses a call with an error that Python sees as a RuntimeError.
template <typename... Words>
[[noreturn]] void refuse(const char* op, const Words&... words) {
  std::ostringstream text;
  text << op << ": ";
  (text << ... << words);
  throw std::runtime_error(text.str());
}

inline Shape shape_of(const Tensor& x) {
  const auto sizes = x.sizes();
  return Shape(sizes.begin(), sizes.end());
}

// A contiguous tensor with x's elements: x itself where it is one.
inline Tensor as_contiguous(const Tensor& x) {
{% if cookiecutter.abi == "stable" %}
  return torch::stable::contiguous(x);
{% else %}
  return x.contiguous();
{% endif %}
}

// A new contiguous tensor on x's device and of x's dtype, whose elements are not set.
inline Tensor new_result(const Tensor& x, const Shape& sizes) {
{% if cookiecutter.abi == "stable" %}
  return torch::stable::new_empty(x, sizes);
{% else %}
  return at::empty(sizes, x.options());
{% endif %}
}

inline Tensor copy_of(const Tensor& x) {
{% if cookiecutter.abi == "stable" %}
  return torch::stable::clone(x);
{% else %}
  return x.clone();
{% endif %}
}

inline void copy_into(const Tensor& from, Tensor to) {
{% if cookiecutter.abi == "stable" %}
  torch::stable::copy_(to, from);
{% else %}
  to.copy_(from);
{% endif %}
}

template <typename T>
const T* data(const Tensor& x) {
  return static_cast<const T*>(x.const_data_ptr());
}

template <typename T>
T* mutable_data(const Tensor& x) {
  return static_cast<T*>(x.mutable_data_ptr());
}

// Calls body with a zero of the C++ type that x's dtype is: dispatch("op", x, [&](auto zero) { using T = decltype(zero); … });
template <typename Body>
void dispatch(const char* op, const Tensor& x, const Body& body) {
  using torch::headeronly::ScalarType;
  switch (x.scalar_type()) {
    case ScalarType::Float:
      return body(float(0));
    case ScalarType::Double:
      return body(double(0));
    case ScalarType::Half:
      return body(torch::headeronly::Half(0.0f));
    case ScalarType::BFloat16:
      return body(torch::headeronly::BFloat16(0.0f));
    default:
      refuse(op, "dtype ", torch::headeronly::toString(x.scalar_type()),
             " is not supported; allowed: float32, float64, float16, bfloat16");
  }
}

// Calls body(first, last) for parts of 0 … count on several threads. No part is made for less than some ten thousand elements.
template <typename Body>
void parallel(int64_t count, int64_t elements_each, const Body& body) {
  const int64_t grain = 32768 / (elements_each > 0 ? elements_each : 1) + 1;
{% if cookiecutter.abi == "stable" %}
  torch::stable::parallel_for(0, count, grain, body);
{% else %}
  at::parallel_for(0, count, grain, body);
{% endif %}
}

inline std::string words(const Shape& sizes) {
  std::string text = "(";
  for (size_t i = 0; i < sizes.size(); ++i) {
    text += (i ? ", " : "") + std::to_string(sizes[i]);
  }
  return text + ")";
}

// Refuses a tensor of another dtype or device than the model has.
inline void check_same_kind(const char* op, const char* name, const Tensor& x, const char* other, const Tensor& model) {
  using torch::headeronly::toString;
  if (x.scalar_type() != model.scalar_type()) {
    refuse(op, name, " has dtype ", toString(x.scalar_type()), ", and ", other, " has ", toString(model.scalar_type()),
           "; they must be the same");
  }
  if (x.is_cuda() != model.is_cuda() || x.get_device() != model.get_device()) {
    refuse(op, name, " and ", other, " are on different devices; they must be together");
  }
}

// Refuses a tensor of another shape, dtype or device than the model has.
inline void check_same(const char* op, const char* name, const Tensor& x, const char* other, const Tensor& model) {
  check_same_kind(op, name, x, other, model);
  if (shape_of(x) != shape_of(model)) {
    refuse(op, name, " has shape ", words(shape_of(x)), ", and ", other, " has ", words(shape_of(model)),
           "; they must be the same");
  }
}

// Rows are what stands along the last dimension.
struct Rows {
  int64_t count;
  int64_t width;
};

inline Rows rows_of(const char* op, const Tensor& x) {
  if (x.dim() == 0) {
    refuse(op, "x has no dimensions; it needs at least one, of which the last is worked along");
  }
  int64_t count = 1;
  for (int64_t i = 0; i + 1 < x.dim(); ++i) {
    count *= x.size(i);
  }
  return {count, x.size(x.dim() - 1)};
}

// What is read while `written` is written to: x itself, or a copy where the two share memory and are not the same elements.
inline Tensor apart_from(const Tensor& written, const Tensor& x, int64_t element_bytes) {
  const auto* first = static_cast<const char*>(written.const_data_ptr());
  const auto* start = static_cast<const char*>(x.const_data_ptr());
  const bool apart = start == first || start + x.numel() * element_bytes <= first ||
                     first + written.numel() * element_bytes <= start;
  return apart ? x : copy_of(x);
}
