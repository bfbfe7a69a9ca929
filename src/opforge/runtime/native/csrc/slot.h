// An operator's place in the dispatcher. A call goes to ATen's saved kernel, to a C++ kernel, to a launch plan, or to
// Python.
//
// Slots live for ever, and the registered function has no state of its own: it finds its slot by the operator. So a
// thread that is in a call while a slot is removed meets nothing that has been freed.
#pragma once

#include "table.h"

#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <bit>

#define OPFORGE_QUOTED(text) #text
#define OPFORGE_STRING(text) OPFORGE_QUOTED(text)

namespace opforge {

constexpr int kTries = 4;  // before a call whose rules keep changing goes to the slow path
constexpr int kOutcomeBits = 8;
static_assert(kMaxOutcomes <= 1 << kOutcomeBits);

// Gives access to a private member: an explicit instantiation may name it, and the compiler checks that it is there.
template <class Tag, typename Tag::Member member>
struct Opened {
  friend constexpr typename Tag::Member open(Tag) { return member; }
};
struct SavedKernel {
  using Member = c10::KernelFunction c10::SafeKernelFunction::*;
  friend constexpr Member open(SavedKernel);
};
struct SavedToken {
  using Member = std::shared_ptr<c10::KernelToken> c10::SafeKernelFunction::*;
  friend constexpr Member open(SavedToken);
};
template struct Opened<SavedKernel, &c10::SafeKernelFunction::kernel_>;
template struct Opened<SavedToken, &c10::SafeKernelFunction::token_>;

class Slot {
 public:
  Slot(const c10::OperatorHandle& op, c10::DispatchKey key);

  const c10::OperatorHandle& op() const { return op_; }
  c10::DispatchKey key() const { return key_; }

  // Saves the present kernel and takes its place. The caller holds the lock of Python's side.
  void install(c10::KernelFunction function, const std::string& name) {
    if (run_ == nullptr) {  // once: a call from before may still read them
      decide_ = python("decide_" + name);
      answer_ = python("answer_" + name);
      run_ = python("run_" + name);
    }
    // Never freed: a call may be in it.
    original_.store(new c10::SafeKernelFunction(op_.getComputedKernelForDispatchKey(key_)), std::memory_order_release);
    registration_.emplace(c10::Dispatcher::singleton().registerImpl(
        op_.operator_name(), key_, std::move(function), std::nullopt, nullptr, "opforge: native slot"));
  }

  // Reads the limits of numbers that Python has written.
  std::vector<NumberLimits> limits_from(const int64_t* words, size_t count) const {
    std::vector<NumberLimits> limits(arguments_);
    WordReader read{words, words + count};
    while (read.at != read.end) {
      const int64_t position = read.next();
      TORCH_CHECK(position >= 0 && position < int64_t(arguments_), "there is no argument ", position);
      NumberLimits& its = limits[position];
      its.apply = true;
      for (size_t left = read.length(); left > 0; --left) its.ints.push_back(read.next());
      for (size_t left = read.length(); left > 0; --left) its.doubles.push_back(std::bit_cast<double>(read.next()));
      const std::optional<c10::IValue> value = op_.schema().arguments()[position].default_value();
      if (value.has_value() && value->isInt()) {
        its.default_tag = kInt;
        its.default_bits = static_cast<uint64_t>(value->toInt());
      } else if (value.has_value() && value->isDouble()) {
        its.default_tag = kDouble;
        its.default_bits = std::bit_cast<uint64_t>(value->toDouble());
      }
    }
    return limits;
  }

  void remove() { registration_.reset(); }
  bool installed() const { return registration_.has_value(); }

  // Replaces the rules; nullptr switches the kernels off. Returns the old ones, whose counts are then final.
  std::shared_ptr<Rules> set_rules(std::shared_ptr<Rules> rules) {
    const std::lock_guard<std::mutex> guard(writers_lock());
    return replace_table(rules == nullptr ? nullptr : new Table(std::move(rules)));
  }

