// SPDX-License-Identifier: Apache-2.0
// One pass over a mask: what each tile of 128 key columns leaves visible. Workload and routing read it.
#pragma once

#include <vector>

#include "mask_columns.h"

namespace fm3::planner {

// Per key tile and plane: rows that some column sees, and rows that every column sees.
// A row tile is SKIP iff it meets no visible run, FULL iff it lies inside one clear run.
struct TileScan {
  int32_t num_planes, num_k_tiles;
  std::vector<int32_t> visible_begins, clear_begins;  // [num_planes * num_k_tiles + 1] into runs
  std::vector<Run> visible, clear;                    // sorted and disjoint within one tile

  int64_t num_tiles() const { return int64_t(num_planes) * num_k_tiles; }
};

TileScan scan_tiles(const MaskColumns& mask);

// Keeps the parts of `runs` whose block_mask entry is 1, for one key tile of one plane.
void apply_block_mask(const MaskColumns& mask, int32_t plane, int32_t k_tile,
                      std::vector<Run>& runs);

}  // namespace fm3::planner
