// SPDX-License-Identifier: Apache-2.0
// Who sends which key rows to whom and when; and the way back of their gradients.
#pragma once

#include <vector>

#include "needs.h"

namespace fm3::planner {

// A rank's key buffer: its own rows in local order, then the rows it receives, stage by stage.
// `src_row` and `dst_row` index the buffers of the two ranks.
struct Transfer {
  int32_t stage;  // gather: arrives in this stage (>= 1). reduce: may leave after this compute step
  int32_t hop;    // transfers of hop 1 carry what hop 0 of the same stage brought
  int32_t src_rank, dst_rank;
  int32_t k_begin, num_rows;  // global rows [k_begin, k_begin + num_rows)
  int32_t src_row, dst_row;
};

struct KeyRange {
  int32_t k_begin, num_rows;
};

struct Route {
  std::vector<int32_t> range_begins;  // [num_ranks + 1] into ranges
  std::vector<KeyRange> ranges;       // the rank's buffer in order
  std::vector<int32_t>
      stage_rows;  // [num_ranks, num_stages + 2]: buffer rows where stages 0.. begin, and the end
  std::vector<Transfer> gather, reduce;
};

struct RouteProblem {
  const ChunkGrid* grid;
  std::vector<int32_t> chunk_ranks;   // [num_chunks]
  std::vector<int32_t> node_of_rank;  // [num_ranks]
  bool is_hierarchical;  // each needed row crosses to a node once and spreads inside it
  int32_t num_stages;    // >= 1
  bool has_single_step;  // compute waits for everything: all gradients leave after step 0
  int32_t
      piece_rows;  // a row range shared by several ranks of a node is fetched in pieces of this many

  int32_t num_ranks() const { return int32_t(node_of_rank.size()); }
};

// The transfers that `needs` asks for and no other.
Route route_needs(const RouteProblem& problem, const RankNeeds& needs);

// Every rank's rows travel around the ring, one neighbour a stage; num_stages is num_ranks - 1.
Route route_ring(const RouteProblem& problem);

}  // namespace fm3::planner
