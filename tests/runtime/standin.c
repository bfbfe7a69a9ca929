// A stand-in for the CUDA driver: a function is a function of this machine, called once for each block of the grid.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef void (*block_function)(unsigned x, unsigned y, unsigned z, void** parameters);

static int next_error = 0, launches = 0, fills = 0, modules = 0;

int standin_fail_with(int error) { return next_error = error; }
int standin_launches(void) { return launches; }
int standin_fills(void) { return fills; }
int standin_modules(void) { return modules; }

int cuLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void* stream, void** parameters, void** extra) {
  (void)bx; (void)by; (void)bz; (void)shared; (void)stream; (void)extra;
  if (next_error) {
    int error = next_error;
    next_error = 0;
    return error;
  }
  __atomic_fetch_add(&launches, 1, __ATOMIC_RELAXED);
  for (unsigned z = 0; z < gz; ++z)
    for (unsigned y = 0; y < gy; ++y)
      for (unsigned x = 0; x < gx; ++x) ((block_function)function)(x, y, z, parameters);
  return 0;
}

int cuMemsetD8Async(uint64_t address, unsigned char value, size_t bytes, void* stream) {
  (void)stream;
  __atomic_fetch_add(&fills, 1, __ATOMIC_RELAXED);
  memset((void*)address, value, bytes);
  return 0;
}

// A module is any ELF file, as compiled kernels are. Its functions are those of this library, by name.
int cuModuleLoadData(void** module, const void* image) {
  if (memcmp(image, "\177ELF", 4)) return 200;
  ++modules;
  *module = (void*)1;
  return 0;
}

int cuModuleGetFunction(void** function, void* module, const char* name) {
  Dl_info here;
  (void)module;
  if (!dladdr((void*)&cuModuleLoadData, &here)) return 500;
  void* library = dlopen(here.dli_fname, RTLD_NOW | RTLD_NOLOAD);
  *function = library ? dlsym(library, name) : NULL;
  return *function ? 0 : 500;
}

int cuFuncSetAttribute(void* function, int attribute, int value) { (void)function; return attribute == 8 && value > 0 ? 0 : 1; }
int cuFuncSetCacheConfig(void* function, int config) { (void)function; return config == 1 ? 0 : 1; }
int cuCtxPushCurrent_v2(void* context) { return context ? 0 : 201; }
int cuCtxPopCurrent_v2(void** context) { *context = (void*)1; return 0; }

int cuCtxGetCurrent(void** context) { *context = (void*)1; return 0; }
int cuCtxSetCurrent(void* context) { (void)context; return 0; }
int cuDevicePrimaryCtxRetain(void** context, int device) { (void)device; *context = (void*)1; return 0; }
int cuGetErrorName(int error, const char** name) { (void)error; *name = "CUDA_ERROR_STAND_IN"; return 0; }

// The blocks of the kernels in standin_kernels.py, with the parameters as Triton passes them.
#define AT(type, i) (*(type*)parameters[i])

void scaled(unsigned x, unsigned y, unsigned z, void** parameters) {  // source, target, count, factor
  (void)y; (void)z;
  const float* source = AT(float*, 0);
  float* target = AT(float*, 1);
  const int count = AT(int, 2);
  const float factor = AT(float, 3);
  for (int i = x * 64; i < (int)(x + 1) * 64 && i < count; ++i) target[i] = source[i] * factor;
}

void strided_sum(unsigned x, unsigned y, unsigned z, void** parameters) {  // left, right, target, count, strides of both
  (void)y; (void)z;
  const float *left = AT(float*, 0), *right = AT(float*, 1);
  float* target = AT(float*, 2);
  const int count = AT(int, 3);
  const int64_t left_stride = AT(int, 4), right_stride = AT(int, 5);
  for (int i = x * 64; i < (int)(x + 1) * 64 && i < count; ++i)
    target[i] += left[i * left_stride] + right[i * right_stride];
}
