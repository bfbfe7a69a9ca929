// Runs a method of an ExecuTorch program, without Python and torch. Inputs are files or numbers,
// outputs are .npy files.
//
//     runner MODEL.pte INPUT … [-o FOLDER] [--method forward] [--repeat N]
//     runner --kernels
//
// A tensor is given as an .npy file. A file with another suffix holds the raw bytes of a tensor of the
// size that the method was planned for. A number is given as such, a missing optional input as none.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <set>
#include <string>
#include <vector>

#include <executorch/extension/module/module.h>
#include <executorch/extension/tensor/tensor.h>
#include <executorch/runtime/backend/interface.h>
#include <executorch/runtime/kernel/operator_registry.h>
#include <executorch/runtime/platform/platform.h>
#include <executorch/runtime/platform/runtime.h>

#include "npy.h"

namespace {

using executorch::aten::ScalarType;
using executorch::extension::Module;
using executorch::extension::TensorPtr;
using executorch::runtime::Error;
using executorch::runtime::EValue;
using executorch::runtime::MethodMeta;
using executorch::runtime::Tag;
using executorch::runtime::TensorInfo;

const char USAGE[] = "usage: runner MODEL.pte INPUT … [-o FOLDER] [--method forward] [--repeat N], or runner --kernels";

struct Failure : std::runtime_error {
  Failure(int code, const std::string& words) : std::runtime_error(words), code(code) {}
  int code;  // 1: the program does not run; 2: the request is invalid
};

// Errors that the runtime logged. They say more than its error codes.
std::vector<std::string> said;

void listen(et_timestamp_t, et_pal_log_level_t level, const char*, const char*, size_t, const char* message, size_t length) {
  if (level == et_pal_log_level_t::kError || level == et_pal_log_level_t::kFatal) {
    said.emplace_back(message, length);
  }
}

template <typename Words>
std::string joined(const Words& words, const char* between = ", ") {
  std::string text;
  for (const std::string& word : words) {
    text += (text.empty() ? "" : between) + word;
  }
  return text;
}

std::string last_words() { return said.empty() ? "the runtime did not say why" : joined(said, " / "); }

// A kernel that aborts ends the process. The reason is still printed.
void give_up() {
  std::fprintf(stderr, "runner: a kernel or the runtime gave up: %s\n", last_words().c_str());
  std::fflush(stderr);
  std::_Exit(1);
}

struct Dtype {
  ScalarType type;
  const char* name;
  const char* descr;  // in an .npy file; NumPy has no bfloat16, so two untyped bytes represent it
};

const Dtype DTYPES[] = {
    {ScalarType::Float, "float32", "<f4"}, {ScalarType::Double, "float64", "<f8"}, {ScalarType::Half, "float16", "<f2"},
    {ScalarType::BFloat16, "bfloat16", "|V2"}, {ScalarType::Long, "int64", "<i8"}, {ScalarType::Int, "int32", "<i4"},
    {ScalarType::Short, "int16", "<i2"}, {ScalarType::Char, "int8", "|i1"}, {ScalarType::Byte, "uint8", "|u1"},
    {ScalarType::Bool, "bool", "|b1"},
};

const Dtype& dtype_of(ScalarType type) {
  for (const Dtype& one : DTYPES) {
    if (one.type == type) {
      return one;
    }
  }
  throw Failure(1, "tensors of dtype number " + std::to_string(static_cast<int>(type)) + " cannot be read or written by this runner");
}

template <typename Sizes>
std::string words(const Sizes& sizes) {
  std::string text;
  for (const auto size : sizes) {
    text += (text.empty() ? "" : ", ") + std::to_string(size);
  }
  return "(" + text + ")";
}

struct Request {
  std::string model, method = "forward", out;
  std::vector<std::string> inputs;
  int repeat = 1;
  bool kernels = false;
};

Request parsed(int count, char** arguments) {
  Request request;
  for (int i = 1; i < count; ++i) {
    const std::string word = arguments[i];
    const bool takes = word == "-o" || word == "--method" || word == "--repeat";
    if (takes && i + 1 == count) {
      throw Failure(2, word + " needs a value; " + USAGE);
    }
    if (word == "-h" || word == "--help") {
      std::printf("%s\n", USAGE);
      std::exit(0);
    } else if (word == "--kernels") {
      request.kernels = true;
    } else if (word == "-o") {
      request.out = arguments[++i];
    } else if (word == "--method") {
      request.method = arguments[++i];
    } else if (word == "--repeat") {
      request.repeat = std::atoi(arguments[++i]);
      if (request.repeat < 1) {
        throw Failure(2, std::string("--repeat ") + arguments[i] + " is not a number of runs; give 1 or more");
      }
    } else if (word.rfind("--", 0) == 0) {
      throw Failure(2, "unknown option " + word + "; " + USAGE);
    } else if (request.model.empty()) {
      request.model = word;
    } else {
      request.inputs.push_back(word);
    }
  }
  if (request.model.empty() && !request.kernels) {
    throw Failure(2, std::string("a model is missing; ") + USAGE);
  }
  return request;
}

void show_kernels() {
  for (const auto& kernel : executorch::runtime::get_registered_kernels()) {
    std::printf("%s\n", kernel.name_);
  }
}

// Names the operators that a model needs and this runner lacks.
std::string missing_operators() {
  std::set<std::string> names;
  for (const std::string& line : said) {
    if (line.rfind("Missing operator: ", 0) == 0) {
      const size_t at = line.find("] ");
      names.insert(line.substr(at == std::string::npos ? 18 : at + 2));
    }
  }
  return names.empty() ? last_words() : joined(names);
}

void check_backends(const Request& request, const MethodMeta& meta) {
  for (size_t i = 0; i < meta.num_backends(); ++i) {
    const char* name = *meta.get_backend_name(i);
    if (executorch::runtime::get_backend_class(name) == nullptr) {
      throw Failure(1, request.model + " hands work to " + name + ", which is not linked into this runner; build it again for this model: opforge edge runner DIR --model " + request.model);
    }
  }
}

// Loads the method, or throws with what is missing.
MethodMeta loaded(Module& module, const Request& request) {
  npy::read_bytes(request.model);
  if (module.load(executorch::runtime::Program::Verification::InternalConsistency) != Error::Ok) {
    throw Failure(2, request.model + " cannot be run: " + last_words());
  }
  const auto names = module.method_names();
  if (names.ok() && names->count(request.method) == 0) {
    throw Failure(2, request.model + " has no method " + request.method + "; it has " + joined(*names));
  }
  const auto meta = module.method_meta(request.method);
  if (!meta.ok()) {
    throw Failure(1, "what " + request.method + " takes cannot be read: " + last_words());
  }
  check_backends(request, *meta);
  const Error error = module.load_method(request.method);
  if (error == Error::OperatorMissing) {
    throw Failure(1, request.model + " needs kernels that this runner was built without: " + missing_operators() + "; build it again for this model: opforge edge runner DIR --model " + request.model);
  }
  if (error != Error::Ok) {
    throw Failure(1, request.method + " cannot be loaded: " + last_words());
  }
  return *meta;
}

// The inputs of a call, with the memory that holds them.
struct Inputs {
  std::vector<npy::Array> arrays;
  std::vector<TensorPtr> tensors;
  std::vector<EValue> values;
};

npy::Array read_array(const std::string& place, const std::string& file, const TensorInfo& info) {
  const Dtype& dtype = dtype_of(info.scalar_type());
  const bool is_npy = file.size() > 4 && file.substr(file.size() - 4) == ".npy";
  npy::Array array;
  if (is_npy) {
    array = npy::parse(file, npy::read_bytes(file));
  } else {
    array = {dtype.descr, {info.sizes().begin(), info.sizes().end()}, npy::read_bytes(file)};
  }
  if (array.descr != dtype.descr) {
    throw Failure(2, place + " (" + file + ") has elements " + array.descr + ", and the method takes " + dtype.name + ", which is " + dtype.descr);
  }
  size_t bytes = executorch::runtime::elementSize(dtype.type);
  for (const int32_t size : array.shape) {
    bytes *= size;
  }
  if (bytes != array.bytes.size()) {
    throw Failure(2, place + " (" + file + ") has " + std::to_string(array.bytes.size()) + " bytes; a tensor " + words(array.shape) + " of " + dtype.name + " has " + std::to_string(bytes));
  }
  return array;
}

EValue number(const std::string& place, const std::string& word, Tag tag) {
  try {
    size_t used = 0;
    if (tag == Tag::Bool && (word == "true" || word == "false")) {
      return EValue(word == "true");
    }
    if (tag == Tag::Int) {
      const int64_t value = std::stoll(word, &used);
      if (used == word.size()) {
        return EValue(value);
      }
    }
    if (tag == Tag::Double) {
      const double value = std::stod(word, &used);
      if (used == word.size()) {
        return EValue(value);
      }
    }
  } catch (const std::logic_error&) {  // reported below, with the allowed values
  }
  const char* wanted = tag == Tag::Int ? "a whole number" : tag == Tag::Double ? "a number" : tag == Tag::Bool ? "true or false" : "something that cannot be given here";
  throw Failure(2, place + " is " + word + ", and the method takes " + wanted);
}

Inputs read_inputs(const Request& request, const MethodMeta& meta) {
  if (request.inputs.size() != meta.num_inputs()) {
    throw Failure(2, request.method + " takes " + std::to_string(meta.num_inputs()) + " inputs, and " + std::to_string(request.inputs.size()) + " were given");
  }
  Inputs inputs;
  inputs.arrays.reserve(request.inputs.size());
  for (size_t i = 0; i < request.inputs.size(); ++i) {
    const std::string place = "input " + std::to_string(i), word = request.inputs[i];
    const Tag tag = *meta.input_tag(i);
    if (tag == Tag::Tensor) {
      const auto info = meta.input_tensor_meta(i);
      inputs.arrays.push_back(read_array(place, word, *info));
      npy::Array& array = inputs.arrays.back();
      inputs.tensors.push_back(executorch::extension::from_blob(array.bytes.data(), array.shape, info->scalar_type()));
      inputs.values.emplace_back(inputs.tensors.back());
    } else if (tag == Tag::None && word == "none") {
      inputs.values.emplace_back();
    } else {
      inputs.values.push_back(number(place, word, tag));
    }
  }
  return inputs;
}

void show_output(const Request& request, size_t index, const EValue& value) {
  const std::string name = "output_" + std::to_string(index);
  if (!value.isTensor()) {
    const std::string text = value.isInt() ? std::to_string(value.toInt()) : value.isDouble() ? std::to_string(value.toDouble()) : value.isBool() ? (value.toBool() ? "true" : "false") : "not a tensor or a number";
    std::printf("%s  %s\n", name.c_str(), text.c_str());
    return;
  }
  const auto tensor = value.toTensor();
  const Dtype& dtype = dtype_of(tensor.scalar_type());
  std::string place;
  if (!request.out.empty()) {
    place = request.out + "/" + name + ".npy";
    npy::write(place, dtype.descr, {tensor.sizes().begin(), tensor.sizes().end()}, tensor.const_data_ptr(), tensor.nbytes());
  }
  std::printf("%s  %s %s  %s\n", name.c_str(), dtype.name, words(tensor.sizes()).c_str(), place.c_str());
}

std::vector<EValue> executed(Module& module, const Request& request, const Inputs& inputs) {
  auto results = module.execute(request.method, inputs.values);
  if (!results.ok()) {
    throw Failure(1, request.method + " failed: " + last_words());
  }
  return *results;
}

void run(const Request& request) {
  Module module(request.model);
  const MethodMeta meta = loaded(module, request);
  const Inputs inputs = read_inputs(request, meta);
  std::vector<EValue> outputs = executed(module, request, inputs);
  for (size_t i = 0; i < outputs.size(); ++i) {
    show_output(request, i, outputs[i]);
  }
  if (request.repeat > 1) {
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < request.repeat; ++i) {
      executed(module, request, inputs);
    }
    const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - start;
    std::printf("%d runs, %.2f us each\n", request.repeat, took.count() / request.repeat);
  }
}

}  // namespace

int main(int count, char** arguments) {
  executorch::runtime::register_pal(executorch::runtime::PalImpl::create(nullptr, give_up, nullptr, nullptr, listen, nullptr, nullptr, "runner"));
  executorch::runtime::runtime_init();
  try {
    const Request request = parsed(count, arguments);
    if (request.kernels) {
      show_kernels();
    } else {
      run(request);
    }
    return 0;
  } catch (const Failure& failure) {
    std::fprintf(stderr, "runner: %s\n", failure.what());
    return failure.code;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "runner: %s\n", error.what());
    return 2;
  }
}
