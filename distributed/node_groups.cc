// SPDX-License-Identifier: Apache-2.0
#include "node_groups.h"

#include <algorithm>
#include <numeric>

#include "block_balance.h"
#include "island_split.h"
#include "rank_exchange.h"

namespace fm3::planner {
namespace {

constexpr double kEvenEnough = 0.002;  // nodes this close to the mean are left alone
constexpr size_t kMostSplits = 6;      // island splits tried, fewer for many nodes
constexpr double kCoarseGap = 0.05;    // less even than this, and other starts are tried as well
// A split this even, with this share of the rows crossing, ends the search.
constexpr double kFineGap = 0.012, kFineShare = 0.35;
constexpr double kCrowdedShare = 0.45;
constexpr size_t kTried = 12;  // chunks of a node that an exchange considers
constexpr int kVerified = 4;   // candidates of an exchange whose traffic is computed exactly

// How many chunks each node gets, in proportion to its slots.
std::vector<int32_t> chunks_per_node(const NodeProblem& problem, const std::vector<Node>& nodes) {
  int64_t total = 0;
  for (const Node& node : nodes) total += node.slots;
  const int64_t num_chunks = problem.num_chunks();
  std::vector<int32_t> counts;
  int64_t slots_before = 0;
  for (const Node& node : nodes) {
    const int64_t begin = slots_before * num_chunks / total;
    slots_before += node.slots;
    counts.push_back(int32_t(slots_before * num_chunks / total - begin));
  }
  return counts;
}

// Neighbouring chunks together.
std::vector<int32_t> contiguous(const NodeProblem& problem, const std::vector<Node>& nodes) {
  std::vector<int32_t> node_of_chunk;
  const std::vector<int32_t> counts = chunks_per_node(problem, nodes);
  for (size_t node = 0; node < counts.size(); ++node)
    node_of_chunk.insert(node_of_chunk.end(), counts[node], int32_t(node));
  return node_of_chunk;
}

Load load_of(const NodeProblem& problem, const std::vector<int32_t>& chunks) {
  Load load = 0;
  for (int32_t chunk : chunks) load += problem.weights[chunk];
  return load;
}

// Islands: chunks whose rows (most of them) are seen up to the same chunk, such as those of one document, or all of
// a causal mask. Islands of heavy chunks first, chunks ascending.
std::vector<std::vector<int32_t>> heavy_islands_first(const NodeProblem& problem,
                                                      const std::vector<Need>& needs,
                                                      const ChunkGrid& grid) {
  const int32_t num_chunks = problem.num_chunks();
  std::vector<int32_t> seen_until(num_chunks), widest(num_chunks);
  for (const Need& need : needs) {
    for (int32_t chunk = grid.chunk_of(need.k_begin), begin = need.k_begin; begin < need.k_end;
         ++chunk) {
      const int32_t end = std::min(need.k_end, grid.end(chunk));
      if (end - begin >= widest[chunk]) {
        widest[chunk] = end - begin;
        seen_until[chunk] = need.chunk_end;
      }
      begin = end;
    }
  }
  std::vector<std::vector<int32_t>> islands(num_chunks + 1);
  for (int32_t chunk = 0; chunk < num_chunks; ++chunk) islands[seen_until[chunk]].push_back(chunk);
  islands.erase(std::remove_if(islands.begin(), islands.end(),
                               [](const auto& island) { return island.empty(); }),
                islands.end());
  const auto mean_load = [&](const std::vector<int32_t>& island) {
    return double(load_of(problem, island)) / double(island.size());
  };
  std::stable_sort(islands.begin(), islands.end(),
                   [&](const auto& x, const auto& y) { return mean_load(x) > mean_load(y); });
  return islands;
}

// Each node takes consecutive chunks from the heavy end and from the light end, in the proportion that gives it
// its share of the load: even loads, and few islands broken.
std::vector<int32_t> two_ended(const NodeProblem& problem, const std::vector<Node>& nodes,
                               const std::vector<std::vector<int32_t>>& islands,
                               bool is_by_weight) {
  std::vector<int32_t> order;
  for (std::vector<int32_t> island : islands) {
    if (is_by_weight) {
      std::stable_sort(island.begin(), island.end(), [&](int32_t x, int32_t y) {
        return problem.weights[x] > problem.weights[y];
      });
    }
    order.insert(order.end(), island.begin(), island.end());
  }
  const std::vector<int32_t> counts = chunks_per_node(problem, nodes);
  std::vector<Load> before(order.size() + 1);  // load of order[0, i)
  for (size_t i = 0; i < order.size(); ++i) before[i + 1] = before[i] + problem.weights[order[i]];
  double speed_left = 0;
  for (const Node& node : nodes) speed_left += node.speed;
  size_t front = 0, back = order.size();
  std::vector<int32_t> node_of_chunk(order.size());
  for (size_t node = 0; node < counts.size(); ++node) {
    const double share = double(before[back] - before[front]) * nodes[node].speed / speed_left;
    size_t best = 0;
    double best_error = -1;
    for (size_t from_front = 0; from_front <= size_t(counts[node]); ++from_front) {
      const size_t from_back = counts[node] - from_front;
      const double load = double(before[front + from_front] - before[front] + before[back] -
                                 before[back - from_back]);
      const double error = load > share ? load - share : share - load;
      if (best_error < 0 || error < best_error) {
        best = from_front;
        best_error = error;
      }
    }
    for (size_t i = 0; i < best; ++i) node_of_chunk[order[front++]] = int32_t(node);
    for (size_t i = best; i < size_t(counts[node]); ++i)
      node_of_chunk[order[--back]] = int32_t(node);
    speed_left -= nodes[node].speed;
  }
  return node_of_chunk;
}

// Whole islands (large ones in pieces) by load, longest first; then nodes with too many chunks hand some of
// their lightest island to nodes with too few.
std::vector<int32_t> packed(const NodeProblem& problem, const std::vector<Node>& nodes,
                            const std::vector<std::vector<int32_t>>& islands) {
  const std::vector<int32_t> counts = chunks_per_node(problem, nodes);
  const size_t piece_size =
      size_t(std::max(1, *std::min_element(counts.begin(), counts.end()) / 2));
  std::vector<std::vector<int32_t>> pieces;
  for (const auto& island : islands) {
    for (size_t at = 0; at < island.size(); at += piece_size) {
      pieces.emplace_back(island.begin() + at,
                          island.begin() + std::min(island.size(), at + piece_size));
    }
  }
  std::stable_sort(pieces.begin(), pieces.end(), [&](const auto& x, const auto& y) {
    return load_of(problem, x) > load_of(problem, y);
  });
  std::vector<double> finish(nodes.size());
  std::vector<int32_t> surplus(nodes.size());
  std::vector<std::vector<std::vector<int32_t>>> held(nodes.size());
  for (size_t node = 0; node < nodes.size(); ++node) surplus[node] = -counts[node];
  for (const auto& piece : pieces) {
    const double load = double(load_of(problem, piece));
    size_t best = 0;
    for (size_t node = 1; node < nodes.size(); ++node) {
      if (finish[node] + load / nodes[node].speed < finish[best] + load / nodes[best].speed)
        best = node;
    }
    held[best].push_back(piece);
    finish[best] += load / nodes[best].speed;
    surplus[best] += int32_t(piece.size());
  }
  while (true) {
    const size_t giver = size_t(std::max_element(surplus.begin(), surplus.end()) - surplus.begin());
    const size_t taker = size_t(std::min_element(surplus.begin(), surplus.end()) - surplus.begin());
    if (surplus[giver] <= 0) break;
    size_t lightest = 0;
    const auto mean = [&](const std::vector<int32_t>& piece) {
      return double(load_of(problem, piece)) / double(piece.size());
    };
    for (size_t i = 1; i < held[giver].size(); ++i) {
      if (mean(held[giver][i]) < mean(held[giver][lightest])) lightest = i;
    }
    auto& piece = held[giver][lightest];
    const int32_t moved = std::min({surplus[giver], -surplus[taker], int32_t(piece.size())});
    held[taker].emplace_back(piece.end() - moved, piece.end());
    piece.resize(piece.size() - size_t(moved));
    if (piece.empty()) held[giver].erase(held[giver].begin() + lightest);
    surplus[giver] -= moved;
    surplus[taker] += moved;
  }
  std::vector<int32_t> node_of_chunk(problem.num_chunks());
  for (size_t node = 0; node < nodes.size(); ++node) {
    for (const auto& piece : held[node]) {
      for (int32_t chunk : piece) node_of_chunk[chunk] = int32_t(node);
    }
  }
  return node_of_chunk;
}

// --- exchanges between nodes --------------------------------------------------------------------

struct Exchange {
  double estimate_us;
  int32_t mine, theirs;  // chunks; -1: nothing goes that way
};

double estimate_us(const Grouping& grouping, int32_t node) {
  return grouping.estimate_us(node, grouping.compute_us(node), grouping.slow_rows(node));
}

double latest_us(const Grouping& grouping) {
  double latest = 0;
  for (int32_t node = 0; node < grouping.num_nodes(); ++node)
    latest = std::max(latest, estimate_us(grouping, node));
  return latest;
}

class NodeDescent {
 public:
  NodeDescent(const NodeProblem& problem, const std::vector<Node>& nodes, Grouping& grouping)
      : problem_(problem), nodes_(nodes), grouping_(grouping) {}

