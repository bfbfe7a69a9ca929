// What is known of an operator's calls: outcomes by geometry, and how often each outcome came about.
//
// Readers take no lock. A reader marks the table that it looks into; whoever removes a table waits until nobody has it
// marked. The mark is held for a lookup only, never while other code runs.
#pragma once

#include "plan.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <pthread.h>
#include <sched.h>

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

namespace opforge {

constexpr size_t kStripes = 16, kMaxOutcomes = 64, kBuckets = 2048, kMaxGeometries = kBuckets / 2;
constexpr size_t kMaxWordsInAll = 1 << 18, kRecentBits = 5, kRecent = 1 << kRecentBits;

enum Action : int { kPass, kServe, kRun };  // ATen's kernel, a C++ kernel, a Python kernel

constexpr int kMaxPlansOfGeometry = 8;  // they differ in modes and in numbers
constexpr size_t kMaxStoredGeometries = 4096;

// The launch plans of a kernel, by geometry. Tables come and go; what they forget is found here again. Used under the
// writers' lock, and never deleted: rules may refer to it.
class PlanStore {
 public:
  // Returns the plans for calls of a geometry, linked to each other; nullptr if there are none.
  const Plan* find(const uint64_t* words, size_t count) const {
    const auto [begin, end] = plans_.equal_range(Geometry::hash_words(words, count));
    for (auto item = begin; item != end; ++item) {
      const std::vector<uint64_t>& others = item->second->words;
      if (others.size() == count && std::memcmp(others.data(), words, count * sizeof(uint64_t)) == 0) {
        return item->second;
      }
    }
    return nullptr;
  }

  // Puts a plan before those of its geometry, which it names in its words. Returns false if there is no room for it.
  bool add(Plan* plan) {
    const Plan* first = find(plan->words.data(), plan->words.size());
    int count = 0;
    for (const Plan* other = first; other != nullptr; other = other->next) ++count;
    if (count >= kMaxPlansOfGeometry || (first == nullptr && plans_.size() >= kMaxStoredGeometries)) return false;
    plan->next = first;
    const uint64_t hash = Geometry::hash_words(plan->words.data(), plan->words.size());
    const auto [begin, end] = plans_.equal_range(hash);
    for (auto item = begin; item != end; ++item) {
      if (item->second == first) return item->second = plan, true;
    }
    plans_.emplace(hash, plan);
    return true;
  }

 private:
  std::unordered_multimap<uint64_t, const Plan*> plans_;
};

struct Outcome {
  Action action = kPass;
  const c10::OperatorHandle* kernel = nullptr;  // for kServe
  PlanStore* store = nullptr;                   // for kRun, if the kernel may have plans
  const Plan* plan = nullptr;                   // for kRun, if the call has one
};

// The outcomes that are possible with the present kernels of an operator.
struct Rules {
  explicit Rules(int64_t number) : generation(number) {}
  const int64_t generation;
  std::vector<NumberLimits> limits;  // by argument
  size_t size = 0;
  std::array<Outcome, kMaxOutcomes> outcomes;
  // Not aligned: glibc before 2.38 seldom uses freed aligned memory again, and rules are replaced often.
  struct Stripe {
    std::array<std::atomic<uint64_t>, kMaxOutcomes> counts{};
    std::atomic<uint64_t> searches{0};  // of calls that were not among those found last; they cost more
  };
  std::array<Stripe, kStripes> stripes;

  uint64_t total(size_t outcome) const {
    uint64_t sum = 0;
    for (const Stripe& stripe : stripes) sum += stripe.counts[outcome].load(std::memory_order_relaxed);
    return sum;
  }

  uint64_t searches() const {
    uint64_t sum = 0;
    for (const Stripe& stripe : stripes) sum += stripe.searches.load(std::memory_order_relaxed);
    return sum;
  }
};

// One geometry, its outcome, and launch plans for its calls. What a call to ATen needs lies together: between two calls
// of an operator, a model does so much that none of it is in the processor's caches.
struct Entry {
  Entry(const Geometry& geometry, uint8_t its_outcome, bool to_aten, const Plan* its_plans)
      : outcome(its_outcome), passes(to_aten), plans(its_plans),
        words(geometry.words(), geometry.words() + geometry.count()) {}
  const uint8_t outcome;
  const bool passes;
  mutable std::atomic<const Plan*> plans;
  const c10::SmallVector<uint64_t, 20> words;  // of two tensors with four dimensions, and a number

  bool matches(const Geometry& geometry) const {
    return words.size() == geometry.count() &&
           std::memcmp(words.data(), geometry.words(), words.size() * sizeof(uint64_t)) == 0;
  }
};

// The entries of two geometries that were found last among the calls of a size, the last one first. Two, for a model
// seldom has one geometry of a size: it multiplies by a tensor and by a number, and in two dtypes.
using RecentEntries = std::array<std::atomic<const Entry*>, 2>;

struct Table {
  explicit Table(std::shared_ptr<Rules> its_rules) : rules(std::move(its_rules)) {}
  ~Table() {
    for (auto& entry : buckets) delete entry.load(std::memory_order_relaxed);
  }
  const std::shared_ptr<Rules> rules;
  size_t size = 0, words = 0;
  mutable std::array<RecentEntries, kRecent> recent{};  // by the size of their calls
  std::array<std::atomic<const Entry*>, kBuckets> buckets{};

