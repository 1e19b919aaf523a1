// SPDX-License-Identifier: Apache-2.0
// A mask rewritten for the rows one rank owns, over any selection of key columns (Theorem 1).
#pragma once

#include <string>
#include <vector>

#include "mask_columns.h"
#include "route.h"

namespace fm3::planner {

struct LocalBounds {
  int32_t *lt_begin, *lt_end, *ut_begin, *ut_end;  // [num_planes, num_keys], written
};

// Writes the local bounds of the columns in `keys`, in that order. The causal rule becomes part of the
// second interval. Returns "" or why a column cannot be written with two intervals.
std::string localize(const MaskColumns& mask, const ChunkGrid& grid,
                     const std::vector<int32_t>& chunk_ranks, int32_t rank,
                     const std::vector<KeyRange>& keys, const LocalBounds& out);

}  // namespace fm3::planner