  std::shared_ptr<Rules> rules() const {
    const std::lock_guard<std::mutex> guard(writers_lock());
    const Table* table = table_.load();
    return table == nullptr ? nullptr : table->rules;
  }

  size_t geometries() const {
    const std::lock_guard<std::mutex> guard(writers_lock());
    const Table* table = table_.load();
    return table == nullptr ? 0 : table->size;
  }

  void call(c10::DispatchKeySet keys, c10::Stack* stack) const {
    Thread* thread = this_thread();
    if (thread->inside == 0 && table_.load(std::memory_order_acquire) != nullptr) {  // then answer_ is set too
      const c10::IValue* arguments = stack->data() + stack->size() - arguments_;
      size_t elements = 0;
      for (size_t i = 0; i < arguments_; ++i) elements += elements_in(arguments[i]);
      const auto describe = [&](auto& description) { return description.describe(arguments, arguments_); };
      Decision decision;
      if (Comparison compared; recall(thread, elements, describe, compared, decision) && !decision.needs_python()) {
        return act(decision, thread, compared.tensors(), nullptr, keys, stack);
      }
      for (int i = 0; i < kTries; ++i) {
        Geometry geometry;
        const Known known = look_up(thread, elements, describe, geometry, decision);
        if (known == Known::kYes) return act(decision, thread, geometry.tensors(), &geometry, keys, stack);
        if (known == Known::kOff) return original_.load(std::memory_order_acquire)->callBoxed(op_, keys, stack);
        const int64_t code = known == Known::kNever ? -1 : ask(keys, *stack);
        if (code < 0) break;
        learn(geometry, decision.code >> kOutcomeBits, code);
      }
      return to_python(*answer_, keys, stack, -1);
    }
    original_.load(std::memory_order_acquire)->callBoxed(op_, keys, stack);
  }

  // Does the same with arguments that are not boxed. Boxing costs more than the decision.
  template <class Return, class... Args>
  Return call_typed(c10::DispatchKeySet keys, Args... args) const {
    Thread* thread = this_thread();
    if (thread->inside == 0 && table_.load(std::memory_order_relaxed) != nullptr) {
      const auto describe = [&](auto& description) { return description.describe_typed(args...); };
      const size_t elements = (elements_in(args) + ... + 0);
      Decision decision;
      Comparison compared;
      if (!recall(thread, elements, describe, compared, decision)) {
        return call_rare<Return, Args...>(thread, elements, keys, std::forward<Args>(args)...);
      }
      if (decision.outcome.action != kPass) {
        return act_typed<Return, Args...>(decision, thread, compared.tensors(), keys, std::forward<Args>(args)...);
      }
    }
    return call_original<Return, Args...>(keys, std::forward<Args>(args)...);
  }

 private:
  enum class Known { kYes, kNo, kNever, kOff };

  struct Decision {
    Outcome outcome;
    int64_t code = 0;  // generation and outcome
    bool needs_python() const { return outcome.action == kRun && outcome.plan == nullptr; }
  };

  template <class Return, class... Args>
  C10_ALWAYS_INLINE Return call_original(c10::DispatchKeySet keys, Args... args) const {
    const c10::SafeKernelFunction& original = *original_.load(std::memory_order_acquire);
    TORCH_CHECK((original.*open(SavedToken{}))->isValid(), "the overridden kernel is gone: ", original.debug());
    return (original.*open(SavedKernel{})).template call<Return, Args...>(op_, keys, std::forward<Args>(args)...);
  }

