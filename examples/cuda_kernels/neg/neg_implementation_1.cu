// neg in CUDA with torch's stable ABI, for float32. Judge it with --device cuda.
#include <cuda_runtime.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

using torch::stable::Tensor;

__global__ void negate(const float* from, float* to, int64_t count) {
  const int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  if (i < count) {
    to[i] = -from[i];
  }
}

Tensor neg(const Tensor& self) {
  STD_TORCH_CHECK(self.scalar_type() == torch::headeronly::ScalarType::Float, "neg: float32 only");
  Tensor input = torch::stable::contiguous(self), result = torch::stable::empty_like(input);
  void* stream = nullptr;  // torch's current one: work on another would not be waited for
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(input.get_device_index(), &stream));
  const int64_t count = input.numel();
  if (count > 0) {
    negate<<<(count + 255) / 256, 256, 0, static_cast<cudaStream_t>(stream)>>>(
        static_cast<const float*>(input.const_data_ptr()), static_cast<float*>(result.mutable_data_ptr()), count);
  }
  return result;
}

STABLE_TORCH_LIBRARY(OPFORGE_NAMESPACE, m) {
  m.def("neg(Tensor self) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(OPFORGE_NAMESPACE, CUDA, m) {
  m.impl("neg", TORCH_BOX(&neg));
}
