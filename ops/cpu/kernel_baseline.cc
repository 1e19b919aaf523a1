// SPDX-License-Identifier: Apache-2.0
// Kernels for any machine of this architecture (SSE2 on x86-64, NEON on arm64).
#include "ops/cpu/kernel_headers.h"

#define FM3_TARGET baseline
#define FM3_TABLE kBaselineKernels
#define FM3_VECTOR_BYTES 16
#define FM3_IS_SUPPORTED true
#include "ops/cpu/kernel-inl.h"