  // Answers a call that is not among those found last.
  template <class Return, class... Args>
  C10_NOINLINE Return call_rare(Thread* thread, size_t elements, c10::DispatchKeySet keys, Args... args) const {
    const auto describe = [&](auto& description) { return description.describe_typed(args...); };
    Geometry geometry;
    Decision decision;
    switch (look_up(thread, elements, describe, geometry, decision)) {
      case Known::kOff:
        return call_original<Return, Args...>(keys, std::forward<Args>(args)...);
      case Known::kYes:
        if (decision.outcome.action == kPass) {
          return call_original<Return, Args...>(keys, std::forward<Args>(args)...);
        }
        return act_typed<Return, Args...>(decision, thread, geometry.tensors(), keys, std::forward<Args>(args)...);
      default:
        return boxed_.call<Return, Args...>(op_, keys, std::forward<Args>(args)...);
    }
  }

  // Carries out a decision other than to call ATen.
  template <class Return, class... Args>
  C10_NOINLINE Return act_typed(const Decision& decision, Thread* thread, c10::ArrayRef<const at::Tensor*> tensors,
                                c10::DispatchKeySet keys, Args... args) const {
    if (decision.needs_python()) return boxed_.call<Return, Args...>(op_, keys, std::forward<Args>(args)...);
    if (decision.outcome.plan != nullptr) {
      if (Tensors results; replay(decision, thread, tensors, results)) return typed_results<Return>(results);
    }
    c10::Stack stack = c10::impl::boxArgs<Args...>(std::forward<Args>(args)...);
    if (decision.outcome.plan != nullptr) {
      to_python(*answer_, keys, &stack, decision.code);
    } else {
      act(decision, thread, tensors, nullptr, keys, &stack);
    }
    return c10::impl::PopResult<Return>::call(stack);
  }

  c10::SafeKernelFunction* python(const std::string& name) const {
    const std::string full_name = OPFORGE_STRING(OPFORGE_NAMESPACE) "::" + name;
    const c10::OperatorHandle op = c10::Dispatcher::singleton().findSchemaOrThrow(full_name.c_str(), "");
    return new c10::SafeKernelFunction(op.getComputedKernelForDispatchKey(key_));
  }

  // Looks for a call among those found last. Returns false if it is not there.
  template <class Describe>
  bool recall(Thread* thread, size_t elements, Describe describe, Comparison& compared, Decision& decision) const {
    const Look table(thread, table_);
    if (!table) return false;
    compared.set_limits(table->rules->limits);
    for (const std::atomic<const Entry*>& place : table->recent_of(elements)) {
      const Entry* entry = place.load(std::memory_order_acquire);
      if (entry == nullptr) return false;
      compared.expect(entry->words);
      if (!describe(compared) || !compared.is_complete()) continue;
      decide(*table->rules, *entry, thread, compared, decision);
      return true;
    }
    return false;
  }

  // Looks a call up by its geometry. If it is not known, the decision's code says under which rules it is described.
  template <class Describe>
  Known look_up(Thread* thread, size_t elements, Describe describe, Geometry& geometry, Decision& decision) const {
    const Look table(thread, table_);
    if (!table) return Known::kOff;
    geometry.set_limits(table->rules->limits);
    decision.code = table->rules->generation << kOutcomeBits;
    if (!describe(geometry)) return Known::kNever;
    const Entry* entry = table->find(geometry);
    if (entry == nullptr) return Known::kNo;
    table->rules->stripes[thread->stripe].searches.fetch_add(1, std::memory_order_relaxed);
    table->found(entry, elements);
    decide(*table->rules, *entry, thread, geometry, decision);
    return Known::kYes;
  }

  // Reads the decision for a call, and counts the call. Python counts the calls that it answers.
  template <class Description>
  C10_ALWAYS_INLINE static void decide(Rules& rules, const Entry& entry, Thread* thread, const Description& call,
                                       Decision& decision) {
    decision.outcome = Outcome();
    if (!entry.passes) {
      decision.outcome = rules.outcomes[entry.outcome];
      if (decision.outcome.action == kRun) {
        decision.outcome.plan = plan_for(entry, call.tensors().size(), call.numbers());
      }
      decision.code = rules.generation << kOutcomeBits | entry.outcome;
      if (decision.needs_python()) return;
    }
    TORCH_CHECK(!thread->learning, "opforge: nothing to learn");  // Python knows this text
    rules.stripes[thread->stripe].counts[entry.outcome].fetch_add(1, std::memory_order_relaxed);
  }

