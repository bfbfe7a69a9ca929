// The library's functions for Python, called with ctypes. Python.h is not needed: torch calls Python's part of a slot
// as operators. A function that fails returns -1 or nullptr, and opforge_error() says why.
#include "typed.h"

#include <c10/util/Exception.h>
#include <torch/headeronly/version.h>

#include <algorithm>
#include <iterator>
#include <map>

#define OPFORGE_API extern "C" __attribute__((visibility("default")))

namespace opforge {
namespace {

constexpr int kAbi = 4;

// What the library's code depends on in torch's headers. Those that work are in torch_layout.py.
constexpr int64_t kLayout[] = {
    sizeof(c10::TensorImpl), sizeof(c10::StorageImpl), sizeof(c10::IValue), sizeof(c10::KernelFunction),
    sizeof(c10::SafeKernelFunction), sizeof(c10::FunctionSchema), sizeof(c10::Argument),
    static_cast<int64_t>(c10::DispatchKey::CUDA), c10::num_runtime_entries,
    static_cast<int64_t>(c10::ScalarType::NumOptions)};

std::string& error_text() {
  static thread_local std::string text;
  return text;
}

template <class Result, class Function>
Result guarded(Result failed, Function function) {
  try {
    return function();
  } catch (const c10::Error& error) {
    error_text() = error.what_without_backtrace();
  } catch (const std::exception& error) {
    error_text() = error.what();
  }
  return failed;
}

class Silent : public c10::WarningHandler {
 public:
  void process(const c10::Warning& /*warning*/) override {}
};

const c10::OperatorHandle* operator_of(const char* name, const char* overload) {
  static std::map<std::pair<std::string, std::string>, const c10::OperatorHandle*> known;  // under the writers' lock
  const c10::OperatorHandle*& op = known[{name, overload}];
  if (op == nullptr) op = new c10::OperatorHandle(c10::Dispatcher::singleton().findSchemaOrThrow(name, overload));
  return op;
}

void describe_tensors(const c10::OperatorHandle& /*op*/, c10::DispatchKeySet /*keys*/, c10::Stack* stack) {
  Geometry geometry;
  c10::List<int64_t> words;
  if (geometry.describe(&stack->back(), 1)) {
    for (size_t i = 0; i < geometry.count(); ++i) words.push_back(static_cast<int64_t>(geometry.words()[i]));
  }
  stack->pop_back();
  stack->emplace_back(std::move(words));
}

// Replays a plan on tensors, with memory poisoned first, so that Python can compare it with the kernel.
void replay_plan(const c10::OperatorHandle& /*op*/, c10::DispatchKeySet /*keys*/, c10::Stack* stack) {
  const auto poison = static_cast<unsigned char>(stack->back().toInt());
  const auto* plan = reinterpret_cast<const Plan*>((*stack)[stack->size() - 2].toInt());
  const std::vector<at::Tensor> given = (*stack)[stack->size() - 3].toTensorVector();
  TORCH_CHECK(given.size() == plan->inputs, "a plan for ", plan->inputs, " tensors got ", given.size());
  c10::SmallVector<const at::Tensor*, 8> inputs;
  for (const at::Tensor& tensor : given) inputs.push_back(&tensor);
  Tensors results;
  TORCH_CHECK(plan->replay(inputs, results, this_thread()->inside, poison), "the CUDA driver refused the plan");
  c10::List<std::optional<at::Tensor>> list;
  for (at::Tensor& result : results) {
    list.push_back(result.defined() ? std::optional<at::Tensor>(std::move(result)) : std::nullopt);
  }
  stack->resize(stack->size() - 3);
  stack->emplace_back(std::move(list));
}

void register_operator(const char* name, c10::KernelFunction function) {
  new c10::RegistrationHandleRAII(c10::Dispatcher::singleton().registerImpl(
      {std::string(OPFORGE_STRING(OPFORGE_NAMESPACE) "::") + name, ""}, c10::DispatchKey::CompositeExplicitAutograd,
      std::move(function), std::nullopt, nullptr, "opforge"));
}

}  // namespace
}  // namespace opforge

