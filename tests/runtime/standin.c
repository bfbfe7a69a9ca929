// A stand-in for the CUDA driver: a function is a function of this machine, called once for each block of the grid.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef void (*block_function)(unsigned x, unsigned y, unsigned z, void** parameters);

static int next_error = 0, error_after = 0, error_stays = 0, launches = 0, fills = 0, copies = 0, modules = 0;

int standin_fail_with(int error) { error_after = error_stays = 0; return next_error = error; }
// Fails after some launches and fills that succeed. An error that stays is one that ends the use of a GPU.
int standin_fail_later(int error, int after, int stays) {
  error_after = after, error_stays = stays;
  return next_error = error;
}
int standin_launches(void) { return launches; }
int standin_fills(void) { return fills; }
int standin_copies(void) { return copies; }

static int take_error(void) {
  if (!next_error || error_after-- > 0) return 0;
  const int error = next_error;
  if (!error_stays) next_error = 0;
  return error;
}
int standin_modules(void) { return modules; }

int cuLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void* stream, void** parameters, void** extra) {
  (void)bx; (void)by; (void)bz; (void)shared; (void)stream; (void)extra;
  const int error = take_error();
  if (error) return error;
  __atomic_fetch_add(&launches, 1, __ATOMIC_RELAXED);
  for (unsigned z = 0; z < gz; ++z)
    for (unsigned y = 0; y < gy; ++y)
      for (unsigned x = 0; x < gx; ++x) ((block_function)function)(x, y, z, parameters);
  return 0;
}

int cuMemsetD8Async(uint64_t address, unsigned char value, size_t bytes, void* stream) {
  (void)stream;
  const int error = take_error();
  if (error) return error;
  __atomic_fetch_add(&fills, 1, __ATOMIC_RELAXED);
  memset((void*)address, value, bytes);
  return 0;
}

int cuMemcpyDtoDAsync_v2(uint64_t target, uint64_t source, size_t bytes, void* stream) {
  (void)stream;
  __atomic_fetch_add(&copies, 1, __ATOMIC_RELAXED);
  memcpy((void*)target, (const void*)source, bytes);
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

// The blocks of the kernels in standin.py, with the parameters as Triton passes them.
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

void clamped(unsigned x, unsigned y, unsigned z, void** parameters) {  // source, target, count, lower and upper limit
  (void)y; (void)z;
  const float* source = AT(float*, 0);
  float* target = AT(float*, 1);
  const int count = AT(int, 2);
  const float low = AT(float, 3), high = AT(float, 4);
  for (int i = x * 64; i < (int)(x + 1) * 64 && i < count; ++i)
    target[i] = source[i] < low ? low : source[i] > high ? high : source[i];
}

void strided_add_to(unsigned x, unsigned y, unsigned z, void** parameters) {  // target, source, count, strides, factor
  (void)y; (void)z;
  float* target = AT(float*, 0);
  const float* source = AT(float*, 1);
  const int count = AT(int, 2);
  const int64_t target_stride = AT(int, 3), source_stride = AT(int, 4);
  const float factor = AT(float, 5);
  for (int i = x * 64; i < (int)(x + 1) * 64 && i < count; ++i)
    target[i * target_stride] += factor * source[i * source_stride];
}

// source, weight, bias, target, mean, deviation, columns, which of weight and bias there are, eps
void row_norm(unsigned x, unsigned y, unsigned z, void** parameters) {
  (void)y; (void)z;
  const int columns = AT(int, 6), given = AT(int, 7);
  const float* source = AT(float*, 0) + (int64_t)x * columns;
  const float *weight = AT(float*, 1), *bias = AT(float*, 2);
  float* target = AT(float*, 3) + (int64_t)x * columns;
  float sum = 0, squares = 0;
  for (int i = 0; i < columns; ++i) sum += source[i];
  const float mean = sum / columns;
  for (int i = 0; i < columns; ++i) squares += (source[i] - mean) * (source[i] - mean);
  const float deviation = 1 / __builtin_sqrtf(squares / columns + AT(float, 8));
  for (int i = 0; i < columns; ++i)
    target[i] = (source[i] - mean) * deviation * (given & 1 ? weight[i] : 1) + (given & 2 ? bias[i] : 0);
  AT(float*, 4)[x] = mean;
  AT(float*, 5)[x] = deviation;
}

void filled(unsigned x, unsigned y, unsigned z, void** parameters) {  // target as bytes, count, value of four bytes
  (void)y; (void)z;
  uint8_t* target = AT(uint8_t*, 0);
  const int count = AT(int, 1), value = AT(int, 2);
  for (int i = x * 64; i < (int)(x + 1) * 64 && i < count; ++i) target[i] = value >> i % 4 * 8;
}