  // Asks Python for the outcome: generation and number, or -1 if Python must answer such a call every time.
  // The stack stays where it is: the geometry refers to its tensors.
  int64_t ask(c10::DispatchKeySet keys, const c10::Stack& stack) const {
    c10::Stack copy(stack.end() - arguments_, stack.end());
    decide_->callBoxed(decide_->opHandle(), keys, &copy);
    return copy.back().toInt();
  }

  // Remembers the outcome of a geometry that was described under the rules of a generation.
  void learn(const Geometry& geometry, int64_t generation, int64_t code) const {
    const std::lock_guard<std::mutex> guard(writers_lock());
    Table* table = table_.load();
    const size_t outcome = code & ((1 << kOutcomeBits) - 1);
    if (table == nullptr || table->rules->generation != code >> kOutcomeBits || outcome >= table->rules->size) return;
    if (generation != table->rules->generation) return;  // other limits may have applied to its numbers
    if (table->full(geometry)) {  // forget all: calls that still come are asked about again
      table = new Table(table->rules);
      replace_table(table);
    }
    if (table->find(geometry) == nullptr) table->add(geometry, static_cast<uint8_t>(outcome));
  }

  // Returns a launch plan for a call of a geometry, or nullptr.
  static const Plan* plan_for(const Entry& entry, size_t tensors, c10::ArrayRef<uint64_t> numbers) {
    const Plan* plan = entry.plans.load(std::memory_order_acquire);
    if (plan == nullptr) return nullptr;
    const uint64_t modes = current_modes();
    while (plan != nullptr && (plan->modes != modes || !plan->fits(tensors, numbers))) plan = plan->next;
    return plan;
  }

  // Replays a plan. If that raises, the caller gets no answer, and the call does not count.
  bool replay(const Decision& decision, Thread* thread, c10::ArrayRef<const at::Tensor*> tensors,
              Tensors& results) const {
    try {
      return decision.outcome.plan->replay(tensors, results, thread->inside);
    } catch (...) {
      const Look table(thread, table_);
      if (table && table->rules->generation == decision.code >> kOutcomeBits) {
        auto& counts = table->rules->stripes[thread->stripe].counts;
        counts[decision.code & ((1 << kOutcomeBits) - 1)].fetch_sub(1, std::memory_order_relaxed);
      }
      throw;
    }
  }

  // Adds a plan that Python has offered while it answered a call of this geometry. If modes were changed meanwhile,
  // nobody knows in which ones it was recorded.
  void attach(Plan* plan, const Geometry& geometry, uint64_t modes, int64_t code) const {
    if (current_modes() != modes || !geometry.compared_all() || plan->results.size() != tensor_returns()) return;
    const std::lock_guard<std::mutex> guard(writers_lock());
    const Table* table = table_.load();
    if (table == nullptr || table->rules->generation != code >> kOutcomeBits) return;
    const Entry* entry = table->find(geometry);
    if (entry == nullptr || plan->inputs != geometry.tensors().size()) return;
    PlanStore* store = table->rules->outcomes[entry->outcome].store;
    plan->modes = modes;
    plan->numbers.assign(geometry.numbers().begin(), geometry.numbers().end());
    plan->words.assign(geometry.words(), geometry.words() + geometry.count());
    if (store == nullptr || !store->add(plan)) return plan->words.clear();
    entry->plans.store(plan, std::memory_order_release);
  }

  // Returns how many tensors the operator returns; no number that a plan can have if it returns something else.
  size_t tensor_returns() const {
    const std::vector<c10::Argument>& returns = op_.schema().returns();
    return std::all_of(returns.begin(), returns.end(),
                       [](const c10::Argument& result) { return result.type()->kind() == c10::TypeKind::TensorType; })
               ? returns_
               : SIZE_MAX;
  }

