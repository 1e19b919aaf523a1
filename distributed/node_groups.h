// SPDX-License-Identifier: Apache-2.0
// Which node computes which chunk: even compute, few rows over the slow link.
#pragma once

#include <vector>

#include "balance.h"
#include "needs.h"

namespace fm3::planner {

struct GroupProblem {
  std::vector<Load> weights;     // [num_chunks]
  std::vector<int32_t> slots;    // [num_nodes] chunks a node may hold; sum >= num_chunks
  std::vector<double> speed;     // [num_nodes] sum of its ranks' speeds
  std::vector<int32_t> num_links;  // [num_nodes] slow links of the node (one a rank)
  double us_per_load = 1;        // compute time of one unit of weight at speed 1
  double us_per_row = 0;         // time of one K/V row on one slow link
  int64_t max_steps = 2000000;   // search budget in elementary steps: the same everywhere, unlike a time
};

struct NodeGroups {
  std::vector<int32_t> nodes;  // [num_chunks]
  double estimate_us;          // of the slowest node
};

NodeGroups group_by_node(const GroupProblem& problem, const std::vector<Need>& needs, const ChunkGrid& grid);

}  // namespace fm3::planner
