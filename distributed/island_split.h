// SPDX-License-Identifier: Apache-2.0
// Which node gets which islands (chunks that see the same rows, such as those of one document): few islands cut.
#pragma once

#include "grouping.h"

namespace fm3::planner {

// Halves the nodes, and each half again, each time choosing how many chunks of every island go to either side.
// Node of each chunk; empty if the islands see too much of each other for this to pay.
std::vector<int32_t> split_islands(const NodeProblem& problem, const std::vector<Node>& nodes,
                                   const std::vector<int32_t>& chunks_per_node,
                                   const Segments& segments,
                                   const std::vector<std::vector<int32_t>>& islands, uint64_t seed);

}  // namespace fm3::planner