  template <class Return>
  static Return typed_results(Tensors& results) {
    if constexpr (std::is_same_v<Return, at::Tensor>) {
      return std::move(results[0]);
    } else {
      return [&]<size_t... i>(std::index_sequence<i...>) {
        return Return(std::move(results[i])...);
      }(std::make_index_sequence<std::tuple_size_v<Return>>());
    }
  }

  std::shared_ptr<Rules> replace_table(Table* table) const {
    Table* old = table_.exchange(table);
    if (old == nullptr) return nullptr;
    std::shared_ptr<Rules> rules = old->rules;
    delete_when_unseen(old);
    return rules;
  }

  // Carries a decision out. ``geometry`` is needed if a kernel in Python is to run.
  void act(const Decision& decision, Thread* thread, c10::ArrayRef<const at::Tensor*> tensors,
           const Geometry* geometry, c10::DispatchKeySet keys, c10::Stack* stack) const {
    const Outcome& outcome = decision.outcome;
    switch (outcome.action) {
      case kPass:
        return original_.load(std::memory_order_acquire)->callBoxed(op_, keys, stack);
      case kServe:
        return serve(*outcome.kernel, thread, stack) ? void() : to_python(*answer_, keys, stack, decision.code);
      case kRun: {  // Python turns autocast off for the kernel alone: ATen may have to answer after it
        if (outcome.plan != nullptr) {
          Tensors results;
          if (!replay(decision, thread, tensors, results)) return to_python(*answer_, keys, stack, decision.code);
          stack->resize(stack->size() - arguments_);
          for (at::Tensor& result : results) stack->emplace_back(std::move(result));
          return;
        }
        const InsideKernel inside(thread->inside);
        const uint64_t modes = current_modes();
        thread->offered = nullptr;
        to_python(*run_, keys, stack, decision.code);
        if (thread->offered == nullptr) return;
        attach(std::exchange(thread->offered, nullptr), *geometry, modes, decision.code);
      }
    }
  }

  static void to_python(const c10::SafeKernelFunction& function, c10::DispatchKeySet keys, c10::Stack* stack,
                        int64_t code) {
    stack->emplace_back(code);
    function.callBoxed(function.opHandle(), keys, stack);
  }

  void copy_arguments(c10::Stack* stack, size_t count) const {
    const size_t begin = stack->size() - arguments_;
    stack->reserve(stack->size() + arguments_ + 1);
    for (size_t i = 0; i < count; ++i) stack->push_back((*stack)[begin + i]);
  }

  // Calls a functional C++ kernel. At an in-place or out variant, copies its results to what is written. Returns false,
  // with nothing written and the arguments still on the stack, if it raises or returns something else.
  bool serve(const c10::OperatorHandle& kernel, Thread* thread, c10::Stack* stack) const {
    const size_t begin = stack->size() - arguments_, end = stack->size();
    if (!written_.empty() && !can_write(*stack, begin)) return false;
    const InsideKernel inside(thread->inside);
    try {
      copy_arguments(stack, arguments_ - outs_);
      for (size_t i = 0; i < arguments_ - outs_; ++i) as_kernels_expect((*stack)[end + i], optional_[i]);
      const c10::impl::ExcludeDispatchKeyGuard below_autocast(c10::autocast_dispatch_keyset);
      kernel.callBoxed(stack);
    } catch (...) {  // the slow path calls the kernel again and deals with what it raises
      stack->resize(end);
      return false;
    }
    if (!has_results(*stack, end) || !fit_targets(*stack, begin, end)) {
      stack->resize(std::min(stack->size(), end));
      return false;
    }
    for (size_t i = 0; i < written_.size(); ++i) {
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      at::Tensor target = (*stack)[begin + written_[i]].toTensor();
      at::_ops::copy_::redispatch(c10::DispatchKeySet(key_), target, (*stack)[end + i].toTensor(), false);
      (*stack)[end + i] = std::move(target);
    }
    stack->erase(stack->begin() + begin, stack->begin() + end);
    return true;
  }

