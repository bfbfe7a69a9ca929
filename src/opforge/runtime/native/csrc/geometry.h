// The geometry of a call as words: everything that a decision about the call may depend on, and no contents of memory.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <cstring>
#include <optional>
#include <string_view>

namespace opforge {

enum Tag : uint64_t { kNone = 1, kUndefined, kTensor, kInt, kDouble, kBool, kComplex, kList, kString, kDevice };

enum TensorFlag : uint64_t {
  kWrappedNumber = 1, kConjugate = 2, kNegative = 4, kOffset = 8, kMisaligned = 16, kRequiresGrad = 32, kShared = 64,
  kInference = 128
};

// Words that describe the arguments of one call. Each argument says by itself where it ends.
class Geometry {
 public:
  // Returns false for a call that words cannot describe: subclasses, sparse tensors, symbolic sizes, generators.
  bool describe(const c10::IValue* arguments, size_t count) {
    for (size_t i = 0; i < count; ++i) {
      if (!add(arguments[i])) return false;
    }
    return true;
  }

  // Does the same with arguments that are not boxed. The words are the same.
  template <class... Arguments>
  bool describe_typed(const Arguments&... arguments) {
    return (add(arguments) && ...);
  }

  const uint64_t* words() const { return words_.data(); }
  size_t count() const { return words_.size(); }

  // The tensors that are defined, in the order of the arguments. They must outlive this object's use.
  c10::ArrayRef<const at::Tensor*> tensors() const { return tensors_; }

  // Whether all tensors were compared for shared memory. If not, two calls may differ in it and have the same words.
  bool compared_all() const { return compared_all_; }

  // Values of the tensors that stand for numbers. They are not among the words: few decisions depend on them.
  c10::ArrayRef<uint64_t> numbers() const { return numbers_; }

  // Whether the words say of all tensors which share memory.
  bool has_all_aliases() const { return tensors_.size() <= kMaxCompared; }

  uint64_t hash() const { return hash_words(words_.data(), words_.size()); }

  static uint64_t hash_words(const uint64_t* words, size_t count) {
    uint64_t hash = 0;
    for (size_t i = 0; i < count; ++i) {
      hash = (hash ^ words[i]) * 0x9E3779B97F4A7C15ULL;
      hash ^= hash >> 32;
    }
    return hash;
  }

 private:
  static constexpr size_t kMaxWords = 1 << 14;
  static constexpr size_t kMaxCompared = 16;  // tensors that are compared for shared memory
  static constexpr uintptr_t kAlignment = 16;

  void add_word(uint64_t word) { words_.push_back(word); }

  bool add(const c10::IValue& value) {
    if (value.isTensor()) return add(value.toTensor());
    if (value.isNone()) {
      add_word(kNone);
    } else if (value.isInt()) {
      add_pair(kInt, value.toInt());
    } else if (value.isDouble()) {
      add_pair(kDouble, value.toDouble());
    } else if (value.isBool()) {
      add_pair(kBool, uint64_t{value.toBool()});
    } else if (value.isComplexDouble()) {
      const c10::complex<double> number = value.toComplexDouble();
      add_pair(kComplex, number.real());
      add_pair(kComplex, number.imag());
    } else if (value.isList()) {
      const c10::ArrayRef<c10::IValue> items = value.toListRef();
      add_pair(kList, uint64_t{items.size()});
      for (const c10::IValue& item : items) {
        if (!add(item)) return false;
      }
    } else if (value.isString()) {
      add_text(value.toStringRef());
    } else if (value.isDevice()) {
      const c10::Device device = value.toDevice();
      add_pair(kDevice, uint64_t{static_cast<uint8_t>(device.type())} << 8 | static_cast<uint8_t>(device.index()));
    } else {
      return false;
    }
    return words_.size() <= kMaxWords;
  }

  template <class Value>
  bool add(const std::optional<Value>& value) {
    if (value.has_value()) return add(*value);
    add_word(kNone);
    return true;
  }

  bool add(int64_t number) { return add_pair(kInt, number); }
  bool add(double number) { return add_pair(kDouble, number); }
  bool add(bool flag) { return add_pair(kBool, uint64_t{flag}); }
  bool add(c10::ScalarType type) { return add(static_cast<int64_t>(type)); }
  bool add(const c10::SymInt& number) { return !number.is_symbolic() && add(number.expect_int()); }
  bool add(const at::OptionalIntArrayRef& list) { return list.has_value() ? add(*list) : add(std::optional<bool>()); }
  bool add(std::string_view text) { return add_text(text); }

  bool add(const c10::Scalar& number) {
    if (number.isSymbolic()) return false;  // first: reading its value would fix it
    if (number.isFloatingPoint()) return add(number.toDouble());
    if (number.isBoolean()) return add(number.toBool());
    return number.type() == c10::ScalarType::Long && add(number.toLong());
  }

  template <class Item>
  bool add(c10::ArrayRef<Item> items) {
    add_pair(kList, uint64_t{items.size()});
    for (const Item& item : items) {
      if (!add(item)) return false;
    }
    return true;
  }

