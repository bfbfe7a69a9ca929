// The functions of libcuda that replays need. They are found at run time: the library is not linked with CUDA.
#pragma once

#include <c10/util/Exception.h>
#include <dlfcn.h>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>

namespace opforge {

struct Driver {
  using Launch = int (*)(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                         unsigned block_y, unsigned block_z, unsigned shared, void* stream, void** parameters,
                         void** extra);
  using Fill = int (*)(uint64_t address, unsigned char value, size_t bytes, void* stream);
  using Copy = int (*)(uint64_t target, uint64_t source, size_t bytes, void* stream);
  using GetContext = int (*)(void** context);
  using SetContext = int (*)(void* context);
  using RetainContext = int (*)(void** context, int device);
  using ErrorName = int (*)(int error, const char** name);

  Launch launch = nullptr;
  Fill fill = nullptr;
  Copy copy = nullptr;
  GetContext get_context = nullptr;
  SetContext set_context = nullptr;
  RetainContext retain_context = nullptr;
  ErrorName error_name = nullptr;

  explicit Driver(const char* path) {
    void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    TORCH_CHECK(library != nullptr, "the CUDA driver cannot be loaded: ", dlerror());
    find(library, "cuLaunchKernel", launch);
    find(library, "cuMemsetD8Async", fill);
    find(library, "cuMemcpyDtoDAsync_v2", copy);
    find(library, "cuCtxGetCurrent", get_context);
    find(library, "cuCtxSetCurrent", set_context);
    find(library, "cuDevicePrimaryCtxRetain", retain_context);
    find(library, "cuGetErrorName", error_name);
  }

  std::string name_of(int error) const {
    const char* name = nullptr;
    return error_name(error, &name) == 0 && name != nullptr ? name : "error " + std::to_string(error);
  }

  // Gives this thread a context, if it has none. Threads of a backward pass begin without one.
  void need_context(int device) const {
    static thread_local bool has_context = false;
    if (has_context) return;
    void* context = nullptr;
    if (get_context(&context) != 0 || context == nullptr) {
      TORCH_CHECK(retain_context(&context, device) == 0 && set_context(context) == 0,
                  "the CUDA driver has no context for device ", device);
    }
    has_context = true;
  }

  // Errors after which a plan is of no more use, and everything else still works. Others end the process's use of CUDA.
  static bool concerns_plan_only(int error) {
    constexpr int kInvalidValue = 1, kInvalidImage = 200, kInvalidContext = 201, kNoBinary = 209, kInvalidHandle = 400,
                  kNotFound = 500, kOutOfResources = 701, kCooperativeTooLarge = 720;
    return error == kInvalidValue || error == kInvalidImage || error == kInvalidContext || error == kNoBinary ||
           error == kInvalidHandle || error == kNotFound || error == kOutOfResources || error == kCooperativeTooLarge;
  }

 private:
  template <class Function>
  static void find(void* library, const std::string& name, Function& function) {
    void* found = dlsym(library, name.c_str());
    TORCH_CHECK(found != nullptr, "the CUDA driver has no function ", name);
    function = reinterpret_cast<Function>(found);
  }
};

inline std::atomic<const Driver*> loaded_driver{nullptr};

}  // namespace opforge
