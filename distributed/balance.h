// SPDX-License-Identifier: Apache-2.0
// Which rank computes which chunk: the latest rank's finish as early as possible, with a certified gap.
#pragma once

#include <cstdint>
#include <vector>

#include "pair_split.h"

namespace fm3::planner {

struct BalanceProblem {
  std::vector<Load> weights;      // [num_chunks] > = 0
  std::vector<int32_t> capacity;  // [num_ranks] chunks at most; sum >= num_chunks
  std::vector<double> speed;      // [num_ranks] > 0; 1 = nominal

  int32_t num_chunks() const { return int32_t(weights.size()); }
  int32_t num_ranks() const { return int32_t(capacity.size()); }
};

struct BalanceOptions {
  double target_gap = 0;        // stop once finish <= (1 + target_gap) * lower bound
  int64_t max_triples = 20000;  // triples of ranks tried in all
  int32_t max_kicks = 0;        // restarts from a disturbed best assignment
};

struct Balance {
  std::vector<int32_t> ranks;  // [num_chunks]
  double finish;               // max over ranks of load / speed
  double lower_bound;          // no assignment finishes earlier
};

// No assignment of the problem finishes before this.
double lower_bound(const BalanceProblem& problem);

// Longest processing time first: heaviest chunk to the rank that would finish it earliest.
std::vector<int32_t> balance_lpt(const BalanceProblem& problem);

// LPT, then lexicographic descent over exact pairs and triples of ranks, then kicks.
Balance balance(const BalanceProblem& problem, const BalanceOptions& options);

// The paper's IPO on equal speeds and exactly num_chunks / num_ranks chunks a rank.
struct PaperBalance {
  std::vector<int32_t> ranks;
  Load max_load;
  int32_t p3_successes;  // times that phase 3 improved on phase 2
};
// last_phase: 1 = LPT, 2 = and pair refinement, 3 = and triple refinement.
PaperBalance balance_paper(const std::vector<Load>& weights, int32_t num_ranks, int32_t last_phase);

}  // namespace fm3::planner