  // Exchanges chunks between the latest node and others while that makes the later of the two earlier.
  void run(int64_t last_step) {
    while (grouping_.steps() < last_step) {
      std::vector<int32_t> order(nodes_.size());
      std::iota(order.begin(), order.end(), 0);
      std::stable_sort(order.begin(), order.end(), [&](int32_t x, int32_t y) {
        return estimate_us(grouping_, x) > estimate_us(grouping_, y);
      });
      double mean_us = 0;
      for (int32_t node : order) mean_us += estimate_us(grouping_, node) / double(order.size());
      if (estimate_us(grouping_, order[0]) <= mean_us * (1 + kEvenEnough)) return;
      bool has_moved = false;
      for (size_t i = order.size() - 1; i > 0 && !has_moved && grouping_.steps() < last_step; --i) {
        has_moved = exchange_best(order[0], order[i]);
      }
      if (!has_moved) return;
    }
  }

 private:
  struct Single {  // a chunk and what its move alone changes
    int32_t chunk;
    int64_t slow_rows_from, slow_rows_to;  // differences
  };

  std::vector<Single> singles(int32_t from, int32_t to) {
    std::vector<Single> list;
    std::vector<int32_t> chunks;
    for (int32_t chunk = 0; chunk < problem_.num_chunks(); ++chunk) {
      if (grouping_.node_of(chunk) == from) chunks.push_back(chunk);
    }
    std::stable_sort(chunks.begin(), chunks.end(), [&](int32_t x, int32_t y) {
      return problem_.weights[x] < problem_.weights[y];
    });
    if (int32_t(chunks.size()) < nodes_[from].slots)
      list.push_back({-1, 0, 0});  // room: the other side may just give
    // A sample over all weights: chunks of one document and weight are as good as each other.
    const size_t count_tried = std::min<size_t>(chunks.size(), kTried);
    for (size_t i = 0; i < count_tried; ++i) {
      const int32_t chunk =
          chunks[count_tried == chunks.size() ? i
                                              : (2 * i + 1) * chunks.size() / (2 * count_tried)];
      const Grouping::MoveCost cost = grouping_.cost_of_move(chunk, to);
      list.push_back({chunk, cost.from, cost.to});
    }
    return list;
  }

