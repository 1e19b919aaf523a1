// SPDX-License-Identifier: Apache-2.0
// Which chunks of query rows see which key rows, as rectangles, at single-row granularity.
#pragma once

#include <vector>

#include "tile_scan.h"

namespace fm3::planner {

// Every key row of [k_begin, k_end) is seen by some row of each chunk of [chunk_begin, chunk_end).
struct Need {
  int32_t chunk_begin, chunk_end;
  int32_t k_begin, k_end;  // never crosses a key tile's plane; may cross key chunks
};

// Exact: a (chunk, key) pair lies in some rectangle iff one row of the chunk sees the key in some plane.
// Ascending by k_end within a plane.
std::vector<Need> find_needs(const MaskColumns& mask, const TileScan& scan, const ChunkGrid& grid);

struct RankNeeds {
  std::vector<int32_t> begins;  // [num_ranks + 1] into runs
  std::vector<Run> runs;        // key rows, ascending and disjoint within a rank; own rows included
};

// Key rows that each rank's chunks see. Holes shorter than `coalesce_rows` are filled: sending them along
// is cheaper than one more range (1 keeps every hole). Runs are widened to multiples of `align_rows`.
RankNeeds needs_of_ranks(const std::vector<Need>& needs, const std::vector<int32_t>& chunk_ranks,
                         int32_t num_ranks, int32_t num_planes, int32_t coalesce_rows,
                         int32_t align_rows, int32_t s_k);

// Key rows that each rank needs from other ranks of its node, and that each node needs from other nodes (each
// row once). Sizes num_ranks and num_nodes.
struct ForeignRows {
  std::vector<int64_t> fast_of_rank, slow_of_rank, slow_of_node;
};
ForeignRows count_foreign_rows(const RankNeeds& needs, const ChunkGrid& grid,
                               const std::vector<int32_t>& chunk_ranks,
                               const std::vector<int32_t>& node_of_rank);

}  // namespace fm3::planner
