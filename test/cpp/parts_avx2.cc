// SPDX-License-Identifier: Apache-2.0
#include "ops/cpu/kernel_headers.h"
#include "test/cpp/parts.h"

#if defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#define FM3_TARGET avx2
#define FM3_PARTS kAvx2Parts
#define FM3_VECTOR_BYTES 32
#define FM3_IS_SUPPORTED (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
#include "test/cpp/parts-inl.h"
#pragma GCC pop_options
#endif