using namespace opforge;

OPFORGE_API int opforge_abi() { return kAbi; }
OPFORGE_API const char* opforge_error() { return error_text().c_str(); }
OPFORGE_API const char* opforge_torch_version() { return TORCH_VERSION; }

// Writes the layout that this library was compiled with; returns how many numbers it has.
OPFORGE_API int opforge_layout(int64_t* numbers, int capacity) {
  const int count = std::size(kLayout);
  std::copy_n(kLayout, std::min(count, capacity), numbers);
  return count;
}

// Implements the operators describe and replay, with which Python checks what this library reads and does.
OPFORGE_API int opforge_register_operators() {
  return guarded(-1, [] {
    register_operator("describe", c10::KernelFunction::makeFromBoxedFunction<&describe_tensors>());
    register_operator("replay", c10::KernelFunction::makeFromBoxedFunction<&replay_plan>());
    watch_forks();
    return 0;
  });
}

// Returns the slot of an operator for a device: 0 for a CPU, 1 for a GPU.
OPFORGE_API void* opforge_slot(const char* name, const char* overload, int device) {
  return guarded<void*>(nullptr, [&] {
    const std::lock_guard<std::mutex> guard(writers_lock());
    const c10::OperatorHandle& op = *operator_of(name, overload);
    return device == 0 ? slots_of_cpu.add(op, c10::DispatchKey::CPU) : slots_of_cuda.add(op, c10::DispatchKey::CUDA);
  });
}

// Puts a slot in ATen's place; its part in Python are the operators decide_, answer_ and run_ with this name.
OPFORGE_API int opforge_install(void* slot, const char* name) {
  return guarded(-1, [&] {
    Slot& place = *static_cast<Slot*>(slot);
    TORCH_CHECK(!place.installed(), "the slot is installed already");
    Silent silent;  // torch warns of the override, which is intended
    const c10::WarningUtils::WarningHandlerGuard no_warning(&silent);
    place.install(function_of(&place), name);
    return 0;
  });
}

OPFORGE_API int opforge_remove(void* slot) {
  return guarded(-1, [&] {
    static_cast<Slot*>(slot)->remove();
    return 0;
  });
}

// Replaces a slot's rules; generation -1 means none. Writes the old rules' counts, which are final. The words are the
// limits of numbers: for each such argument its position, and lists of integers and of the bits of doubles.
OPFORGE_API int opforge_set_rules(void* slot, int64_t generation, const int64_t* words, int64_t count,
                                  uint64_t* counts) {
  return guarded(-1, [&] {
    auto rules = generation < 0 ? nullptr : std::make_shared<Rules>(generation);
    if (rules != nullptr) rules->limits = static_cast<Slot*>(slot)->limits_from(words, static_cast<size_t>(count));
    const auto old = static_cast<Slot*>(slot)->set_rules(std::move(rules));
    const size_t size = old == nullptr ? 0 : old->size;
    for (size_t i = 0; i < size; ++i) counts[i] = old->total(i);
    return static_cast<int>(size);
  });
}

// Adds an outcome to a slot's rules of a generation. Returns its number, or -1 if there are others now, or too many.
OPFORGE_API int opforge_add_outcome(void* slot, int64_t generation, int action, const char* kernel,
                                    const char* overload, void* store) {
  return guarded(-1, [&] {
    const auto rules = static_cast<Slot*>(slot)->rules();
    const std::lock_guard<std::mutex> guard(writers_lock());
    if (rules == nullptr || rules->generation != generation || rules->size >= kMaxOutcomes) return -1;
    TORCH_CHECK(action >= kPass && action <= kRun, "no such action: ", action);
    rules->outcomes[rules->size] = {static_cast<Action>(action),
                                    action == kServe ? operator_of(kernel, overload) : nullptr,
                                    static_cast<PlanStore*>(store)};
    return static_cast<int>(rules->size++);
  });
}

