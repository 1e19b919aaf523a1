// SPDX-License-Identifier: Apache-2.0
#include "rank_exchange.h"

#include <algorithm>
#include <numeric>

namespace fm3::planner {
namespace {

constexpr size_t kTradesVerified = 16;   // trades whose traffic is computed exactly
constexpr int64_t kWorthwhileRows = 64;  // less saved traffic is not worth a trade

}  // namespace

RankExchange::RankExchange(const NodeProblem& problem, Grouping& grouping,
                           std::vector<int32_t>& ranks)
    : problem_(problem),
      grouping_(grouping),
      ranks_(ranks),
      chunks_(problem.num_ranks()),
      loads_(problem.num_ranks()) {
  for (double speed : problem.speed) inverse_speed_.push_back(1 / speed);
  for (int32_t chunk = 0; chunk < problem.num_chunks(); ++chunk) {
    chunks_[ranks[chunk]].push_back(chunk);
    loads_[ranks[chunk]] += problem.weights[chunk];
  }
  for (auto& chunks : chunks_) {
    std::sort(chunks.begin(), chunks.end(), [&](int32_t x, int32_t y) { return is_lighter(x, y); });
  }
}

double RankExchange::latest_finish() const {
  double latest = 0;
  for (int32_t rank = 0; rank < problem_.num_ranks(); ++rank)
    latest = std::max(latest, finish(rank));
  return latest;
}

double RankExchange::estimate_us() const {
  double unhidden_us = 0;
  for (int32_t node = 0; node < grouping_.num_nodes(); ++node)
    unhidden_us = std::max(unhidden_us, traffic_us(node));
  return latest_finish() * problem_.us_per_load + unhidden_us;
}

void RankExchange::even_out(double goal, int64_t last_step) {
  // A trade helps its two ranks; only several may help the latest of all, at the price of each one's traffic. So
  // trades go on, and what did not pay in the end is taken back.
  double best_us = estimate_us();
  size_t num_kept = 0;
  std::vector<std::pair<int32_t, Trade>> trades;
  while (grouping_.steps() < last_step) {
    int32_t latest = 0;
    for (int32_t rank = 1; rank < problem_.num_ranks(); ++rank) {
      if (finish(rank) > finish(latest)) latest = rank;
    }
    if (finish(latest) <= goal) break;
    const Trade trade = best_trade(latest);
    if (trade.gain_us <= 0) break;
    apply(latest, trade);
    trades.emplace_back(latest, trade);
    const double us = estimate_us();
    if (us < best_us) {
      best_us = us;
      num_kept = trades.size();
    }
  }
  for (; trades.size() > num_kept; trades.pop_back()) {
    const auto& [rank, trade] = trades.back();
    apply(rank, {0, trade.other, trade.theirs, trade.mine});
  }
}

RankExchange::Trade RankExchange::best_trade(int32_t rank) {
  std::vector<Trade> best;
  const double before = finish(rank);
  for (int32_t other = 0; other < problem_.num_ranks(); ++other) {
    if (other == rank || finish(other) >= before) continue;
    // No trade gets the later of the two below their common mean.
    const double together =
        double(loads_[rank] + loads_[other]) / (problem_.speed[rank] + problem_.speed[other]);
    if (best.size() == kTradesVerified &&
        (before - together) * problem_.us_per_load <= best.back().gain_us)
      continue;
    const bool has_room = int32_t(chunks_[other].size()) < problem_.capacity[other];
    // The gain grows with the load moved up to `ideal`, then falls: of their chunks, the nearest on either side count.
    const double ideal = (before - finish(other)) / (inverse_speed_[rank] + inverse_speed_[other]);
    const std::vector<int32_t>& theirs = chunks_[other];
    size_t at = 0;
    for (int32_t mine : chunks_[rank]) {
      if (has_room) consider(rank, other, mine, -1, before, best);
      const double wanted = double(problem_.weights[mine]) - ideal;
      while (at < theirs.size() && double(problem_.weights[theirs[at]]) < wanted) ++at;
      if (at > 0) consider(rank, other, mine, theirs[at - 1], before, best);
      if (at < theirs.size()) consider(rank, other, mine, theirs[at], before, best);
    }
  }
  Trade chosen{0, rank, -1, -1};
  for (const Trade& trade : best) {
    if (trade.gain_us <= chosen.gain_us) break;
    const int32_t node = problem_.node_of_rank[rank], other = problem_.node_of_rank[trade.other];
    const double before_us = traffic_us(node) + traffic_us(other);
    apply(rank, trade);
    const double net_us = trade.gain_us - (traffic_us(node) + traffic_us(other) - before_us);
    apply(rank, {0, trade.other, trade.theirs, trade.mine});
    if (net_us > chosen.gain_us) chosen = {net_us, trade.other, trade.mine, trade.theirs};
  }
  return chosen;
}

void RankExchange::consider(int32_t rank, int32_t other, int32_t mine, int32_t theirs,
                            double before, std::vector<Trade>& best) const {
  const Load moved = problem_.weights[mine] - (theirs < 0 ? 0 : problem_.weights[theirs]);
  if (moved <= 0) return;
  const double after = std::max(double(loads_[rank] - moved) * inverse_speed_[rank],
                                double(loads_[other] + moved) * inverse_speed_[other]);
  if (after >= before) return;
  const Trade trade{(before - after) * problem_.us_per_load, other, mine, theirs};
  const auto is_better = [](const Trade& x, const Trade& y) { return x.gain_us > y.gain_us; };
  if (best.size() == kTradesVerified && !is_better(trade, best.back())) return;
  const auto place = std::upper_bound(best.begin(), best.end(), trade, is_better);
  // Chunks of one document weigh the same: one trade of them speaks for all.
  if (place != best.begin() && place[-1].gain_us == trade.gain_us && place[-1].other == other)
    return;
  const auto at = place - best.begin();
  if (best.size() == kTradesVerified) best.pop_back();
  best.insert(best.begin() + at, trade);
}

double RankExchange::traffic_us(int32_t node) const {
  return kUnhiddenShare * grouping_.transfer_us(node) +
         grouping_.crowding_us(node, grouping_.slow_rows(node));
}

void RankExchange::apply(int32_t rank, const Trade& trade) {
  if (trade.mine >= 0) give(trade.mine, rank, trade.other);
  if (trade.theirs >= 0) give(trade.theirs, trade.other, rank);
}

// Where the chunk is, or belongs, in a list ascending by weight.
std::vector<int32_t>::iterator RankExchange::place_of(int32_t chunk,
                                                      std::vector<int32_t>& chunks) const {
  return std::lower_bound(chunks.begin(), chunks.end(), chunk,
                          [&](int32_t x, int32_t y) { return is_lighter(x, y); });
}

void RankExchange::give(int32_t chunk, int32_t from, int32_t to) {
  chunks_[from].erase(place_of(chunk, chunks_[from]));
  chunks_[to].insert(place_of(chunk, chunks_[to]), chunk);
  loads_[from] -= problem_.weights[chunk];
  loads_[to] += problem_.weights[chunk];
  ranks_[chunk] = to;
  if (problem_.node_of_rank[from] != problem_.node_of_rank[to])
    grouping_.move(chunk, problem_.node_of_rank[to]);
}

void RankExchange::cut_traffic(int64_t last_step) {
  const double limit = latest_finish();
  std::vector<int32_t> order(grouping_.num_nodes());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t x, int32_t y) {
    return grouping_.slow_rows(x) > grouping_.slow_rows(y);
  });
  for (size_t i = 0; i < order.size(); ++i) {
    for (size_t j = i + 1; j < order.size(); ++j) {
      do {
        if (grouping_.steps() >= last_step) return;
      } while (cut_between(order[i], order[j], limit));
    }
  }
}

