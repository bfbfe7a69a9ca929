// A launch plan: what a kernel in Python does for calls of one geometry, as memory to allocate and kernels to launch.
//
// Sizes and numbers are part of the geometry, so all that differs between two calls is where their tensors are.
#pragma once

#include "driver.h"
#include "geometry.h"

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <optional>
#include <vector>

namespace opforge {

// Modes that a kernel may ask for. A plan is for calls in the modes that it was recorded in.
inline uint64_t current_modes() {
  const at::Context& context = at::globalContext();
  const auto precision = [&](at::Float32Backend backend, at::Float32Op op) {
    return static_cast<uint64_t>(context.float32Precision(backend, op));
  };
  return uint64_t{c10::GradMode::is_enabled()} | uint64_t{context.deterministicAlgorithms()} << 1 |
         uint64_t{c10::InferenceMode::is_enabled()} << 2 | uint64_t{context.deterministicAlgorithmsWarnOnly()} << 3 |
         uint64_t{context.allowFP16AccumulationCuBLAS()} << 4 |
         precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL) << 8 |
         static_cast<uint64_t>(c10::get_default_dtype_as_scalartype()) << 16 |
         static_cast<uint64_t>(context.allowFP16ReductionCuBLAS()) << 24 |
         static_cast<uint64_t>(context.allowBF16ReductionCuBLAS()) << 28 |
         precision(at::Float32Backend::CUDA, at::Float32Op::CONV) << 32 |
         precision(at::Float32Backend::MKLDNN, at::Float32Op::MATMUL) << 40;  // tells "medium" from "high"
}

enum class Source : int64_t { kInput, kWrittenInput, kAllocation, kBits };

struct PlanArgument {
  Source source;
  int64_t index;  // of the input or allocation
  int64_t value;  // bytes from its start, or the bits of a number
};

struct PlanAllocation {
  c10::ScalarType dtype;
  std::vector<int64_t> sizes, strides;
};

struct PlanStep {
  bool fill = false;
  void* function = nullptr;
  unsigned grid[3] = {1, 1, 1};
  unsigned threads = 1, shared = 0;
  std::vector<PlanArgument> arguments;  // of a fill: where
  size_t bytes = 0;                     // of a fill
  unsigned char byte = 0;
};

struct PlanResult {
  bool defined = true;
  bool is_input = false;
  bool is_allocation = false;  // as it was allocated; otherwise a view of it
  int64_t index = 0;
  c10::ScalarType dtype = c10::ScalarType::Undefined;
  int64_t offset = 0;  // in elements
  std::vector<int64_t> sizes, strides;
};

using Tensors = c10::SmallVector<at::Tensor, 4>;

// A plan is never deleted: a call may be using it.
struct Plan {
  c10::Device device;
  size_t inputs = 0;
  std::vector<PlanAllocation> allocations;
  std::vector<PlanStep> steps;
  std::vector<PlanResult> results;
  bool writes_inputs = false;

  // Set when the plan is attached to a geometry.
  uint64_t modes = 0;
  std::vector<uint64_t> numbers;
  const Plan* next = nullptr;

  mutable std::atomic<uint64_t> replays{0};
  mutable std::atomic<bool> broken{false};

  // Reads what Python has written; see LaunchPlan.encode.
  Plan(const int64_t* words, size_t count) : device(c10::DeviceType::CPU) {
    Reader read{words, words + count};
    const auto type = static_cast<c10::DeviceType>(read.next());
    device = c10::Device(type, static_cast<c10::DeviceIndex>(read.next()));
    inputs = read.next();
    allocations.resize(read.length());
    for (PlanAllocation& allocation : allocations) {
      allocation.dtype = static_cast<c10::ScalarType>(read.next());
      read.geometry(allocation.sizes, allocation.strides);
    }
    steps.resize(read.length());
    for (PlanStep& step : steps) {
      step.fill = read.next() != 0;
      step.function = reinterpret_cast<void*>(read.next());
      for (unsigned& size : step.grid) size = static_cast<unsigned>(read.next());
      step.threads = static_cast<unsigned>(read.next());
      step.shared = static_cast<unsigned>(read.next());
      step.bytes = read.next();
      step.byte = static_cast<unsigned char>(read.next());
      step.arguments.resize(read.length());
      for (PlanArgument& argument : step.arguments) {
        argument.source = static_cast<Source>(read.next());
        argument.index = read.next();
        argument.value = read.next();
        check(argument);
        writes_inputs |= argument.source == Source::kWrittenInput;
      }
      TORCH_CHECK(!step.fill || step.arguments.size() == 1, "a fill has one place");
    }
    results.resize(read.length());
    for (PlanResult& result : results) {
      const int64_t kind = read.next();
      result.defined = kind != 0;
      result.is_input = kind == 1;
      result.is_allocation = kind == 2;
      result.index = read.next();
      result.dtype = static_cast<c10::ScalarType>(read.next());
      result.offset = read.next();
      read.geometry(result.sizes, result.strides);
      if (!result.defined) continue;
      TORCH_CHECK(result.index >= 0 && result.index < int64_t(result.is_input ? inputs : allocations.size()),
                  "a result is of tensor ", result.index);
    }
    TORCH_CHECK(read.at == read.end, "a plan has words left over");
  }

  bool fits(const Geometry& geometry) const {
    return !broken.load(std::memory_order_relaxed) && inputs == geometry.tensors().size() &&
           numbers.size() == geometry.numbers().size() &&
           std::equal(numbers.begin(), numbers.end(), geometry.numbers().begin());
  }

