// The innermost part: a few rows of A times a block of B.
#pragma once

#include <cstdint>

constexpr int64_t kRows = 4;     // of A at once: each element of B that is read serves all of them
constexpr int64_t kDepth = 128;  // a block of B, small enough to stay in the cache
constexpr int64_t kWidth = 256;
constexpr int64_t kStripe = 32;  // rows that one thread takes

template <typename T>
void tile(const T* a, const T* b, T* c, int64_t rows, int64_t depth, int64_t width, int64_t a_stride, int64_t c_stride) {
  if (rows == kRows) {
    // The rows do not overlap, which the compiler must be told before it works on several elements at once.
    T* __restrict c0 = c;
    T* __restrict c1 = c + c_stride;
    T* __restrict c2 = c + 2 * c_stride;
    T* __restrict c3 = c + 3 * c_stride;
    for (int64_t k = 0; k < depth; ++k) {
      const T a0 = a[k], a1 = a[a_stride + k], a2 = a[2 * a_stride + k], a3 = a[3 * a_stride + k];
      const T* __restrict row = b + k * width;
      for (int64_t j = 0; j < width; ++j) {
        c0[j] += a0 * row[j];
        c1[j] += a1 * row[j];
        c2[j] += a2 * row[j];
        c3[j] += a3 * row[j];
      }
    }
    return;
  }
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t k = 0; k < depth; ++k) {
      for (int64_t j = 0; j < width; ++j) {
        c[i * c_stride + j] += a[i * a_stride + k] * b[k * width + j];
      }
    }
  }
}
