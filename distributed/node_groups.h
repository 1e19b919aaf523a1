// SPDX-License-Identifier: Apache-2.0
// Which rank computes which chunk when ranks share nodes: even compute, few rows over the slow link.
#pragma once

#include "grouping.h"

namespace fm3::planner {

// Chunks to nodes, then to the ranks of each node, then exchanges of single chunks between any two ranks.
// max_steps bounds the work on traffic; `options` is for the balance inside nodes.
Balance balance_by_node(const NodeProblem& problem, const std::vector<Need>& needs,
                        const ChunkGrid& grid, const BalanceOptions& options, int64_t max_steps);

}  // namespace fm3::planner
