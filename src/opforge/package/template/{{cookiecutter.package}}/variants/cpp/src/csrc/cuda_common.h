// What the operators share on CUDA: device, stream, size of a launch, its check, and sums over a block.
#pragma once

#include <cuda_runtime.h>

{% if cookiecutter.abi == "stable" %}
#include <torch/csrc/stable/accelerator.h>
{% else %}
#include <c10/core/DeviceGuard.h>
{% endif %}
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include "common.h"

constexpr int kThreads = 256;

// While it lives, the tensor's device is the current one. Kernels are launched on torch's current stream there: on another, nothing would wait for them.
class OnDevice {
 public:
{% if cookiecutter.abi == "stable" %}
  OnDevice(const char* op, const Tensor& x) : guard_(x.get_device()) {
{% else %}
  OnDevice(const char* op, const Tensor& x) : guard_(x.device()) {
{% endif %}
    void* stream = nullptr;
    if (aoti_torch_get_current_cuda_stream(x.get_device(), &stream) != 0) {
      refuse(op, "torch has no current stream on device ", static_cast<int>(x.get_device()));
    }
    stream_ = static_cast<cudaStream_t>(stream);
  }

  cudaStream_t stream() const { return stream_; }

 private:
{% if cookiecutter.abi == "stable" %}
  torch::stable::accelerator::DeviceGuard guard_;
{% else %}
  c10::DeviceGuard guard_;
{% endif %}
  cudaStream_t stream_ = nullptr;
};

// Blocks for that many pieces of work. Kernels loop over what is left (a grid-stride loop), so that no size is too large.
inline unsigned blocks_for(int64_t pieces, int64_t each = 1) {
  const int64_t blocks = (pieces + each - 1) / each;
  return static_cast<unsigned>(blocks < 65535 ? blocks : 65535);
}

// Says which operator could not be launched; without it the error would come up somewhere later.
inline void check_launch(const char* op) {
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) {
    refuse(op, "the CUDA kernel could not be launched: ", cudaGetErrorString(error));
  }
}

// The first element of this thread, and how far it is to its next one.
__device__ inline int64_t first_index() { return blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; }
__device__ inline int64_t index_step() { return gridDim.x * static_cast<int64_t>(blockDim.x); }

// The sum of what the threads of a block bring, which must be all of them; each gets it.
template <typename T>
__device__ T block_sum(T value) {
  __shared__ T warps[kThreads / 32];
  for (int step = 16; step > 0; step /= 2) {
    value += __shfl_xor_sync(0xffffffff, value, step);
  }
  __syncthreads();  // the sums of an earlier call have been read
  if (threadIdx.x % 32 == 0) {
    warps[threadIdx.x / 32] = value;
  }
  __syncthreads();
  T total = 0;
  for (int i = 0; i < kThreads / 32; ++i) {
    total += warps[i];
  }
  return total;
}
