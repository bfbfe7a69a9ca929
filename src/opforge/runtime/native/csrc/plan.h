// A launch plan: what a kernel in Python does for calls of one geometry, as memory to allocate and kernels to launch.
//
// Sizes and numbers are part of the geometry, so all that differs between two calls is where their tensors are.
#pragma once

#include "driver.h"
#include "geometry.h"

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/copy_ops.h>
#include <ATen/ops/fill_ops.h>
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

// A tensor in memory of the call or of an allocation.
struct PlanView {
  PlanArgument place;
  c10::ScalarType dtype;
  std::vector<int64_t> sizes, strides;
  int64_t bytes = 0;  // from its first element to the end of its last

  size_t itemsize() const { return c10::elementSize(dtype); }

  // Whether every byte belongs to exactly one element.
  bool is_dense() const {
    std::vector<std::pair<int64_t, int64_t>> dims;
    for (size_t i = 0; i < sizes.size(); ++i) {
      if (sizes[i] != 1) dims.emplace_back(strides[i], sizes[i]);
    }
    std::sort(dims.begin(), dims.end());
    int64_t elements = 1;
    for (const auto& [stride, size] : dims) {
      if (stride != elements) return false;
      elements *= size;
    }
    return true;
  }
};

enum class StepKind : int64_t { kLaunch, kFill, kCopy, kFillValue };

struct PlanStep {
  StepKind kind = StepKind::kLaunch;
  bool writes_input = false;
  void* function = nullptr;
  unsigned grid[3] = {1, 1, 1};
  unsigned threads = 1, shared = 0;
  std::vector<PlanArgument> arguments;  // of a fill: where
  size_t bytes = 0;                     // of a fill, and of a copy that the driver can make
  unsigned char byte = 0;
  std::vector<PlanView> views;  // of a copy: target and source; of a fill with a number: target
  c10::Scalar number;
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

// Marks this thread as inside a kernel, where every operator is ATen's own.
class InsideKernel {
 public:
  explicit InsideKernel(int& inside) : inside_(inside), before_(inside) { inside_ = 1; }
  ~InsideKernel() { inside_ = before_; }
  InsideKernel(const InsideKernel&) = delete;
  InsideKernel& operator=(const InsideKernel&) = delete;

 private:
  int& inside_;
  const int before_;
};

// Reads words that Python has written.
struct WordReader {
  const int64_t* at;
  const int64_t* end;
  int64_t next() {
    TORCH_CHECK(at < end, "words end too early");
    return *at++;
  }
  size_t length() {
    const int64_t count = next();
    TORCH_CHECK(count >= 0 && count <= end - at, "there is a list of the length ", count);
    return static_cast<size_t>(count);
  }
  void geometry(std::vector<int64_t>& sizes, std::vector<int64_t>& strides) {
    const size_t dims = length();
    for (size_t i = 0; i < dims; ++i) sizes.push_back(next());
    for (size_t i = 0; i < dims; ++i) strides.push_back(next());
  }
};

// A plan is never deleted: a call may be using it.
struct Plan {
  c10::Device device;
  size_t inputs = 0;
  std::vector<PlanAllocation> allocations;
  std::vector<PlanStep> steps;
  std::vector<PlanResult> results;
  bool writes_inputs = false;

  // Set when the plan is attached to a geometry, by which it is also saved and found again.
  uint64_t modes = 0;
  std::vector<uint64_t> numbers, words;
  const Plan* next = nullptr;

  mutable std::atomic<uint64_t> replays{0};
  mutable std::atomic<bool> broken{false};

