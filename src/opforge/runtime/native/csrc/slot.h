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
      for (int i = 0; i < kTries; ++i) {
        Geometry geometry;  // anew each time: it points to the arguments, and to ask may move the stack
        if (!geometry.describe(stack->data() + stack->size() - arguments_, arguments_)) break;
        Outcome outcome;
        int64_t code = 0;
        if (Known known = look_up(thread, geometry, outcome, code); known == Known::kYes) {
          return act(outcome, code, thread, geometry, keys, stack);
        } else if (known == Known::kOff) {
          return original_.load(std::memory_order_acquire)->callBoxed(op_, keys, stack);
        }
        code = ask(keys, *stack);
        if (code < 0) break;
        learn(geometry, code);
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
      Outcome outcome;
      int64_t code = 0;
      Geometry geometry;
      const bool described = geometry.describe_typed(args...);
      const Known known = described ? look_up(thread, geometry, outcome, code) : Known::kNo;
      if (known == Known::kNo) return boxed_.call<Return, Args...>(op_, keys, std::forward<Args>(args)...);
      if (known == Known::kYes && outcome.action != kPass) {
        bool refused = false;
        if (outcome.plan != nullptr) {
          if (Tensors results; replay(outcome, code, thread, geometry, results)) return typed_results<Return>(results);
          refused = true;
        }
        c10::Stack stack = c10::impl::boxArgs<Args...>(std::forward<Args>(args)...);
        if (refused) {
          to_python(*answer_, keys, &stack, code);
        } else {
          act(outcome, code, thread, geometry, keys, &stack);
        }
        return c10::impl::PopResult<Return>::call(stack);
      }
    }
    const c10::SafeKernelFunction& original = *original_.load(std::memory_order_acquire);
    TORCH_CHECK((original.*open(SavedToken{}))->isValid(), "the overridden kernel is gone: ", original.debug());
    return (original.*open(SavedKernel{})).template call<Return, Args...>(op_, keys, std::forward<Args>(args)...);
  }

 private:
  enum class Known { kYes, kNo, kOff };

  c10::SafeKernelFunction* python(const std::string& name) const {
    const std::string full_name = OPFORGE_STRING(OPFORGE_NAMESPACE) "::" + name;
    const c10::OperatorHandle op = c10::Dispatcher::singleton().findSchemaOrThrow(full_name.c_str(), "");
    return new c10::SafeKernelFunction(op.getComputedKernelForDispatchKey(key_));
  }

  // Looks up the outcome of a geometry, and counts the call if it is known. Python counts the calls that it answers.
  Known look_up(Thread* thread, const Geometry& geometry, Outcome& outcome, int64_t& code) const {
    const Look table(thread, table_);
    if (!table) return Known::kOff;
    const Entry* entry = table->find(geometry);
    if (entry == nullptr) return Known::kNo;
    Rules& rules = *table->rules;
    outcome = rules.outcomes[entry->outcome];
    if (outcome.action == kRun) outcome.plan = plan_for(*entry, geometry);
    code = rules.generation << kOutcomeBits | entry->outcome;
    if (outcome.action != kRun || outcome.plan != nullptr) {
      if (thread->learning) {  // there is nothing to learn: ATen answers, and nothing is counted
        outcome = Outcome();
        return Known::kYes;
      }
      rules.stripes[thread->stripe].counts[entry->outcome].fetch_add(1, std::memory_order_relaxed);
    }
    return Known::kYes;
  }

  // Asks Python for the outcome: generation and number, or -1 if Python must answer such a call every time.
  // The stack stays where it is: the geometry refers to its tensors.
  int64_t ask(c10::DispatchKeySet keys, const c10::Stack& stack) const {
    c10::Stack copy(stack.end() - arguments_, stack.end());
    decide_->callBoxed(decide_->opHandle(), keys, &copy);
    return copy.back().toInt();
  }

  void learn(const Geometry& geometry, int64_t code) const {
    const std::lock_guard<std::mutex> guard(writers_lock());
    Table* table = table_.load();
    const size_t outcome = code & ((1 << kOutcomeBits) - 1);
    if (table == nullptr || table->rules->generation != code >> kOutcomeBits || outcome >= table->rules->size) return;
    if (table->full(geometry)) {  // forget all: calls that still come are asked about again
      table = new Table(table->rules);
      replace_table(table);
    }
    if (table->find(geometry) == nullptr) table->add(geometry, static_cast<uint8_t>(outcome));
  }

  // Returns a launch plan for a call of a geometry, or nullptr.
  static const Plan* plan_for(const Entry& entry, const Geometry& geometry) {
    const Plan* plan = entry.plans.load(std::memory_order_acquire);
    if (plan == nullptr) return nullptr;
    const uint64_t modes = current_modes();
    while (plan != nullptr && (plan->modes != modes || !plan->fits(geometry))) plan = plan->next;
    return plan;
  }

  // Replays a plan. If that raises, the caller gets no answer, and the call does not count.
  bool replay(const Outcome& outcome, int64_t code, Thread* thread, const Geometry& geometry, Tensors& results) const {
    try {
      return outcome.plan->replay(geometry.tensors(), results, thread->inside);
    } catch (...) {
      const Look table(thread, table_);
      if (table && table->rules->generation == code >> kOutcomeBits) {
        auto& counts = table->rules->stripes[thread->stripe].counts;
        counts[code & ((1 << kOutcomeBits) - 1)].fetch_sub(1, std::memory_order_relaxed);
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
    if (entry == nullptr || plan->inputs != geometry.tensors().size() || !geometry.has_all_aliases()) return;
    Shelf* shelf = table->rules->outcomes[entry->outcome].shelf;
    plan->modes = modes;
    plan->numbers.assign(geometry.numbers().begin(), geometry.numbers().end());
    plan->words.assign(geometry.words(), geometry.words() + geometry.count());
    if (shelf == nullptr || !shelf->add(plan)) return plan->words.clear();
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

  void act(const Outcome& outcome, int64_t code, Thread* thread, const Geometry& geometry, c10::DispatchKeySet keys,
           c10::Stack* stack) const {
    switch (outcome.action) {
      case kPass:
        return original_.load(std::memory_order_acquire)->callBoxed(op_, keys, stack);
      case kServe:
        return serve(*outcome.kernel, thread, stack) ? void() : to_python(*answer_, keys, stack, code);
      case kRun: {  // Python turns autocast off for the kernel alone: ATen may have to answer after it
        if (outcome.plan != nullptr) {
          Tensors results;
          if (!replay(outcome, code, thread, geometry, results)) return to_python(*answer_, keys, stack, code);
          stack->resize(stack->size() - arguments_);
          for (at::Tensor& result : results) stack->emplace_back(std::move(result));
          return;
        }
        const InsideKernel inside(thread->inside);
        const uint64_t modes = current_modes();
        thread->offered = nullptr;
        to_python(*run_, keys, stack, code);
        if (thread->offered != nullptr) attach(std::exchange(thread->offered, nullptr), geometry, modes, code);
        return;
      }
    }
  }

  static void to_python(const c10::SafeKernelFunction& function, c10::DispatchKeySet keys, c10::Stack* stack,
                        int64_t code) {
    stack->emplace_back(code);
    function.callBoxed(function.opHandle(), keys, stack);
  }

  void copy_arguments(c10::Stack* stack) const {
    const size_t begin = stack->size() - arguments_;
    stack->reserve(stack->size() + arguments_ + 1);
    for (size_t i = 0; i < arguments_; ++i) stack->push_back((*stack)[begin + i]);
  }

  // Calls a C++ kernel. Returns false, with the arguments still on the stack, if it raises or returns something else.
  bool serve(const c10::OperatorHandle& kernel, Thread* thread, c10::Stack* stack) const {
    const size_t begin = stack->size() - arguments_, end = stack->size();
    try {
      copy_arguments(stack);
      for (size_t i = 0; i < arguments_; ++i) as_kernels_expect((*stack)[end + i], optional_[i]);
      const c10::impl::ExcludeDispatchKeyGuard below_autocast(c10::autocast_dispatch_keyset);
      const InsideKernel inside(thread->inside);
      kernel.callBoxed(stack);
    } catch (...) {  // the slow path calls the kernel again and deals with what it raises
      stack->resize(end);
      return false;
    }
    if (!has_results(*stack, end)) {
      stack->resize(std::min(stack->size(), end));
      return false;
    }
    stack->erase(stack->begin() + begin, stack->begin() + end);
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
  for (const c10::Argument& argument : op.schema().arguments()) {
    masked_ |= argument.name() == "output_mask";
    optional_.push_back(argument.type()->kind() == c10::TypeKind::OptionalType);
  }
}

}  // namespace opforge
