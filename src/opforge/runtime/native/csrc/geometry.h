// The geometry of a call as words: everything that a decision about the call may depend on, and no contents of memory.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string_view>
#include <vector>

namespace opforge {

enum Tag : uint64_t {
  kNone = 1, kUndefined, kTensor, kInt, kDouble, kBool, kComplex, kList, kString, kDevice, kIntBetween, kDoubleBetween
};

enum TensorFlag : uint64_t {
  kWrappedNumber = 1, kConjugate = 2, kNegative = 4, kOffset = 8, kMisaligned = 16, kRequiresGrad = 32, kShared = 64,
  kInference = 128
};

// What decisions depend on if an argument is a number: whether it is the default, and between which limits it lies.
struct NumberLimits {
  bool apply = false;  // otherwise decisions may depend on anything
  Tag default_tag = kNone;
  uint64_t default_bits = 0;
  std::vector<int64_t> ints;  // ascending
  std::vector<double> doubles;

  template <class Number>
  C10_ALWAYS_INLINE static uint64_t class_of(Number number, const std::vector<Number>& limits) {
    return limits.empty() ? 0 : std::upper_bound(limits.begin(), limits.end(), number) - limits.begin();
  }
};

constexpr c10::DispatchKeySet kKnownKeys =
    c10::DispatchKeySet({c10::DispatchKey::CPU, c10::DispatchKey::CUDA, c10::DispatchKey::Conjugate,
                         c10::DispatchKey::Negative, c10::DispatchKey::ADInplaceOrView}) |
    c10::autograd_dispatch_keyset | c10::autocast_dispatch_keyset;

// Whether words can describe a tensor. If so, reading its sizes runs no code of others.
inline bool is_described(const c10::TensorImpl* impl) {
  return (impl->key_set() | kKnownKeys) == kKnownKeys && !impl->has_symbolic_sizes_strides() &&
         impl->unsafe_storage();
}

struct Place {
  const c10::StorageImpl* storage;
  int64_t offset;
};

// A list that holds no more than a few items.
template <class Item, size_t most>
class Few {
 public:
  bool add(const Item& item) {
    if (size_ == most) return false;
    items_[size_++] = item;
    return true;
  }
  size_t size() const { return size_; }
  void clear() { size_ = 0; }
  const Item& operator[](size_t i) const { return items_[i]; }
  operator c10::ArrayRef<Item>() const { return {items_, size_}; }

 private:
  size_t size_ = 0;
  Item items_[most];
};

template <class Item, size_t usual>
class Many : public c10::SmallVector<Item, usual> {
 public:
  bool add(const Item& item) {
    this->push_back(item);
    return true;
  }
};

// Takes the words of a call down.
struct WrittenWords {
  static constexpr size_t kMaxWords = 1 << 14;
  template <class Item, size_t usual>
  using List = Many<Item, usual>;
  c10::SmallVector<uint64_t, 64> words;

  bool take(uint64_t word) {
    words.push_back(word);
    return words.size() <= kMaxWords;
  }
};

// Compares the words of a call with known ones. This is faster than to write them down.
struct ExpectedWords {
  template <class Item, size_t usual>
  using List = Few<Item, usual>;
  const uint64_t* at = nullptr;
  const uint64_t* end = nullptr;

  bool take(uint64_t word) { return at != end && *at++ == word; }
};

// Describes the arguments of one call by words. Each argument says by itself where it ends.
template <class Words>
class Description {
 public:
  // Before a call is described: ``limits`` are those of its numbers.
  void set_limits(const std::vector<NumberLimits>& limits) { limits_ = &limits; }

  // Returns false for a call that words cannot describe: subclasses, sparse tensors, symbolic sizes, generators; and
  // if the words are not the expected ones.
  bool describe(const c10::IValue* arguments, size_t count) {
    for (argument_ = 0; argument_ < count; ++argument_) {
      if (!add(arguments[argument_])) return false;
    }
    return true;
  }

  // Does the same with arguments that are not boxed. The words are the same.
  template <class... Arguments>
  C10_ALWAYS_INLINE bool describe_typed(const Arguments&... arguments) {
    argument_ = 0;
    return ((add(arguments) && ++argument_ != 0) && ...);
  }

  // The tensors that are defined, in the order of the arguments. They must outlive this object's use.
  c10::ArrayRef<const at::Tensor*> tensors() const { return tensors_; }

  // Whether all tensors were compared for shared memory. If not, two calls may differ in it and have the same words.
  bool compared_all() const { return compared_all_; }

  // Values of numbers on which decisions do not depend. They are not among the words.
  c10::ArrayRef<uint64_t> numbers() const { return numbers_; }

 protected:
  Words words_;

  // Forgets a call, before another comparison.
  void forget() {
    storages_.clear();
    tensors_.clear();
    numbers_.clear();
    compared_all_ = true;
  }