  // Reads what Python has written; see LaunchPlan.encode.
  Plan(const int64_t* words, size_t count) : device(c10::DeviceType::CPU) {
    WordReader read{words, words + count};
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
      step.kind = static_cast<StepKind>(read.next());
      if (step.kind == StepKind::kCopy || step.kind == StepKind::kFillValue) {
        read_views(read, step);
      } else {
        read_launch(read, step);
      }
      writes_inputs |= step.writes_input;
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

  bool fits(size_t tensors, c10::ArrayRef<uint64_t> its_numbers) const {
    return !broken.load(std::memory_order_relaxed) && inputs == tensors && its_numbers.equals(numbers);
  }

  // Carries the plan out. Returns false, with nothing changed, if the driver refuses it; Python answers then.
  // With a poison, memory is filled with that byte before it is used. ``inside`` is this thread's mark.
  bool replay(c10::ArrayRef<const at::Tensor*> given, Tensors& out, int& inside,
              std::optional<unsigned char> poison = {}) const {
    const Driver* driver = loaded_driver.load(std::memory_order_acquire);
    if (driver == nullptr || !can_write(given) || !has_views(given)) return false;
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
    bool wrote = false;  // what the call gave: nobody else can answer then
    for (const PlanStep& step : steps) {
      if (const int error = carry_out(*driver, step, given, made, stream, inside); error != 0) {
        broken.store(true, std::memory_order_relaxed);
        TORCH_CHECK(Driver::concerns_plan_only(error) && !wrote,
                    "the CUDA driver refused a kernel's launch: ", driver->name_of(error));
        return false;
      }
      wrote |= step.writes_input;
    }
    for (const PlanResult& result : results) out.push_back(make_result(result, given, made));
    if (!poison.has_value()) replays.fetch_add(1, std::memory_order_relaxed);
    return true;
  }

 private:
  PlanArgument read_argument(WordReader& read, PlanStep& step) const {
    PlanArgument argument{static_cast<Source>(read.next()), read.next(), read.next()};
    check(argument);
    step.writes_input |= argument.source == Source::kWrittenInput;
    return argument;
  }

  void read_launch(WordReader& read, PlanStep& step) const {
    TORCH_CHECK(step.kind == StepKind::kLaunch || step.kind == StepKind::kFill, "a plan has an unknown step");
    step.function = reinterpret_cast<void*>(read.next());
    for (unsigned& size : step.grid) size = static_cast<unsigned>(read.next());
    step.threads = static_cast<unsigned>(read.next());
    step.shared = static_cast<unsigned>(read.next());
    step.bytes = read.next();
    step.byte = static_cast<unsigned char>(read.next());
    const size_t count = read.length();
    TORCH_CHECK(step.kind == StepKind::kLaunch || count == 1, "a fill has one place");
    for (size_t i = 0; i < count; ++i) step.arguments.push_back(read_argument(read, step));
  }

  void read_views(WordReader& read, PlanStep& step) const {
    bool writes = false;
    for (int i = 0; i < (step.kind == StepKind::kCopy ? 2 : 1); ++i) {
      const PlanArgument place = read_argument(read, step);
      TORCH_CHECK(place.source != Source::kBits, "a view has no memory");
      const int64_t dtype = read.next();
      TORCH_CHECK(dtype >= 0 && dtype < int64_t(c10::ScalarType::Undefined), "a view has the dtype ", dtype);
      PlanView& view = step.views.emplace_back(PlanView{place, static_cast<c10::ScalarType>(dtype), {}, {}});
      read.geometry(view.sizes, view.strides);
      int64_t elements = 1;
      for (size_t dim = 0; dim < view.sizes.size(); ++dim) {
        TORCH_CHECK(view.sizes[dim] > 0 && view.strides[dim] >= 0, "a view has no elements, or runs backwards");
        elements += (view.sizes[dim] - 1) * view.strides[dim];
      }
      view.bytes = elements * int64_t(view.itemsize());
      if (i == 0) writes = place.source != Source::kAllocation;
    }
    step.writes_input = writes;
    if (step.kind == StepKind::kFillValue) {
      const int64_t kind = read.next(), bits = read.next();
      double number;
      std::memcpy(&number, &bits, sizeof(number));
      step.number = kind == 0 ? c10::Scalar(bits) : kind == 1 ? c10::Scalar(number) : c10::Scalar(bits != 0);
      return;
    }
    const PlanView &target = step.views[0], &source = step.views[1];
    const auto is_new = [](const PlanView& view) { return view.place.source == Source::kAllocation; };
    // Only ATen knows what to do if the memory may be the same
    const bool apart = (is_new(target) || is_new(source)) &&
                       (is_new(target) != is_new(source) || target.place.index != source.place.index);
    if (apart && target.dtype == source.dtype && target.sizes == source.sizes && target.strides == source.strides &&
        target.is_dense()) {
      step.bytes = static_cast<size_t>(target.bytes);
    }
  }

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

  c10::DispatchKeySet dense_keys() const {
    return c10::DispatchKeySet(device.type() == c10::DeviceType::CPU ? c10::DispatchKey::CPU : c10::DispatchKey::CUDA);
  }

  // Whether a tensor that is written shares no memory with others, except as the geometry says: two storages may be of
  // the same memory, which is not part of a geometry.
  bool can_write(c10::ArrayRef<const at::Tensor*> given) const {
    if (!writes_inputs) return true;
    for (size_t i = 0; i < given.size(); ++i) {
      const c10::StorageImpl* one = given[i]->storage().unsafeGetStorageImpl();
      const auto begin = reinterpret_cast<uintptr_t>(one->data());
      for (size_t j = 0; j < i; ++j) {
        const c10::StorageImpl* other = given[j]->storage().unsafeGetStorageImpl();
        const auto other_begin = reinterpret_cast<uintptr_t>(other->data());
        if (one != other && begin < other_begin + other->nbytes() && other_begin < begin + one->nbytes()) return false;
      }
    }
    return true;
  }

  int64_t offset_of(const PlanView& view, c10::ArrayRef<const at::Tensor*> given) const {
    if (view.place.source == Source::kAllocation) return view.place.value;
    const c10::TensorImpl* whole = given[view.place.index]->unsafeGetTensorImpl();
    return whole->storage_offset() * static_cast<int64_t>(whole->itemsize()) + view.place.value;
  }

  // Whether the views of all steps are inside their memory, and begin at a whole element.
  bool has_views(c10::ArrayRef<const at::Tensor*> given) const {
    for (const PlanStep& step : steps) {
      for (const PlanView& view : step.views) {
        if (view.place.source == Source::kAllocation) continue;  // checked by what it was recorded with
        const int64_t offset = offset_of(view, given);
        const auto size = static_cast<int64_t>(given[view.place.index]->storage().nbytes());
        if (offset < 0 || offset % int64_t(view.itemsize()) != 0 || offset + view.bytes > size) return false;
      }
    }
    return true;
  }

  at::Tensor make_view(const PlanView& view, c10::ArrayRef<const at::Tensor*> given, const Tensors& made) const {
    const at::Tensor& whole = view.place.source == Source::kAllocation ? made[view.place.index]
                                                                        : *given[view.place.index];
    at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(whole.storage()), dense_keys(), c10::scalarTypeToTypeMeta(view.dtype));
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(view.sizes, view.strides,
                                                        offset_of(view, given) / int64_t(view.itemsize()));
    return tensor;
  }

