// SPDX-License-Identifier: Apache-2.0
// BlockSchedule: which tiles of the score matrix must be visited, and how, from O(s_k) numbers.
#pragma once

#include <cstdint>

#include "fm3/mask.h"

namespace fm3 {

enum class TileClass : int32_t {
  kSkip = 0,     // every (q, k) of the tile is hidden: never loaded
  kPartial = 1,  // some are hidden: computed with the mask
  kFull = 2,     // none is hidden: computed without mask code or bound loads
};

struct RowRun {
  int32_t begin, end;  // half-open rows; empty iff begin >= end
};

// What one key tile (block_k columns of one batch entry and mask head) says about rows.
// `hidden_runs`: disjoint, ascending, maximal runs of rows that every column of the tile hides
// (causal rule included). `clear_runs`: likewise, rows that no column hides.
// A row tile is SKIP iff it lies inside one hidden run, FULL iff inside one clear run.
// If a tile has more runs than fit, the longest are kept: a dropped run only turns SKIP or FULL
// into PARTIAL, which is slower and still exact. block_mask is applied on top, per tile.
constexpr int32_t kMaxRuns = 4;
struct KeyTileSummary {
  RowRun hidden_runs[kMaxRuns];
  RowRun clear_runs[kMaxRuns];
};

FM3_HOST_DEVICE TileClass classify(const KeyTileSummary& tile, int32_t q_begin, int32_t q_end) {
  for (int run_idx = 0; run_idx < kMaxRuns; ++run_idx) {
    const RowRun& run = tile.hidden_runs[run_idx];
    if (run.begin <= q_begin && q_end <= run.end) return TileClass::kSkip;
  }
  for (int run_idx = 0; run_idx < kMaxRuns; ++run_idx) {
    const RowRun& run = tile.clear_runs[run_idx];
    if (run.begin <= q_begin && q_end <= run.end) return TileClass::kFull;
  }
  return TileClass::kPartial;
}

}  // namespace fm3