  // Ranks all pairs by the sum of the two single moves, then computes the best few exactly.
  bool exchange_best(int32_t late, int32_t early) {
    const std::vector<Single> mine = singles(late, early), theirs = singles(early, late);
    const double before_us = estimate_us(grouping_, late);
    std::vector<Exchange> best;
    for (const Single& x : mine) {
      for (const Single& y : theirs) {
        if (x.chunk < 0 && y.chunk < 0) continue;
        const Load moved = (x.chunk < 0 ? 0 : problem_.weights[x.chunk]) -
                           (y.chunk < 0 ? 0 : problem_.weights[y.chunk]);
        const double late_us = guess_us(late, -moved, x.slow_rows_from + y.slow_rows_to);
        const double early_us = guess_us(early, moved, x.slow_rows_to + y.slow_rows_from);
        const Exchange guess{std::max(late_us, early_us), x.chunk, y.chunk};
        if (guess.estimate_us >= before_us ||
            (best.size() == kVerified && guess.estimate_us >= best.back().estimate_us)) {
          continue;
        }
        if (best.size() == kVerified) best.pop_back();
        best.insert(std::upper_bound(best.begin(), best.end(), guess,
                                     [](const Exchange& p, const Exchange& q) {
                                       return p.estimate_us < q.estimate_us;
                                     }),
                    guess);
      }
    }
    for (const Exchange& exchange : best) {
      if (exchange.mine >= 0) grouping_.move(exchange.mine, early);
      if (exchange.theirs >= 0) grouping_.move(exchange.theirs, late);
      if (std::max(estimate_us(grouping_, late), estimate_us(grouping_, early)) < before_us)
        return true;
      if (exchange.theirs >= 0) grouping_.move(exchange.theirs, early);
      if (exchange.mine >= 0) grouping_.move(exchange.mine, late);
    }
    return false;
  }

  double guess_us(int32_t node, Load load_change, int64_t slow_rows_change) const {
    const double compute_us = grouping_.compute_us(node) +
                              double(load_change) * problem_.us_per_load / nodes_[node].speed;
    return grouping_.estimate_us(node, compute_us, grouping_.slow_rows(node) + slow_rows_change);
  }