  template <class Number>
  bool add_pair(Tag tag, Number number) {
    static_assert(sizeof(Number) == sizeof(uint64_t));
    uint64_t bits;
    std::memcpy(&bits, &number, sizeof(bits));
    add_word(tag);
    add_word(bits);
    return true;
  }

  bool add_text(std::string_view text) {
    add_pair(kString, uint64_t{text.size()});
    for (size_t offset = 0; offset < text.size(); offset += sizeof(uint64_t)) {
      uint64_t word = 0;
      std::memcpy(&word, text.data() + offset, std::min(sizeof(word), text.size() - offset));
      add_word(word);
    }
    return true;
  }

  bool add(const at::Tensor& tensor) {
    const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
    if (!tensor.defined()) {
      add_word(kUndefined);
      return true;
    }
    const c10::DispatchKeySet keys = impl->key_set();
    if ((keys.raw_repr() & ~known_keys()) != 0 || impl->has_symbolic_sizes_strides() || !impl->has_storage()) {
      return false;
    }
    const c10::IntArrayRef sizes = impl->sizes(), strides = impl->strides();
    if (sizes.size() > UINT16_MAX) return false;
    const c10::StorageImpl* storage = impl->storage().unsafeGetStorageImpl();
    const int64_t elements = impl->storage_offset();
    const int64_t offset = elements == 0 ? 0 : elements * static_cast<int64_t>(impl->itemsize());
    const char* begin = impl->numel() == 0 ? nullptr : static_cast<const char*>(storage->data()) + offset;
    uint64_t flags = 0;
    if (impl->is_wrapped_number()) {
      flags |= kWrappedNumber;
      add_number(begin, impl->itemsize());
    }
    if (keys.has(c10::DispatchKey::Conjugate)) flags |= kConjugate;
    if (keys.has(c10::DispatchKey::Negative)) flags |= kNegative;
    if (offset != 0) flags |= kOffset;
    if (reinterpret_cast<uintptr_t>(begin) % kAlignment != 0) flags |= kMisaligned;
    if (impl->autograd_meta() != nullptr && impl->requires_grad()) flags |= kRequiresGrad;
    if (tensor.is_inference()) flags |= kInference;
    const int shared_with = find_storage(storage, offset);
    if (shared_with >= 0) flags |= kShared;
    const c10::Device device = impl->device();
    add_word(kTensor | uint64_t{static_cast<uint8_t>(impl->dtype().toScalarType())} << 8 |
             uint64_t{static_cast<uint8_t>(device.type())} << 16 |
             uint64_t{static_cast<uint8_t>(device.index())} << 24 | flags << 32 | uint64_t{sizes.size()} << 48);
    if (shared_with >= 0) {
      add_word(uint64_t{static_cast<uint32_t>(shared_with)} | find_same(impl) << 32);
      add_word(offset - storages_[shared_with].offset);
    }
    for (const int64_t size : sizes) add_word(size);
    for (const int64_t stride : strides) add_word(stride);
    tensors_.push_back(&tensor);
    return true;
  }

  void add_number(const char* value, size_t bytes) {
    uint64_t words[2] = {0, 0};
    if (value != nullptr) std::memcpy(words, value, std::min(bytes, sizeof(words)));
    numbers_.append({words[0], words[1]});
  }

  static uint64_t known_keys() {
    static const uint64_t keys =
        (c10::DispatchKeySet({c10::DispatchKey::CPU, c10::DispatchKey::CUDA, c10::DispatchKey::Conjugate,
                              c10::DispatchKey::Negative, c10::DispatchKey::ADInplaceOrView}) |
         c10::autograd_dispatch_keyset | c10::autocast_dispatch_keyset).raw_repr();
    return keys;
  }

  // Returns which earlier tensor has the same memory, or -1.
  int find_storage(const c10::StorageImpl* storage, int64_t offset) {
    for (size_t i = 0; i < storages_.size(); ++i) {
      if (storages_[i].storage == storage) return static_cast<int>(i);
    }
    if (storages_.size() < kMaxCompared) {
      storages_.push_back({storage, offset});
    } else {
      compared_all_ = false;
    }
    return -1;
  }

  // Returns which earlier tensor is the very same one, counted from 1, or 0. A kernel may ask `self is other`.
  uint64_t find_same(const c10::TensorImpl* impl) const {
    for (size_t i = 0; i < tensors_.size(); ++i) {
      if (tensors_[i]->unsafeGetTensorImpl() == impl) return i + 1;
    }
    return 0;
  }

  struct Place {
    const c10::StorageImpl* storage;
    int64_t offset;
  };

  c10::SmallVector<uint64_t, 64> words_;
  c10::SmallVector<Place, 4> storages_;
  c10::SmallVector<const at::Tensor*, 8> tensors_;
  c10::SmallVector<uint64_t, 2> numbers_;
  bool compared_all_ = true;
};

}  // namespace opforge
