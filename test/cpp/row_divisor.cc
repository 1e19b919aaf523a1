// SPDX-License-Identifier: Apache-2.0
// Division in the row kernels, for test/unit/test_row_divisor.py.
#include "ops/cuda/rows/divisor.h"

extern "C" void divide(uint32_t divisor, int32_t count, const uint32_t* n, uint32_t* quotients,
                       uint32_t* remainders) {
  const fm3::sm90::Divisor by(divisor);
  for (int32_t idx = 0; idx < count; ++idx) {
    quotients[idx] = by.quotient(n[idx]);
    remainders[idx] = by.remainder(n[idx], quotients[idx]);
  }
}