  const Entry* find(const Geometry& geometry) const {
    for (size_t bucket = geometry.hash() % kBuckets;; bucket = (bucket + 1) % kBuckets) {
      const Entry* entry = buckets[bucket].load(std::memory_order_acquire);
      if (entry == nullptr || entry->matches(geometry)) return entry;
    }
  }

  RecentEntries& recent_of(size_t elements) const {
    return recent[elements * 0x9E3779B97F4A7C15ULL >> (64 - kRecentBits)];
  }

  // Puts an entry before the one found last. Threads that do so at once may lose one of theirs, or have one twice.
  void found(const Entry* entry, size_t elements) const {
    RecentEntries& entries = recent_of(elements);
    entries[1].store(entries[0].load(std::memory_order_acquire), std::memory_order_release);
    entries[0].store(entry, std::memory_order_release);
  }

  // Adds a geometry that is not there; the caller holds the writers' lock, and the table is not full.
  void add(const Geometry& geometry, uint8_t outcome) {
    const Outcome& its = rules->outcomes[outcome];
    const Plan* plans = its.store == nullptr ? nullptr : its.store->find(geometry.words(), geometry.count());
    size_t bucket = geometry.hash() % kBuckets;
    while (buckets[bucket].load(std::memory_order_relaxed) != nullptr) bucket = (bucket + 1) % kBuckets;
    buckets[bucket].store(new Entry(geometry, outcome, its.action == kPass, plans), std::memory_order_release);
    ++size;
    words += geometry.count();
  }

  bool full(const Geometry& more) const { return size >= kMaxGeometries || words + more.count() > kMaxWordsInAll; }
};

// A thread's part: the table it looks into, its stripe of the counters, and whether it is inside a kernel.
struct Thread {
  std::atomic<const Table*> looks_into{nullptr};
  size_t stripe = 0;
  int inside = 0;
  bool learning = false;  // its calls are no calls of the user's
  std::atomic<bool> in_use{true};
  Thread* next = nullptr;
  Plan* offered = nullptr;  // by Python, for the call that it is answering
};

inline std::mutex& writers_lock() {
  static std::mutex* lock = new std::mutex;  // never destroyed: threads may outlive static objects
  return *lock;
}

inline std::atomic<Thread*>& all_threads() {
  static std::atomic<Thread*> first{nullptr};
  return first;
}

inline constinit thread_local Thread* this_thread_ = nullptr;

struct ThreadEnd {
  ~ThreadEnd() {
    if (this_thread_ != nullptr) this_thread_->in_use.store(false, std::memory_order_release);
    this_thread_ = nullptr;
  }
};

inline Thread* new_thread() {
  static thread_local ThreadEnd end;
  (void)&end;
  static std::atomic<size_t> stripes{0};
  for (Thread* old = all_threads().load(); old != nullptr; old = old->next) {
    bool used = false;
    if (old->in_use.compare_exchange_strong(used, true)) {
      old->inside = 0;
      old->learning = false;
      old->offered = nullptr;
      return this_thread_ = old;
    }
  }
  Thread* added = new Thread;
  added->stripe = stripes.fetch_add(1) % kStripes;
  added->next = all_threads().load();
  while (!all_threads().compare_exchange_weak(added->next, added)) {
  }
  return this_thread_ = added;
}

inline Thread* this_thread() { return this_thread_ != nullptr ? this_thread_ : new_thread(); }

// Marks the present table while it is looked into.
class Look {
 public:
  C10_ALWAYS_INLINE Look(Thread* thread, const std::atomic<Table*>& current) : thread_(thread) {
    do {
      table_ = current.load(std::memory_order_acquire);
      thread_->looks_into.store(table_, std::memory_order_seq_cst);
    } while (current.load(std::memory_order_seq_cst) != table_);
  }
  ~Look() { thread_->looks_into.store(nullptr, std::memory_order_release); }
  Look(const Look&) = delete;
  Look& operator=(const Look&) = delete;
  const Table* operator->() const { return table_; }
  explicit operator bool() const { return table_ != nullptr; }

 private:
  Thread* thread_;
  const Table* table_;
};

// Deletes a table that is no longer current, once nobody looks into it.
inline void delete_when_unseen(Table* table) {
  for (Thread* thread = all_threads().load(); thread != nullptr; thread = thread->next) {
    while (thread->looks_into.load(std::memory_order_seq_cst) == table) sched_yield();
  }
  delete table;
}

// A forked child has one thread. Marks of the others would stay for ever.
inline void forget_other_threads() {
  for (Thread* thread = all_threads().load(); thread != nullptr; thread = thread->next) {
    if (thread == this_thread_) continue;
    thread->looks_into.store(nullptr);
    thread->in_use.store(false);
  }
  writers_lock().unlock();
}

inline void watch_forks() {
  static const int once = pthread_atfork([] { writers_lock().lock(); }, [] { writers_lock().unlock(); },
                                         forget_other_threads);
  (void)once;
}

}  // namespace opforge