std::vector<RankExchange::Single> RankExchange::singles(int32_t from, int32_t to) {
  std::vector<Single> list;
  for (int32_t chunk = 0; chunk < problem_.num_chunks(); ++chunk) {
    if (grouping_.node_of(chunk) != from) continue;
    const Grouping::MoveCost cost = grouping_.cost_of_move(chunk, to);
    list.push_back({cost.from + cost.to, chunk});
  }
  std::sort(list.begin(), list.end(), [](const Single& x, const Single& y) {
    return x.slow_rows != y.slow_rows ? x.slow_rows < y.slow_rows : x.chunk < y.chunk;
  });
  return list;
}

// One swap between two nodes. Pairs are tried by the sum of their single moves, which is right up to what the
// two chunks need of each other; the sum of slow rows decides.
bool RankExchange::cut_between(int32_t node, int32_t other, double limit) {
  const std::vector<Single> mine = singles(node, other), theirs = singles(other, node);
  const int64_t before = grouping_.slow_rows(node) + grouping_.slow_rows(other);
  size_t num_tried = 0;
  for (const Single& x : mine) {
    for (const Single& y : theirs) {
      if (x.slow_rows + y.slow_rows > -kWorthwhileRows) break;
      const int32_t rank_x = ranks_[x.chunk], rank_y = ranks_[y.chunk];
      const Load moved = problem_.weights[x.chunk] - problem_.weights[y.chunk];
      if (double(loads_[rank_x] - moved) / problem_.speed[rank_x] > limit) continue;
      if (double(loads_[rank_y] + moved) / problem_.speed[rank_y] > limit) continue;
      if (num_tried++ == kTradesVerified) return false;
      apply(rank_x, {0, rank_y, x.chunk, y.chunk});
      if (grouping_.slow_rows(node) + grouping_.slow_rows(other) <= before - kWorthwhileRows)
        return true;
      apply(rank_x, {0, rank_y, y.chunk, x.chunk});
    }
  }
  return false;
}

}  // namespace fm3::planner