// Writes how often each outcome came about so far; returns how many outcomes there are.
OPFORGE_API int opforge_read_counts(void* slot, uint64_t* counts) {
  return guarded(-1, [&] {
    const auto rules = static_cast<Slot*>(slot)->rules();
    const size_t size = rules == nullptr ? 0 : rules->size;
    for (size_t i = 0; i < size; ++i) counts[i] = rules->total(i);
    return static_cast<int>(size);
  });
}

OPFORGE_API int64_t opforge_geometries(void* slot) { return static_cast<Slot*>(slot)->geometries(); }

// How many calls were searched for under the present rules, because they were not among those found last.
OPFORGE_API uint64_t opforge_searches(void* slot) {
  const auto rules = static_cast<Slot*>(slot)->rules();
  return rules == nullptr ? 0 : rules->searches();
}

// Says whether this thread is inside a kernel, where every operator is ATen's own.
OPFORGE_API void opforge_set_inside(int inside) { this_thread()->inside = inside; }

// Says whether this thread's calls are made to learn a plan.
OPFORGE_API void opforge_set_learning(int learning) { this_thread()->learning = learning != 0; }

// Loads the CUDA driver, or a stand-in for it.
OPFORGE_API int opforge_load_driver(const char* path) {
  return guarded(-1, [&] {
    loaded_driver.store(new Driver(path), std::memory_order_release);
    return 0;
  });
}

// Makes a launch plan of words. It lives as long as the process.
OPFORGE_API void* opforge_make_plan(const int64_t* words, int64_t count) {
  return guarded<void*>(nullptr, [&] { return new Plan(words, static_cast<size_t>(count)); });
}

// Offers a plan for calls like the one that Python is answering in this thread.
OPFORGE_API void opforge_offer_plan(void* plan) { this_thread()->offered = static_cast<Plan*>(plan); }

// Makes a place for the plans of a kernel. It lives as long as the process.
OPFORGE_API void* opforge_new_plan_store() { return new PlanStore; }

// Adds a plan to a store, for calls with this key: modes, the number of numbers, the numbers, words of the geometry.
OPFORGE_API int opforge_store_plan(void* store, void* plan, const uint64_t* key, int64_t count) {
  return guarded(-1, [&] {
    TORCH_CHECK(count >= 2 && key[1] <= static_cast<uint64_t>(count - 2), "a plan's key ends too early");
    Plan& added = *static_cast<Plan*>(plan);
    const std::lock_guard<std::mutex> guard(writers_lock());
    TORCH_CHECK(added.words.empty(), "the plan is stored already");
    added.modes = key[0];
    added.numbers.assign(key + 2, key + 2 + key[1]);
    added.words.assign(key + 2 + key[1], key + count);
    TORCH_CHECK(static_cast<PlanStore*>(store)->add(&added), "there are too many plans");
    return 0;
  });
}

// Writes the key of a plan; returns how long it is, or 0 if the plan is for no calls.
OPFORGE_API int64_t opforge_plan_key(void* plan, uint64_t* key, int64_t capacity) {
  const std::lock_guard<std::mutex> guard(writers_lock());
  const Plan& from = *static_cast<const Plan*>(plan);
  if (from.words.empty()) return 0;
  std::vector<uint64_t> all = {from.modes, from.numbers.size()};
  all.insert(all.end(), from.numbers.begin(), from.numbers.end());
  all.insert(all.end(), from.words.begin(), from.words.end());
  std::copy_n(all.begin(), std::min<int64_t>(capacity, all.size()), key);
  return static_cast<int64_t>(all.size());
}

OPFORGE_API uint64_t opforge_replays(void* plan) { return static_cast<Plan*>(plan)->replays.load(); }
OPFORGE_API int opforge_plan_is_broken(void* plan) { return static_cast<Plan*>(plan)->broken.load(); }
