// SPDX-License-Identifier: Apache-2.0
#include "block_balance.h"

#include <algorithm>

namespace fm3::planner {
namespace {

constexpr double kBlockGap =
    0.01;  // swaps even out what is left; finer splits of blocks cost more time than those

class Swaps {
 public:
  Swaps(const BalanceProblem& problem, Balance& balance)
      : problem_(problem),
        balance_(balance),
        chunks_(problem.num_ranks()),
        loads_(problem.num_ranks()) {
    for (int32_t chunk = 0; chunk < problem.num_chunks(); ++chunk) {
      chunks_[balance.ranks[chunk]].push_back(chunk);
      loads_[balance.ranks[chunk]] += problem.weights[chunk];
    }
    for (int32_t rank = 0; rank < problem.num_ranks(); ++rank) sort(rank);
  }

  // Swaps two chunks of the latest rank and another while that makes the later of the two earlier.
  void run(double goal) {
    while (true) {
      int32_t latest = 0;
      for (int32_t rank = 1; rank < problem_.num_ranks(); ++rank) {
        if (finish(rank) > finish(latest)) latest = rank;
      }
      balance_.finish = finish(latest);
      if (balance_.finish <= goal || !swap_best(latest, goal)) return;
    }
  }

 private:
  double finish(int32_t rank) const { return double(loads_[rank]) / problem_.speed[rank]; }

  void sort(int32_t rank) {
    std::sort(chunks_[rank].begin(), chunks_[rank].end(), [&](int32_t x, int32_t y) {
      return problem_.weights[x] != problem_.weights[y] ? problem_.weights[x] < problem_.weights[y]
                                                        : x < y;
    });
  }

  bool swap_best(int32_t latest, double goal) {
    double best = finish(latest);
    size_t best_mine = 0, best_theirs = 0;
    int32_t best_rank = -1;
    for (int32_t rank = 0; rank < problem_.num_ranks(); ++rank) {
      // No swap gets the later of the two below their common mean.
      const double mean =
          double(loads_[latest] + loads_[rank]) / (problem_.speed[latest] + problem_.speed[rank]);
      if (rank == latest || mean >= best) continue;
      // The later finish falls with the load moved up to `ideal`, then grows: the nearest two chunks count.
      const double ideal =
          (finish(latest) - finish(rank)) / (1 / problem_.speed[latest] + 1 / problem_.speed[rank]);
      const std::vector<int32_t>& others = chunks_[rank];
      size_t at = 0;
      for (size_t mine = 0; mine < chunks_[latest].size(); ++mine) {
        const Load weight = problem_.weights[chunks_[latest][mine]];
        while (at < others.size() && double(problem_.weights[others[at]]) < double(weight) - ideal)
          ++at;
        for (size_t theirs = at == 0 ? 0 : at - 1; theirs < std::min(at + 1, others.size());
             ++theirs) {
          const Load moved = weight - problem_.weights[others[theirs]];
          const double later = std::max(double(loads_[latest] - moved) / problem_.speed[latest],
                                        double(loads_[rank] + moved) / problem_.speed[rank]);
          if (moved <= 0 || later >= best) continue;
          best = later;
          best_rank = rank;
          best_mine = mine;
          best_theirs = theirs;
        }
      }
      if (best <= goal) break;
    }
    if (best_rank < 0) return false;
    int32_t& mine = chunks_[latest][best_mine];
    int32_t& theirs = chunks_[best_rank][best_theirs];
    const Load moved = problem_.weights[mine] - problem_.weights[theirs];
    loads_[latest] -= moved;
    loads_[best_rank] += moved;
    std::swap(balance_.ranks[mine], balance_.ranks[theirs]);
    std::swap(mine, theirs);
    sort(latest);
    sort(best_rank);
    return true;
  }

  const BalanceProblem& problem_;
  Balance& balance_;
  std::vector<std::vector<int32_t>> chunks_;  // [num_ranks] ascending by weight
  std::vector<Load> loads_;                   // [num_ranks]
};

}  // namespace

Balance balance_in_blocks(const BalanceProblem& problem, int32_t block,
                          const BalanceOptions& options) {
  BalanceProblem coarse{{}, {}, problem.speed};
  const int32_t num_chunks = problem.num_chunks();
  int32_t num_slots = 0;
  for (int32_t capacity : problem.capacity) {
    if (capacity % block != 0) return balance(problem, options);
    coarse.capacity.push_back(capacity / block);
    num_slots += capacity / block;
  }
  if (block == 1 || num_slots * block < (num_chunks + block - 1) / block * block)
    return balance(problem, options);
  for (int32_t chunk = 0; chunk < num_chunks; ++chunk) {
    if (chunk % block == 0) coarse.weights.push_back(0);
    coarse.weights.back() += problem.weights[chunk];
  }
  BalanceOptions block_options = options;
  block_options.target_gap = std::max(options.target_gap, kBlockGap);
  const Balance of_blocks = balance(coarse, block_options);
  Balance result{{}, of_blocks.finish, lower_bound(problem)};
  for (int32_t chunk = 0; chunk < num_chunks; ++chunk)
    result.ranks.push_back(of_blocks.ranks[chunk / block]);
  Swaps(problem, result).run(result.lower_bound * (1 + options.target_gap));
  return result;
}

}  // namespace fm3::planner
