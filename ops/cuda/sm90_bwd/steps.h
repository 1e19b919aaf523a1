// SPDX-License-Identifier: Apache-2.0
// What the backward decides from a mask, for the device and for the tests on the host.
#pragma once

#include "../schedule/device_schedule.cuh"

namespace fm3::sm90_bwd {

constexpr int kBlockQ = 64;              // rows of a step
constexpr int kHullK = sm90::kHullCols;  // keys of one hull (a 64-key tile uses half of one)

using sm90::larger, sm90::smaller;

enum class StepClass { kSkip, kPartial, kFull };

// Class of row tile `q_tile_idx` for keys [k_begin, k_begin + block_k) of mask `mask_idx` in
// [0, b * h_mask); hulls [b * h_mask, num_hulls].
// Claim:      a SKIP step holds no visible pair, a FULL step no hidden one and no key past s_k.
// Because:    block_mask drops whole steps (both sides divide 128), and the hull's classes hold for
//             any part of its columns, the causal rule being taken from the part itself.
// Breaks if:  a side stops dividing 128, or bounds change after the hulls were built.
// Tested by:  test/unit/test_sm90_bwd_steps.py (brute force)
FM3_HOST_DEVICE StepClass classify_step(const MaskView& mask, const sm90::ColumnHull* hulls,
                                        int32_t num_hulls, int32_t mask_idx, int32_t k_begin,
                                        int32_t block_k, int32_t q_tile_idx) {
  const int32_t q_begin = q_tile_idx * kBlockQ;
  if (q_begin >= mask.s_q) return StepClass::kSkip;
  const int32_t q_end = smaller(q_begin + kBlockQ, mask.s_q);
  const int32_t k_end = smaller(k_begin + block_k, mask.s_k);
  if (mask.block_mask != nullptr) {
    const int64_t rows = (mask.s_q + kBlockMaskTile - 1) / kBlockMaskTile;
    const int64_t columns = (mask.s_k + kBlockMaskTile - 1) / kBlockMaskTile;
    const int64_t entry =
        (mask_idx * rows + q_begin / kBlockMaskTile) * columns + k_begin / kBlockMaskTile;
#ifdef __CUDA_ARCH__
    if (__ldg(mask.block_mask + entry) == 0) return StepClass::kSkip;
#else
    if (mask.block_mask[entry] == 0) return StepClass::kSkip;
#endif
  }
  const sm90::ColumnHull& hull =
      hulls[static_cast<int64_t>(mask_idx) * num_hulls + k_begin / kHullK];
  const sm90::HullClass hull_class = sm90::classify(hull, mask, k_begin, k_end, q_begin, q_end);
  if (hull_class == sm90::HullClass::kSkip) return StepClass::kSkip;
  // Keys past s_k read as zeros, so they score 0 and must be hidden by their bounds.
  if (k_end < k_begin + block_k) return StepClass::kPartial;
  return hull_class == sm90::HullClass::kFull ? StepClass::kFull : StepClass::kPartial;
}

// Rows hidden from a key as two intervals, an empty one as [s_q, s_q) and [0, 0). The causal rule takes
// the upper interval's place, or joins it where that starts at row 0: the forms that have a causal rule
// have no other upper interval (the dispatch checks it).
struct TwoIntervals {
  int32_t lt_begin, lt_end, ut_begin, ut_end;
};
FM3_HOST_DEVICE TwoIntervals fold_causal(const sm90::HiddenRows& rows, bool is_causal,
                                         int32_t s_q) {
  const bool has_lt = rows.lt.begin < rows.lt.end;
  const bool has_ut = rows.ut.begin < rows.ut.end;
  return {has_lt ? rows.lt.begin : s_q, has_lt ? rows.lt.end : s_q,
          is_causal || !has_ut ? 0 : rows.ut.begin,
          larger(has_ut ? rows.ut.end : 0, rows.causal.end)};
}

// Whether all that a key shows is one interval, [ut_end, lt_begin): one comparison a pair.
FM3_HOST_DEVICE bool shows_one_interval(int32_t lt_end, int32_t ut_begin, int32_t s_q) {
  return lt_end >= s_q && ut_begin <= 0;
}

}  // namespace fm3::sm90_bwd