  // Carries the plan out. Returns false, with nothing changed, if the driver refuses it; Python answers then.
  // With a poison, memory is filled with that byte before it is used.
  bool replay(c10::ArrayRef<const at::Tensor*> given, Tensors& out, std::optional<unsigned char> poison = {}) const {
    const Driver* driver = loaded_driver.load(std::memory_order_acquire);
    if (driver == nullptr) return false;
    std::optional<c10::DeviceGuard> guard;
    void* stream = nullptr;
    if (device.type() != c10::DeviceType::CPU) {  // the CPU is for tests with a stand-in for the driver
      const c10::impl::VirtualGuardImpl impl(device.type());
      if (impl.getDevice() != device) guard.emplace(device);
      stream = impl.getStreamNativeHandle(impl.getStream(device));
      driver->need_context(device.index());
    }
    Tensors made;
    allocate(made);
    if (poison.has_value()) {
      for (const at::Tensor& tensor : made) {
        const auto address = reinterpret_cast<uint64_t>(tensor.storage().mutable_data());
        if (tensor.storage().nbytes() != 0) driver->fill(address, *poison, tensor.storage().nbytes(), stream);
      }
    }
    bool launched = false;
    for (const PlanStep& step : steps) {
      const int error = step.fill ? driver->fill(value_of(step.arguments[0], given, made), step.byte, step.bytes, stream)
                                  : launch(*driver, step, given, made, stream);
      if (error == 0) {
        launched = true;
      } else {
        broken.store(true, std::memory_order_relaxed);
        TORCH_CHECK(Driver::concerns_plan_only(error) && !(launched && writes_inputs),
                    "the CUDA driver refused a kernel's launch: ", driver->name_of(error));
        return false;
      }
    }
    for (const PlanResult& result : results) out.push_back(make_result(result, given, made));
    if (!poison.has_value()) replays.fetch_add(1, std::memory_order_relaxed);
    return true;
  }

 private:
  struct Reader {
    const int64_t* at;
    const int64_t* end;
    int64_t next() {
      TORCH_CHECK(at < end, "a plan ends too early");
      return *at++;
    }
    size_t length() {
      const int64_t count = next();
      TORCH_CHECK(count >= 0 && count <= end - at, "a plan has a list of the length ", count);
      return static_cast<size_t>(count);
    }
    void geometry(std::vector<int64_t>& sizes, std::vector<int64_t>& strides) {
      const size_t dims = length();
      for (size_t i = 0; i < dims; ++i) sizes.push_back(next());
      for (size_t i = 0; i < dims; ++i) strides.push_back(next());
    }
  };

  void check(const PlanArgument& argument) const {
    switch (argument.source) {
      case Source::kInput:
      case Source::kWrittenInput:
        TORCH_CHECK(argument.index >= 0 && argument.index < int64_t(inputs), "an argument is input ", argument.index);
        return;
      case Source::kAllocation:
        TORCH_CHECK(argument.index >= 0 && argument.index < int64_t(allocations.size()), "an argument is allocation ",
                    argument.index);
        return;
      case Source::kBits:
        return;
    }
    TORCH_CHECK(false, "an argument is from nowhere");
  }

  void allocate(Tensors& made) const {
    if (allocations.empty()) return;
    const c10::BackendComponent backend =
        device.type() == c10::DeviceType::CPU ? c10::BackendComponent::CPUBit : c10::BackendComponent::CUDABit;
    const c10::DispatchKeySet keys = c10::DispatchKeySet(backend) | c10::DispatchKeySet(c10::DispatchKey::Dense);
    c10::Allocator* allocator = c10::GetAllocator(device.type());
    for (const PlanAllocation& allocation : allocations) {
      made.emplace_back(at::detail::empty_strided_generic(allocation.sizes, allocation.strides, allocator, keys,
                                                          allocation.dtype));
    }
  }

  static uint64_t value_of(const PlanArgument& argument, c10::ArrayRef<const at::Tensor*> given, const Tensors& made) {
    const void* start = nullptr;
    switch (argument.source) {
      case Source::kBits:
        return static_cast<uint64_t>(argument.value);
      case Source::kInput:
        start = given[argument.index]->const_data_ptr();
        break;
      case Source::kWrittenInput:
        start = given[argument.index]->mutable_data_ptr();
        break;
      case Source::kAllocation:
        start = made[argument.index].storage().mutable_data();
        break;
    }
    return reinterpret_cast<uint64_t>(start) + argument.value;
  }

  static int launch(const Driver& driver, const PlanStep& step, c10::ArrayRef<const at::Tensor*> given,
                    const Tensors& made, void* stream) {
    c10::SmallVector<uint64_t, 32> values;
    c10::SmallVector<void*, 32> parameters;
    values.reserve(step.arguments.size());
    for (const PlanArgument& argument : step.arguments) {
      values.push_back(value_of(argument, given, made));
      parameters.push_back(&values.back());
    }
    return driver.launch(step.function, step.grid[0], step.grid[1], step.grid[2], step.threads, 1, 1, step.shared,
                         stream, parameters.data(), nullptr);
  }

  static at::Tensor make_result(const PlanResult& result, c10::ArrayRef<const at::Tensor*> given,
                                const Tensors& made) {
    if (!result.defined) return at::Tensor();
    if (result.is_input) return *given[result.index];
    const at::Tensor& whole = made[result.index];
    if (result.is_allocation) return whole;
    at::Tensor view = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(whole.storage()), whole.key_set(), c10::scalarTypeToTypeMeta(result.dtype));
    view.unsafeGetTensorImpl()->set_sizes_and_strides(result.sizes, result.strides, result.offset);
    return view;
  }
};

}  // namespace opforge