  // Carries out a step. Returns the driver's error, or 0.
  int carry_out(const Driver& driver, const PlanStep& step, c10::ArrayRef<const at::Tensor*> given,
                const Tensors& made, void* stream, int& inside) const {
    switch (step.kind) {
      case StepKind::kLaunch:
        return launch(driver, step, given, made, stream);
      case StepKind::kFill:
        return driver.fill(value_of(step.arguments[0], given, made), step.byte, step.bytes, stream);
      case StepKind::kCopy:
        if (step.bytes != 0) {
          return driver.copy(value_of(step.views[0].place, given, made), value_of(step.views[1].place, given, made),
                             step.bytes, stream);
        }
        break;
      case StepKind::kFillValue:
        break;
    }
    // As it was recorded: below autograd, and inside a kernel
    const InsideKernel mark(inside);
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    at::Tensor target = make_view(step.views[0], given, made);
    if (step.kind == StepKind::kCopy) {
      at::_ops::copy_::redispatch(dense_keys(), target, make_view(step.views[1], given, made), false);
    } else {
      at::_ops::fill__Scalar::redispatch(dense_keys(), target, step.number);
    }
    return 0;
  }

  void allocate(Tensors& made) const {
    if (allocations.empty()) return;
    const c10::DispatchKeySet keys = dense_keys();
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
