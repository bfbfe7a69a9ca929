// The innermost part: a few rows of A times a block of B.
#pragma once

#include <algorithm>
#include <cstdint>

constexpr int64_t kRows = 4;  // a tile of the product, small enough to be kept in registers
constexpr int64_t kColumns = 8;
constexpr int64_t kDepth = 128;  // a block of B, small enough to stay in the cache
constexpr int64_t kWidth = 256;
constexpr int64_t kStripe = 32;  // rows that one thread takes

// A whole tile: its sums are read and written once for all of the block's depth.
template <typename T>
void full_tile(const T* a, const T* b, T* c, int64_t depth, int64_t width, int64_t a_stride, int64_t c_stride) {
  T sums[kRows][kColumns];
  for (int64_t i = 0; i < kRows; ++i) {
    std::copy_n(c + i * c_stride, kColumns, sums[i]);
  }
  for (int64_t k = 0; k < depth; ++k) {
    for (int64_t i = 0; i < kRows; ++i) {
      for (int64_t j = 0; j < kColumns; ++j) {
        sums[i][j] += a[i * a_stride + k] * b[k * width + j];
      }
    }
  }
  for (int64_t i = 0; i < kRows; ++i) {
    std::copy_n(sums[i], kColumns, c + i * c_stride);
  }
}

template <typename T>
void tile(const T* a, const T* b, T* c, int64_t rows, int64_t depth, int64_t width, int64_t a_stride, int64_t c_stride) {
  const int64_t whole = rows == kRows ? width / kColumns * kColumns : 0;
  for (int64_t j = 0; j < whole; j += kColumns) {
    full_tile(a, b + j, c + j, depth, width, a_stride, c_stride);
  }
  for (int64_t i = 0; i < rows; ++i) {  // what is left at the edges
    for (int64_t k = 0; k < depth; ++k) {
      for (int64_t j = whole; j < width; ++j) {
        c[i * c_stride + j] += a[i * a_stride + k] * b[k * width + j];
      }
    }
  }
}
