// SPDX-License-Identifier: Apache-2.0
#include "ops/cpu/kernel_headers.h"
#include "test/cpp/parts.h"

#if defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")
#define FM3_TARGET avx512
#define FM3_PARTS kAvx512Parts
#define FM3_VECTOR_BYTES 64
#define FM3_IS_SUPPORTED (__builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
#include "test/cpp/parts-inl.h"
#pragma GCC pop_options
#endif