 private:
  static constexpr size_t kMaxCompared = 16;  // tensors that are compared for shared memory
  static constexpr uintptr_t kAlignment = 16;
  static constexpr int kApart = -1, kTooMany = -2;

  bool add_word(uint64_t word) { return words_.take(word); }

  bool add(const c10::IValue& value) {
    if (value.isTensor()) return add(value.toTensor());
    if (value.isNone()) return add_word(kNone);
    if (value.isInt()) return add_number(kInt, value.toInt());
    if (value.isDouble()) return add_number(kDouble, value.toDouble());
    if (value.isBool()) return add(value.toBool());
    if (value.isComplexDouble()) {
      const c10::complex<double> number = value.toComplexDouble();
      return add_pair(kComplex, number.real()) && add_pair(kComplex, number.imag());
    }
    if (value.isList()) return add(value.toListRef());
    if (value.isString()) return add(std::string_view(value.toStringRef()));
    if (!value.isDevice()) return false;
    const c10::Device device = value.toDevice();
    return add_pair(kDevice, uint64_t{static_cast<uint8_t>(device.type())} << 8 | static_cast<uint8_t>(device.index()));
  }

  template <class Value>
  bool add(const std::optional<Value>& value) {
    return value.has_value() ? add(*value) : add_word(kNone);
  }

  bool add(int64_t number) { return add_pair(kInt, number); }
  bool add(double number) { return add_number(kDouble, number); }
  bool add(bool flag) { return add_pair(kBool, uint64_t{flag}); }
  bool add(c10::ScalarType type) { return add(static_cast<int64_t>(type)); }
  C10_ALWAYS_INLINE bool add(const c10::SymInt& number) {
    const std::optional<int64_t> value = number.maybe_as_int();
    return value.has_value() && add(*value);
  }
  bool add(const at::OptionalIntArrayRef& list) { return list.has_value() ? add(*list) : add_word(kNone); }

  bool add(std::string_view text) {
    if (!add_pair(kString, uint64_t{text.size()})) return false;
    for (size_t offset = 0; offset < text.size(); offset += sizeof(uint64_t)) {
      uint64_t word = 0;
      std::memcpy(&word, text.data() + offset, std::min(sizeof(word), text.size() - offset));
      if (!add_word(word)) return false;
    }
    return true;
  }

  C10_ALWAYS_INLINE bool add(const c10::Scalar& number) {
    if (number.isSymbolic()) return false;  // first: reading its value would fix it
    if (number.isFloatingPoint()) return add_number(kDouble, value_in<double>(number));
    if (number.isBoolean()) return add(number.toBool());
    return number.type() == c10::ScalarType::Long && add_number(kInt, value_in<int64_t>(number));
  }

  // Returns the value of a scalar whose type is known; without the checks that toLong makes.
  template <class Number>
  static Number value_in(const c10::Scalar& scalar) {
    Number number;
    std::memcpy(&number, scalar.data_ptr(), sizeof(number));
    return number;
  }

  template <class Item>
  bool add(c10::ArrayRef<Item> items) {
    if (!add_pair(kList, uint64_t{items.size()})) return false;
    for (const Item& item : items) {
      if (!add(item)) return false;
    }
    return true;
  }

  template <class Number>
  static uint64_t bits_of(Number number) {
    static_assert(sizeof(Number) == sizeof(uint64_t));
    uint64_t bits;
    std::memcpy(&bits, &number, sizeof(bits));
    return bits;
  }

  template <class Number>
  C10_ALWAYS_INLINE bool add_pair(Tag tag, Number number) {
    return add_word(tag) && add_word(bits_of(number));
  }

  // Adds a number; if it is an argument with limits, its value is not among the words.
  template <class Number>
  C10_ALWAYS_INLINE bool add_number(Tag tag, Number number) {
    if (limits_ == nullptr || !(*limits_)[argument_].apply) return add_pair(tag, number);
    const NumberLimits& limits = (*limits_)[argument_];
    const uint64_t bits = bits_of(number);
    if (tag == limits.default_tag && bits == limits.default_bits) return add_pair(tag, number);
    if constexpr (std::is_same_v<Number, double>) {
      if (!std::isfinite(number) || (number == 0 && std::signbit(number))) return add_pair(tag, number);
      return numbers_.add(bits) && add_pair(kDoubleBetween, NumberLimits::class_of(number, limits.doubles));
    } else {
      return numbers_.add(bits) && add_pair(kIntBetween, NumberLimits::class_of(number, limits.ints));
    }
  }

