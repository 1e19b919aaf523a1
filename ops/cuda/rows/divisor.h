// SPDX-License-Identifier: Apache-2.0
// Division by a number that is known before a launch: a multiplication where hardware has no division.
#pragma once

#include <cstdint>

#include "fm3/mask.h"

namespace fm3::sm90 {

// Of n < 2^31 by a divisor in [1, 2^31).
// Claim:      quotient(n) = floor(n / divisor).
// Because:    with 2^shift >= divisor and multiplier + 2^32 = floor(2^32 * 2^shift / divisor) + 1, n times the
//             latter exceeds n * 2^(32 + shift) / divisor by at most n < 2^(32 + shift) / divisor.
// Breaks if:  n reaches 2^31: the sum below would leave 32 bits.
// Tested by:  test/unit/test_row_divisor.py
class Divisor {
 public:
  Divisor() : Divisor(1) {}
  explicit Divisor(uint32_t divisor) : divisor_(divisor) {
    while ((uint64_t{1} << shift_) < divisor) ++shift_;
    multiplier_ = static_cast<uint32_t>((((uint64_t{1} << shift_) - divisor) << 32) / divisor + 1);
  }
  FM3_HOST_DEVICE uint32_t quotient(uint32_t n) const {
    return (static_cast<uint32_t>(uint64_t{n} * multiplier_ >> 32) + n) >> shift_;
  }
  FM3_HOST_DEVICE uint32_t remainder(uint32_t n, uint32_t quotient) const {
    return n - quotient * divisor_;
  }

 private:
  uint32_t divisor_, multiplier_ = 0, shift_ = 0;
};

}  // namespace fm3::sm90
