// SPDX-License-Identifier: Apache-2.0
// Kernels for x86-64 with avx512f,avx512bw,avx512dq,avx512vl,avx2,fma.
#include "ops/cpu/kernel_headers.h"

#if defined(__x86_64__)
// NOTE: every header that defines a function is included above this line. A function shared with
// other files must not be compiled for this target: the linker keeps one copy of it for all.
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")
#define FM3_TARGET avx512
#define FM3_TABLE kAvx512Kernels
#define FM3_VECTOR_BYTES 64
#define FM3_IS_SUPPORTED                                                       \
  (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&  \
   __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && \
   __builtin_cpu_supports("fma"))
#include "ops/cpu/kernel-inl.h"
#pragma GCC pop_options
#endif