  const NodeProblem& problem_;
  const std::vector<Node>& nodes_;
  Grouping& grouping_;
};

// --- from nodes to ranks ------------------------------------------------------------------------

struct Assignment {
  std::vector<int32_t> ranks;  // [num_chunks]
  double us;                   // of the latest node, traffic included
  double finish;               // of the latest rank
  double share;                // of other nodes' rows, that the node with most traffic fetches
};

// Balances inside each node, then trades between ranks of any nodes.
Assignment to_ranks(const NodeProblem& problem, const std::vector<Node>& nodes, Grouping& grouping,
                    const BalanceOptions& options, double bound, int64_t max_steps) {
  Assignment found{std::vector<int32_t>(problem.num_chunks()), 0, 0, 0};
  std::vector<std::vector<int32_t>> chunks_of_node(nodes.size());
  for (int32_t chunk = 0; chunk < problem.num_chunks(); ++chunk) {
    chunks_of_node[grouping.node_of(chunk)].push_back(chunk);
  }
  for (size_t node = 0; node < nodes.size(); ++node) {
    const std::vector<int32_t>& chunks = chunks_of_node[node];
    BalanceProblem inside;
    for (int32_t chunk : chunks) inside.weights.push_back(problem.weights[chunk]);
    for (int32_t rank : nodes[node].ranks) {
      inside.capacity.push_back(problem.capacity[rank]);
      inside.speed.push_back(problem.speed[rank]);
    }
    const Balance result = balance_in_blocks(inside, problem.block, options);
    for (size_t i = 0; i < chunks.size(); ++i)
      found.ranks[chunks[i]] = nodes[node].ranks[result.ranks[i]];
  }
  RankExchange exchange(problem, grouping, found.ranks);
  exchange.even_out(bound * (1 + options.target_gap), grouping.steps() + max_steps);
  found.us = exchange.estimate_us();
  found.finish = exchange.latest_finish();
  for (int32_t node = 0; node < grouping.num_nodes(); ++node)
    found.share = std::max(found.share, grouping.share(grouping.slow_rows(node)));
  return found;
}

}  // namespace

Balance balance_by_node(const NodeProblem& problem, const std::vector<Need>& needs,
                        const ChunkGrid& grid, const BalanceOptions& options, int64_t max_steps) {
  const std::vector<Node> nodes = nodes_of(problem);
  const Segments segments(needs, grid);
  Grouping grouping(problem, nodes, segments);
  BalanceProblem between{problem.weights, {}, {}};
  for (const Node& node : nodes) {
    between.capacity.push_back(node.slots);
    between.speed.push_back(node.speed);
  }
  const auto islands = heavy_islands_first(problem, needs, grid);
  const double bound = lower_bound({problem.weights, problem.capacity, problem.speed});
  Assignment best{{}, 0, 0, 0};
  const auto consider = [&](std::vector<int32_t> node_of_chunk) {
    grouping.load(node_of_chunk);
    Assignment found = to_ranks(problem, nodes, grouping, options, bound, max_steps / 6);
    if (best.ranks.empty() || found.us < best.us) best = std::move(found);
  };
  const std::vector<int32_t> counts = chunks_per_node(problem, nodes);
  const size_t num_splits =
      std::clamp<size_t>(kMostSplits * 8 / (nodes.size() * nodes.size()), 2, kMostSplits);
  for (size_t seed = 0; seed < num_splits; ++seed) {
    const auto start = split_islands(problem, nodes, counts, segments, islands, seed);
    if (start.empty()) break;
    grouping.load(start);
    NodeDescent(problem, nodes, grouping).run(grouping.steps() + max_steps / 6);
    if (best.ranks.empty() || latest_us(grouping) < best.us) consider(grouping.node_of_chunk());
    if (best.finish <= bound * (1 + kFineGap) && best.share <= kFineShare) break;
  }
  if (best.ranks.empty() || best.share > kCrowdedShare) {
    // Most rows cross whatever the layout: crowding tells layouts apart no longer.
    grouping.ignore_crowding();
    best = {};
  }
  if (best.ranks.empty() || islands.size() < 2 * nodes.size() ||
      best.finish > bound * (1 + kCoarseGap)) {
    // No islands, few, or they do not divide. Starts with few slow rows (neighbours together) or even loads (longest first); each is improved.
    std::vector<int32_t> best_start;
    double best_us = 0;
    for (const auto& start :
         {two_ended(problem, nodes, islands, false), two_ended(problem, nodes, islands, true),
          packed(problem, nodes, islands), contiguous(problem, nodes), balance_lpt(between)}) {
      grouping.load(start);
      NodeDescent(problem, nodes, grouping).run(grouping.steps() + max_steps / 6);
      const double us = latest_us(grouping);
      if (best_start.empty() || us < best_us) {
        best_start = grouping.node_of_chunk();
        best_us = us;
      }
    }
    consider(best_start);
  }
  std::vector<int32_t> node_of_chunk;
  for (int32_t rank : best.ranks) node_of_chunk.push_back(problem.node_of_rank[rank]);
  grouping.load(node_of_chunk);
  RankExchange exchange(problem, grouping, best.ranks);
  exchange.cut_traffic(grouping.steps() + max_steps / 6);
  return {best.ranks, exchange.latest_finish(), bound};
}

}  // namespace fm3::planner
