// SPDX-License-Identifier: Apache-2.0
// Single chunks traded between ranks, also of different nodes: what the balance inside nodes cannot reach.
#pragma once

#include "grouping.h"

namespace fm3::planner {

class RankExchange {
 public:
  // Works on `grouping` and `ranks`, which agree: a chunk's node is its rank's.
  RankExchange(const NodeProblem& problem, Grouping& grouping, std::vector<int32_t>& ranks);

  // Trades of the latest rank that make the later of the two ranks earlier by more than they add in transfer.
  void even_out(double goal, int64_t last_step);

  // Trades between nodes that lower their slow rows and delay no rank beyond the latest one.
  void cut_traffic(int64_t last_step);

  double latest_finish() const;
  double estimate_us() const;

 private:
  struct Trade {
    double gain_us;
    int32_t other, mine, theirs;  // other rank; chunks, -1: nothing
  };
  struct Single {  // what the move of one chunk alone adds to the slow rows of both nodes
    int64_t slow_rows;
    int32_t chunk;
  };

  double finish(int32_t rank) const { return double(loads_[rank]) / problem_.speed[rank]; }
  Trade best_trade(int32_t rank);  // gain_us 0: none pays
  void consider(int32_t rank, int32_t other, int32_t mine, int32_t theirs, double before,
                std::vector<Trade>& best) const;
  bool is_lighter(int32_t x, int32_t y) const {
    return problem_.weights[x] != problem_.weights[y] ? problem_.weights[x] < problem_.weights[y]
                                                      : x < y;
  }
  std::vector<int32_t>::iterator place_of(int32_t chunk, std::vector<int32_t>& chunks) const;
  double traffic_us(int32_t node) const;  // that nothing hides
  void apply(int32_t rank, const Trade& trade);
  void give(int32_t chunk, int32_t from, int32_t to);
  std::vector<Single> singles(int32_t from, int32_t to);
  bool cut_between(int32_t node, int32_t other, double limit);

  const NodeProblem& problem_;
  Grouping& grouping_;
  std::vector<int32_t>& ranks_;               // [num_chunks]
  std::vector<std::vector<int32_t>> chunks_;  // [num_ranks] ascending by weight
  std::vector<Load> loads_;                   // [num_ranks]
  std::vector<double> inverse_speed_;         // [num_ranks]
};

}  // namespace fm3::planner
