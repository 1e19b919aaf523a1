// SPDX-License-Identifier: Apache-2.0
#include "ops/cpu/kernel_headers.h"
#include "test/cpp/parts.h"

#define FM3_TARGET baseline
#define FM3_PARTS kBaselineParts
#define FM3_VECTOR_BYTES 16
#define FM3_IS_SUPPORTED true
#include "test/cpp/parts-inl.h"
