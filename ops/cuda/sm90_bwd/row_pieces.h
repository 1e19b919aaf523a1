// SPDX-License-Identifier: Apache-2.0
// lse and delta of a query row as operands of a product, for d <= 128 and 192/128: S and dP are accumulators of 64 keys by
// 64 rows, so what is taken from every number of a row is a product of a column of ones and a row of numbers.
// A thread then loads none of them: 32 numbers a step, their latency, and 190 wavefronts of shared memory.
// Plain C++: the tests run it on the host.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "fm3/mask.h"

namespace fm3::sm90_bwd {

constexpr float kLog2E = 1.4426950408889634f;

// Three bfloat16 whose sum is a float, and a mark. 16 bytes, an operand's row of 8 columns.
struct alignas(16) RowPieces {
  uint32_t first_two;  // the first in the low half
  uint32_t
      third_and_mark;  // the mark in the high half: not 0 if the row sees no key or lies past s_q
  uint32_t unused[2];  // zeros
};

// Claim:      the pieces add up to x exactly; if x is not finite, they add up to NaN.
// Because:    24 significant bits are cut into 8, 8 and 8, and bfloat16 has float's exponents.
// Breaks if:  x is below 2^-110: the last piece then loses bits.
// Tested by:  test/unit/test_sm90_bwd_rows.py
FM3_HOST_DEVICE RowPieces pieces_of(float x, bool is_marked) {
  uint32_t high[3];
  for (int idx = 0; idx < 3; ++idx) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    bits &= 0xFFFF0000;
    high[idx] = bits;
    float piece;
    memcpy(&piece, &bits, 4);
    x -= piece;
  }
  return {high[0] >> 16 | high[1], high[2] >> 16 | (is_marked ? 0x10000u : 0u), {0, 0}};
}

// What exponents are multiplied by, log2 throughout: P = exp2((Q K^T + score_start) exponent_scale). lse is divided
// by it, so it is 2^-110 at least (of softmax_scale's sign), which a Q K^T below 2^80 in size does not tell from 0.
FM3_HOST_DEVICE float exponent_scale(float softmax_scale) {
  return copysignf(fmaxf(fabsf(softmax_scale * kLog2E), 0x1p-110f), softmax_scale);
}

// Where a row's scores begin, so that lse has been taken from them when Q K^T is added. A row that is no row, or not the
// tile's, has P = exp2(-16384) = 0 or less, whatever finite Q K^T is; finite, because a product of 0 and infinity is NaN.
FM3_HOST_DEVICE float score_start(float lse_log2, bool is_hidden, float softmax_scale) {
  const float scale = exponent_scale(softmax_scale);
  return is_hidden ? copysignf(0x1p124f, -scale) : -lse_log2 / scale;
}

}  // namespace fm3::sm90_bwd
