// Operators that models call most. Their slots take arguments as they are, without boxing.
//
// Each has a function of its own, so the function needs no state to know its slot: while a slot is put in or taken out,
// another thread may call the function with what belongs to ATen's.
#pragma once

#include "slot.h"

#include <ATen/ops/_log_softmax_ops.h>
#include <ATen/ops/_softmax_ops.h>
#include <ATen/ops/_softmax_backward_data_ops.h>
#include <ATen/ops/abs_ops.h>
#include <ATen/ops/add_ops.h>
#include <ATen/ops/addmm_ops.h>
#include <ATen/ops/amax_ops.h>
#include <ATen/ops/baddbmm_ops.h>
#include <ATen/ops/bmm_ops.h>
#include <ATen/ops/clamp_ops.h>
#include <ATen/ops/div_ops.h>
#include <ATen/ops/embedding_ops.h>
#include <ATen/ops/eq_ops.h>
#include <ATen/ops/exp_ops.h>
#include <ATen/ops/gather_ops.h>
#include <ATen/ops/gelu_ops.h>
#include <ATen/ops/gelu_backward_ops.h>
#include <ATen/ops/index_select_ops.h>
#include <ATen/ops/masked_fill_ops.h>
#include <ATen/ops/maximum_ops.h>
#include <ATen/ops/mean_ops.h>
#include <ATen/ops/minimum_ops.h>
#include <ATen/ops/mm_ops.h>
#include <ATen/ops/mul_ops.h>
#include <ATen/ops/native_layer_norm_ops.h>
#include <ATen/ops/neg_ops.h>
#include <ATen/ops/pow_ops.h>
#include <ATen/ops/relu_ops.h>
#include <ATen/ops/rsqrt_ops.h>
#include <ATen/ops/sigmoid_ops.h>
#include <ATen/ops/silu_ops.h>
#include <ATen/ops/silu_backward_ops.h>
#include <ATen/ops/sub_ops.h>
#include <ATen/ops/sum_ops.h>
#include <ATen/ops/tanh_ops.h>
#include <ATen/ops/threshold_backward_ops.h>
#include <ATen/ops/where_ops.h>

#define OPFORGE_TYPED_OPERATORS(_) \
  _(relu) _(gelu) _(silu) _(sigmoid) _(tanh) _(exp) _(neg) _(abs) _(rsqrt) _(add_Tensor) _(sub_Tensor) \
  _(mul_Tensor) _(mul_Scalar) _(div_Tensor) _(pow_Tensor_Scalar) _(maximum) _(minimum) _(where_self) _(eq_Tensor) _(mm) \
  _(bmm) _(addmm) _(baddbmm) _(_softmax) _(_log_softmax) _(native_layer_norm) _(sum_dim_IntList) _(mean_dim) \
  _(amax) _(embedding) _(gather) _(index_select) _(clamp) _(masked_fill_Scalar) _(threshold_backward) \
  _(gelu_backward) _(silu_backward) _(_softmax_backward_data)

namespace opforge {

template <class Op, class Schema = typename Op::schema>
struct Typed;

template <class Op, class Return, class... Args>
struct Typed<Op, Return(Args...)> {
  static inline std::atomic<Slot*> on_cpu{nullptr}, on_cuda{nullptr};

  static Return call(c10::DispatchKeySet keys, Args... args) {
    const bool cuda = keys.has_backend(c10::BackendComponent::CUDABit);
    const Slot* slot = (cuda ? on_cuda : on_cpu).load(std::memory_order_acquire);
    if (slot == nullptr) slot = (cuda ? on_cpu : on_cuda).load(std::memory_order_acquire);  // keys of a direct call
    return slot->template call_typed<Return, Args...>(keys, std::forward<Args>(args)...);
  }

  static bool make(Slot* slot, c10::KernelFunction& function) {
    const c10::OperatorName& name = slot->op().operator_name();
    if (name.name != Op::name || name.overload_name != Op::overload_name) return false;
    (slot->key() == c10::DispatchKey::CPU ? on_cpu : on_cuda).store(slot, std::memory_order_release);
    function = c10::KernelFunction::makeFromUnboxedFunction(c10::CompileTimeFunctionPointer<decltype(call), &call>());
    return true;
  }
};

// Returns the function to register for a slot.
inline c10::KernelFunction function_of(Slot* slot) {
  c10::KernelFunction function;
#define OPFORGE_MAKE(op) \
  if (Typed<at::_ops::op>::make(slot, function)) return function;
  OPFORGE_TYPED_OPERATORS(OPFORGE_MAKE)
#undef OPFORGE_MAKE
  return boxed_function_of(slot->key());
}

}  // namespace opforge
