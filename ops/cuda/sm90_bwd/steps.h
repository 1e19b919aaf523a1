// SPDX-License-Identifier: Apache-2.0
// What the backward decides from a mask, for the device and for the tests on the host.
#pragma once

#include "../schedule/bound_summary.cuh"

namespace fm3::sm90_bwd {

constexpr int kBlockQ = 64;              // rows of a step
constexpr int kHullK = sm90::kHullCols;  // a mask's bounds are padded to a multiple

using sm90::larger, sm90::smaller;

enum class StepClass { kSkip, kPartial, kFull };

// Class of rows [q_begin, q_end), not empty, for keys [k_begin, k_end), not empty, of a tile of block_k with summary
// `keys`, but for block_mask.
// Claim:      a SKIP step holds no visible pair, a FULL step no hidden one and block_k keys.
// Because:    judge calls hidden what every key hides and full what no key hides, for any set of keys.
// Breaks if:  bounds change after they were summarised.
// Tested by:  test/unit/test_sm90_bwd_steps.py (brute force)
template <BoundForm kForm>
FM3_HOST_DEVICE StepClass classify_rows(const MaskView& mask, const sm90::BoundSummary<kForm>& keys,
                                        int32_t k_begin, int32_t k_end, int32_t block_k,
                                        int32_t q_begin, int32_t q_end) {
  const sm90::Verdict verdict =
      sm90::judge<kForm, true>(keys, mask, k_begin, k_end, q_begin, q_end);
  if (!verdict.is_visible) return StepClass::kSkip;
  // Keys behind k_end are the next tile's or read as zeros, and must be hidden by their bounds.
  const bool is_full = verdict.is_full && k_end == k_begin + block_k;
  return is_full ? StepClass::kFull : StepClass::kPartial;
}

// Whether block_mask drops the step of key tile and row tile that begin there: both sides divide 128.
FM3_HOST_DEVICE bool is_dropped(const MaskView& mask, int32_t mask_idx, int32_t k_begin,
                                int32_t q_begin) {
  if (mask.block_mask == nullptr) return false;
  const int64_t rows = (mask.s_q + kBlockMaskTile - 1) / kBlockMaskTile;
  const int64_t columns = (mask.s_k + kBlockMaskTile - 1) / kBlockMaskTile;
  return mask.block_mask[(mask_idx * rows + q_begin / kBlockMaskTile) * columns +
                         k_begin / kBlockMaskTile] == 0;
}

// Rows hidden from a key, as the kernel reads them: [x, y) and [z, w). What ends with the last row ends with its tile.
struct alignas(16) KeyRows {
  int32_t x, y, z, w;
};

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

// 1 << (how many of the eight rows first + 0, 8, 16 ... 56 come before `limit`).
FM3_HOST_DEVICE uint32_t bit_of_limit(int32_t limit, int32_t first) {
  return 1u << smaller(larger((limit - first + 7) >> 3, 0), 8);
}

// Which of a key's scores with rows q_first + 8 j + e, j in [0, 8), e in {0, 1}, its bounds hide: bit 8 e + j.
FM3_HOST_DEVICE uint32_t hidden_scores(const TwoIntervals& rows, int32_t q_first) {
  uint32_t hidden = 0;
  for (int32_t e = 0; e < 2; ++e) {
    const int32_t first = q_first + e;
    const uint32_t lt = bit_of_limit(rows.lt_end, first) - bit_of_limit(rows.lt_begin, first);
    const uint32_t ut = bit_of_limit(rows.ut_end, first) - bit_of_limit(rows.ut_begin, first);
    hidden |= (lt | ut) << 8 * e;
  }
  return hidden;
}

}  // namespace fm3::sm90_bwd
