// SPDX-License-Identifier: Apache-2.0
// The inner parts of the CPU kernels as plain functions, compiled once a SIMD target.
#pragma once

#include <cstdint>

struct KernelParts {
  const char* name;
  bool (*is_supported)();
  int lanes;
  void (*exp2_nonpositive)(const float* x, int count, float* y);  // count: a multiple of lanes
  uint16_t (*f32_to_bf16)(float x);
  float (*bf16_to_f32)(uint16_t x);
  uint16_t (*f32_to_f16)(float x);
  float (*f16_to_f32)(uint16_t x);
  // c[rows, cols] = a[rows, depth] * b[depth, cols] through packing and gemm; row-major arrays.
  void (*gemm_row_major)(int rows, int cols, int depth, const float* a, const float* b, float* c);
  void (*gemm_k_major)(int rows, int cols, int depth, const float* a, const float* b, float* c);
};

extern const KernelParts kBaselineParts;
#if defined(__x86_64__)
extern const KernelParts kAvx2Parts, kAvx512Parts;
#endif