  // Whether the tensors that are written share no memory with others, or are exactly what a pointwise operator reads.
  // Python deals with other calls.
  bool can_write(const c10::Stack& stack, size_t begin) const {
    c10::SmallVector<const at::Tensor*, 8> others;
    for (size_t i = 0; i < arguments_; ++i) {
      const c10::IValue& value = stack[begin + i];
      if (value.isList() && value.toListRef().size() != 0 && !value.toListRef()[0].isInt()) return false;
      if (value.isTensor() && value.toTensor().defined()) others.push_back(&value.toTensor());
    }
    for (const size_t position : written_) {
      const c10::IValue& value = stack[begin + position];
      if (!value.isTensor() || !value.toTensor().defined()) return false;
      const at::Tensor& target = value.toTensor();
      if (!target.is_non_overlapping_and_dense() && !target.is_contiguous()) return false;
      for (const at::Tensor* other : others) {
        if (other == &target || !overlap(target, *other)) continue;
        const bool same = target.const_data_ptr() == other->const_data_ptr() && target.dtype() == other->dtype() &&
                          target.sizes() == other->sizes() && target.strides() == other->strides();
        if (!same || !pointwise_ || is_written(*other, stack, begin)) return false;
      }
    }
    return true;
  }

  bool is_written(const at::Tensor& tensor, const c10::Stack& stack, size_t begin) const {
    return std::any_of(written_.begin(), written_.end(),
                       [&](size_t position) { return &stack[begin + position].toTensor() == &tensor; });
  }

  static std::pair<uintptr_t, uintptr_t> addresses_of(const at::Tensor& tensor) {
    size_t elements = tensor.numel() == 0 ? 0 : 1;
    for (int64_t dim = 0; elements != 0 && dim < tensor.dim(); ++dim) {
      elements += (tensor.size(dim) - 1) * tensor.stride(dim);
    }
    const auto begin = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
    return {begin, begin + elements * tensor.itemsize()};
  }

  static bool overlap(const at::Tensor& one, const at::Tensor& other) {
    const auto [begin, end] = addresses_of(one);
    const auto [other_begin, other_end] = addresses_of(other);
    return begin < other_end && other_begin < end;
  }

  // Whether results can be copied as they are to the tensors that are written.
  bool fit_targets(const c10::Stack& stack, size_t begin, size_t end) const {
    for (size_t i = 0; i < written_.size(); ++i) {
      const at::Tensor &target = stack[begin + written_[i]].toTensor(), &result = stack[end + i].toTensor();
      if (!result.defined() || target.sizes() != result.sizes() || target.dtype() != result.dtype() ||
          target.device() != result.device()) {
        return false;
      }
    }
    return true;
  }

  // Kernels are below autograd: tensors do not require gradients. An optional tensor that is absent is None.
  static void as_kernels_expect(c10::IValue& value, bool optional) {
    if (!value.isTensor()) return;
    const at::Tensor& tensor = value.toTensor();
    if (!tensor.defined()) {
      if (optional) value = c10::IValue();
    } else if (tensor.requires_grad() && c10::GradMode::is_enabled()) {
      const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
      value = at::Tensor(impl->shallow_copy_and_detach(impl->version_counter(), /*allow_metadata_change=*/false));
    }
  }

  static bool has_all_tensors(c10::ArrayRef<c10::IValue> items) {
    return std::all_of(items.begin(), items.end(),
                       [](const c10::IValue& item) { return !item.isTensor() || item.toTensor().defined(); });
  }

