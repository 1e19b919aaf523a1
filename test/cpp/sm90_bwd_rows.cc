// SPDX-License-Identifier: Apache-2.0
// What the Hopper backward makes of a row's lse and delta, and of a key's bounds, on the host: for
// test/unit/test_sm90_bwd_rows.py.
#include "ops/cuda/sm90_bwd/row_pieces.h"
#include "ops/cuda/sm90_bwd/steps.h"

using namespace fm3;

extern "C" {

// Four words of each of `count` numbers.
void pieces(const float* x, int32_t count, int32_t is_marked, uint32_t* words) {
  for (int32_t idx = 0; idx < count; ++idx) {
    const sm90_bwd::RowPieces made = sm90_bwd::pieces_of(x[idx], is_marked != 0);
    memcpy(words + 4 * idx, &made, sizeof(made));
  }
}

float exponent_scale(float softmax_scale) { return sm90_bwd::exponent_scale(softmax_scale); }

float score_start(float lse_log2, int32_t is_hidden, float softmax_scale) {
  return sm90_bwd::score_start(lse_log2, is_hidden != 0, softmax_scale);
}

uint32_t hidden_scores(const int32_t* bounds, int32_t q_first) {
  return sm90_bwd::hidden_scores({bounds[0], bounds[1], bounds[2], bounds[3]}, q_first);
}

}  // extern "C"