  bool add(const at::Tensor& tensor) {
    const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
    if (!tensor.defined()) return add_word(kUndefined);
    if (!is_described(impl)) return false;
    const c10::DispatchKeySet keys = impl->key_set();
    const c10::IntArrayRef sizes = impl->sizes(), strides = impl->strides();
    if (sizes.size() > UINT16_MAX) return false;
    const c10::StorageImpl* storage = impl->unsafe_storage().unsafeGetStorageImpl();
    const int64_t elements = impl->storage_offset();
    const int64_t offset = elements == 0 ? 0 : elements * static_cast<int64_t>(impl->itemsize());
    const char* begin = impl->numel() == 0 ? nullptr : static_cast<const char*>(storage->data()) + offset;
    uint64_t flags = 0;
    if (impl->is_wrapped_number()) {
      flags |= kWrappedNumber;
      if (!add_value(begin, impl->itemsize())) return false;
    }
    if (keys.has(c10::DispatchKey::Conjugate)) flags |= kConjugate;
    if (keys.has(c10::DispatchKey::Negative)) flags |= kNegative;
    if (offset != 0) flags |= kOffset;
    if (reinterpret_cast<uintptr_t>(begin) % kAlignment != 0) flags |= kMisaligned;
    if (impl->autograd_meta() != nullptr && impl->requires_grad()) flags |= kRequiresGrad;
    if (tensor.is_inference()) flags |= kInference;
    const int shared_with = find_storage(storage, offset);
    const uint64_t same = shared_with >= 0 ? find_same(impl) : 0;
    if (shared_with == kTooMany || !tensors_.add(&tensor)) return false;
    if (shared_with >= 0) flags |= kShared;
    const c10::Device device = impl->device();
    if (!add_word(kTensor | uint64_t{static_cast<uint8_t>(impl->dtype().toScalarType())} << 8 |
                  uint64_t{static_cast<uint8_t>(device.type())} << 16 |
                  uint64_t{static_cast<uint8_t>(device.index())} << 24 | flags << 32 |
                  uint64_t{sizes.size()} << 48)) {
      return false;
    }
    if (shared_with >= 0 && !(add_word(uint64_t{static_cast<uint32_t>(shared_with)} | same << 32) &&
                              add_word(offset - storages_[shared_with].offset))) {
      return false;
    }
    for (const int64_t size : sizes) {
      if (!add_word(size)) return false;
    }
    for (const int64_t stride : strides) {
      if (!add_word(stride)) return false;
    }
    return true;
  }

  // Adds the value of a tensor that stands for a number.
  bool add_value(const char* value, size_t bytes) {
    uint64_t words[2] = {0, 0};
    if (value != nullptr) std::memcpy(words, value, std::min(bytes, sizeof(words)));
    return numbers_.add(words[0]) && numbers_.add(words[1]);
  }

  // Returns which earlier tensor has the same memory.
  int find_storage(const c10::StorageImpl* storage, int64_t offset) {
    for (size_t i = 0; i < storages_.size(); ++i) {
      if (storages_[i].storage == storage) return static_cast<int>(i);
    }
    if (storages_.size() < kMaxCompared) return storages_.add({storage, offset}) ? kApart : kTooMany;
    compared_all_ = false;
    return kApart;
  }

  // Returns which earlier tensor is the very same one, counted from 1, or 0. A kernel may ask `self is other`.
  uint64_t find_same(const c10::TensorImpl* impl) const {
    for (size_t i = 0; i < tensors_.size(); ++i) {
      if (tensors_[i]->unsafeGetTensorImpl() == impl) return i + 1;
    }
    return 0;
  }

  const std::vector<NumberLimits>* limits_ = nullptr;
  size_t argument_ = 0;  // that is described now
  typename Words::template List<Place, 8> storages_;
  typename Words::template List<const at::Tensor*, 8> tensors_;
  typename Words::template List<uint64_t, 4> numbers_;
  bool compared_all_ = true;
};

// The words of a call, written down.
class Geometry : public Description<WrittenWords> {
 public:
  const uint64_t* words() const { return words_.words.data(); }
  size_t count() const { return words_.words.size(); }

  uint64_t hash() const { return hash_words(words(), count()); }

  static uint64_t hash_words(const uint64_t* words, size_t count) {
    uint64_t hash = 0;
    for (size_t i = 0; i < count; ++i) {
      hash = (hash ^ words[i]) * 0x9E3779B97F4A7C15ULL;
      hash ^= hash >> 32;
    }
    return hash;
  }
};

// A comparison of a call's words with known ones.
class Comparison : public Description<ExpectedWords> {
 public:
  void expect(c10::ArrayRef<uint64_t> words) {
    forget();
    words_ = {words.begin(), words.end()};
  }
  bool is_complete() const { return words_.at == words_.end; }
};

C10_ALWAYS_INLINE size_t elements_in(const at::Tensor& tensor) {
  const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  return is_described(impl) ? static_cast<size_t>(impl->numel()) : 0;
}
inline size_t elements_in(const std::optional<at::Tensor>& tensor) { return tensor ? elements_in(*tensor) : 0; }
inline size_t elements_in(const c10::IValue& value) { return value.isTensor() ? elements_in(value.toTensor()) : 0; }
template <class Other>
size_t elements_in(const Other& /*value*/) {
  return 0;
}

}  // namespace opforge