  bool has_results(const c10::Stack& stack, size_t end) const {
    if (stack.size() != end + returns_) return false;
    for (size_t i = 0; i < returns_; ++i) {
      const c10::IValue& value = stack[end + i];
      const c10::TypeKind kind = op_.schema().returns()[i].type()->kind();
      if (kind == c10::TypeKind::TensorType && !(value.isTensor() && (masked_ || value.toTensor().defined()))) {
        return false;
      }
      if (kind == c10::TypeKind::ListType && !(value.isList() && has_all_tensors(value.toListRef()))) return false;
    }
    return true;
  }

  const c10::OperatorHandle op_;
  const c10::DispatchKey key_;
  const c10::KernelFunction boxed_;  // calls this slot with boxed arguments
  const size_t arguments_, returns_;
  std::vector<bool> optional_;
  std::vector<size_t> written_;  // arguments that an in-place or out variant writes
  size_t outs_ = 0;              // of these, arguments that a functional kernel does not have; they are the last ones
  bool pointwise_ = false;
  bool masked_ = false;  // with an output mask, results may be undefined
  mutable std::atomic<Table*> table_{nullptr};
  std::atomic<const c10::SafeKernelFunction*> original_{nullptr};
  const c10::SafeKernelFunction* decide_ = nullptr;
  const c10::SafeKernelFunction* answer_ = nullptr;
  const c10::SafeKernelFunction* run_ = nullptr;
  std::optional<c10::RegistrationHandleRAII> registration_;
};

// The slots of one dispatch key, by operator. Slots are added and never removed.
class Slots {
 public:
  Slot* find(const c10::OperatorHandle& op) const {
    const void* name = &op.operator_name();
    for (size_t index = start(name);; index = (index + 1) % kSize) {
      Slot* slot = slots_[index].load(std::memory_order_acquire);
      if (slot == nullptr || &slot->op().operator_name() == name) return slot;
    }
  }

  // The caller holds the writers' lock.
  Slot* add(const c10::OperatorHandle& op, c10::DispatchKey key) {
    if (Slot* slot = find(op)) return slot;
    TORCH_CHECK(++count_ < kSize / 2, "more than ", kSize / 2, " operators are overridden");
    size_t index = start(&op.operator_name());
    while (slots_[index].load(std::memory_order_relaxed) != nullptr) index = (index + 1) % kSize;
    Slot* slot = new Slot(op, key);
    slots_[index].store(slot, std::memory_order_release);
    return slot;
  }

 private:
  static constexpr size_t kSize = 1 << 14;
  static size_t start(const void* name) { return (reinterpret_cast<uintptr_t>(name) >> 6) * 0x9E3779B1U % kSize; }
  std::array<std::atomic<Slot*>, kSize> slots_{};
  size_t count_ = 0;
};

inline Slots slots_of_cpu, slots_of_cuda;

template <Slots& slots>
void call_slot(const c10::OperatorHandle& op, c10::DispatchKeySet keys, c10::Stack* stack) {
  slots.find(op)->call(keys, stack);
}

inline c10::KernelFunction boxed_function_of(c10::DispatchKey key) {
  return key == c10::DispatchKey::CPU ? c10::KernelFunction::makeFromBoxedFunction<&call_slot<slots_of_cpu>>()
                                      : c10::KernelFunction::makeFromBoxedFunction<&call_slot<slots_of_cuda>>();
}

inline Slot::Slot(const c10::OperatorHandle& op, c10::DispatchKey key)
    : op_(op), key_(key), boxed_(boxed_function_of(key)), arguments_(op.schema().arguments().size()),
      returns_(op.schema().returns().size()) {
  pointwise_ = op.hasTag(at::Tag::pointwise);
  for (const c10::Argument& argument : op.schema().arguments()) {
    masked_ |= argument.name() == "output_mask";
    if (argument.alias_info() != nullptr && argument.alias_info()->isWrite()) written_.push_back(optional_.size());
    outs_ += argument.is_out();
    optional_.push_back(argument.type()->kind() == c10::TypeKind::OptionalType);
  }
}

}  // namespace opforge
