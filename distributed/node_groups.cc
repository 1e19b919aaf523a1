// SPDX-License-Identifier: Apache-2.0
#include "node_groups.h"

#include <algorithm>
#include <numeric>

namespace fm3::planner {
namespace {

constexpr double kUnhiddenShare = 0.1;  // of the shorter of compute and transfer, what overlap fails to hide
constexpr double kEvenEnough = 0.005;   // nodes this close to the mean are left alone

// Key rows cut so finely that every chunk needs each segment wholly or (nearly) not at all.
class Segments {
 public:
  Segments(const std::vector<Need>& needs, const ChunkGrid& grid) {
    const size_t max_cuts = size_t(grid.num_chunks()) * 4 + 512;
    collect(needs, grid, 1);
    if (cuts_.size() > max_cuts) collect(needs, grid, kTile);  // single-row needs: round outwards to tiles
    if (cuts_.size() > max_cuts * 4) cuts_ = chunk_cuts(grid);
    needed_.resize(grid.num_chunks());
    for (const Need& need : needs) {
      const Run run{int32_t(std::upper_bound(cuts_.begin(), cuts_.end(), need.k_begin) - cuts_.begin()) - 1,
                    int32_t(std::lower_bound(cuts_.begin(), cuts_.end(), need.k_end) - cuts_.begin())};
      for (int32_t chunk = need.chunk_begin; chunk < need.chunk_end; ++chunk) add(needed_[chunk], run);
    }
    for (auto& runs : needed_) make_disjoint(runs);
    for (int32_t segment = 0; segment < count(); ++segment) {
      if (segment == 0 || grid.chunk_of(cuts_[segment]) != grid.chunk_of(cuts_[segment - 1])) {
        first_of_chunk_.push_back(segment);
      }
    }
    first_of_chunk_.push_back(count());
  }
  int32_t count() const { return int32_t(cuts_.size()) - 1; }
  int32_t rows(int32_t segment) const { return cuts_[segment + 1] - cuts_[segment]; }
  const std::vector<Run>& needed_by(int32_t chunk) const { return needed_[chunk]; }
  Run of_chunk(int32_t chunk) const { return {first_of_chunk_[chunk], first_of_chunk_[chunk + 1]}; }

 private:
  static std::vector<int32_t> chunk_cuts(const ChunkGrid& grid) {
    std::vector<int32_t> cuts;
    for (int32_t chunk = 0; chunk < grid.num_chunks(); ++chunk) cuts.push_back(grid.begin(chunk));
    cuts.push_back(grid.s());
    return cuts;
  }
  void collect(const std::vector<Need>& needs, const ChunkGrid& grid, int32_t unit) {
    cuts_ = chunk_cuts(grid);
    for (const Need& need : needs) {
      cuts_.push_back(need.k_begin / unit * unit);
      cuts_.push_back(std::min((need.k_end + unit - 1) / unit * unit, grid.s()));
    }
    std::sort(cuts_.begin(), cuts_.end());
    cuts_.erase(std::unique(cuts_.begin(), cuts_.end()), cuts_.end());
  }
  static void add(std::vector<Run>& runs, Run run) {
    if (!runs.empty() && runs.back().begin <= run.begin && run.begin <= runs.back().end) {
      runs.back().end = std::max(runs.back().end, run.end);
    } else {
      runs.push_back(run);
    }
  }
  static void make_disjoint(std::vector<Run>& runs) {
    std::sort(runs.begin(), runs.end(), [](Run x, Run y) { return x.begin < y.begin; });
    std::vector<Run> joined;
    for (const Run& run : runs) add(joined, run);
    runs.swap(joined);
  }
  std::vector<int32_t> cuts_;            // [count + 1] ascending key rows
  std::vector<std::vector<Run>> needed_;  // [num_chunks] segments
  std::vector<int32_t> first_of_chunk_;  // [num_chunks + 1]
};

// Loads and slow rows of every node, kept up to date while chunks move.
class Grouping {
 public:
  Grouping(const GroupProblem& problem, const Segments& segments)
      : problem_(problem), segments_(segments), num_nodes_(int32_t(problem.slots.size())) {}

  void load(const std::vector<int32_t>& nodes) {
    nodes_.assign(nodes.size(), -1);
    users_.assign(size_t(num_nodes_) * segments_.count(), 0);
    owner_.assign(segments_.count(), -1);
    loads_.assign(num_nodes_, 0);
    slow_rows_.assign(num_nodes_, 0);
    for (int32_t chunk = 0; chunk < int32_t(nodes.size()); ++chunk) add(chunk, nodes[chunk]);
  }

  void add(int32_t chunk, int32_t node) {
    int32_t* users = &users_[size_t(node) * segments_.count()];
    const Run own = segments_.of_chunk(chunk);
    for (int32_t segment = own.begin; segment < own.end; ++segment) {
      owner_[segment] = node;
      if (users[segment] > 0) slow_rows_[node] -= segments_.rows(segment);
    }
    for (const Run& run : segments_.needed_by(chunk)) {
      for (int32_t segment = run.begin; segment < run.end; ++segment) {
        if (users[segment]++ == 0 && owner_[segment] != node) slow_rows_[node] += segments_.rows(segment);
      }
      steps_ += run.end - run.begin;
    }
    loads_[node] += problem_.weights[chunk];
    nodes_[chunk] = node;
    steps_ += own.end - own.begin + 8;
  }

  void remove(int32_t chunk) {
    const int32_t node = nodes_[chunk];
    int32_t* users = &users_[size_t(node) * segments_.count()];
    for (const Run& run : segments_.needed_by(chunk)) {
      for (int32_t segment = run.begin; segment < run.end; ++segment) {
        if (--users[segment] == 0 && owner_[segment] != node) slow_rows_[node] -= segments_.rows(segment);
      }
      steps_ += run.end - run.begin;
    }
    const Run own = segments_.of_chunk(chunk);
    for (int32_t segment = own.begin; segment < own.end; ++segment) {
      owner_[segment] = -1;
      if (users[segment] > 0) slow_rows_[node] += segments_.rows(segment);
    }
    loads_[node] -= problem_.weights[chunk];
    nodes_[chunk] = -1;
    steps_ += own.end - own.begin + 8;
  }

  // Estimated time of a node: the longer of compute and transfer, plus what overlap leaves of the shorter.
  double estimate_us(int32_t node) const {
    const double compute = double(loads_[node]) * problem_.us_per_load / problem_.speed[node];
    const double transfer = double(slow_rows_[node]) * problem_.us_per_row / problem_.num_links[node];
    return std::max(compute, transfer) + kUnhiddenShare * std::min(compute, transfer);
  }

  std::vector<int32_t> by_estimate() const {  // latest node first
    std::vector<int32_t> order(num_nodes_);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](int32_t x, int32_t y) { return estimate_us(x) > estimate_us(y); });
    return order;
  }

  // Swaps chunks between the latest node and others while that makes it earlier.
  double descend(int64_t max_steps) {
    const int64_t last_step = steps_ + max_steps;
    while (steps_ < last_step) {
      const std::vector<int32_t> order = by_estimate();
      double mean = 0;
      for (int32_t node : order) mean += estimate_us(node) / num_nodes_;
      if (estimate_us(order[0]) <= mean * (1 + kEvenEnough)) break;
      bool has_moved = false;
      for (int32_t i = num_nodes_ - 1; i > 0 && !has_moved && steps_ < last_step; --i) {
        has_moved = swap_best(order[0], order[i], last_step);
      }
      if (!has_moved) break;
    }
    double latest = 0;
    for (int32_t node = 0; node < num_nodes_; ++node) latest = std::max(latest, estimate_us(node));
    return latest;
  }

  const std::vector<int32_t>& nodes() const { return nodes_; }

 private:
  // Chunks of the node, and one -1 if it has room: a move is a swap with nothing.
  std::vector<int32_t> tradable(int32_t node) const {
    std::vector<int32_t> chunks;
    for (int32_t chunk = 0; chunk < int32_t(nodes_.size()); ++chunk) {
      if (nodes_[chunk] == node) chunks.push_back(chunk);
    }
    if (int32_t(chunks.size()) < problem_.slots[node]) chunks.push_back(-1);
    return chunks;
  }

  void move(int32_t chunk, int32_t node) {
    if (chunk < 0) return;
    remove(chunk);
    add(chunk, node);
  }

  bool swap_best(int32_t late, int32_t early, int64_t last_step) {
    const std::vector<int32_t> from_late = tradable(late), from_early = tradable(early);
    double best = estimate_us(late);
    int32_t best_mine = -1, best_theirs = -1;
    for (int32_t mine : from_late) {
      move(mine, early);
      for (int32_t theirs : from_early) {
        if (mine < 0 && theirs < 0) continue;
        move(theirs, late);
        const double estimate = std::max(estimate_us(late), estimate_us(early));
        if (estimate < best) {
          best = estimate;
          best_mine = mine;
          best_theirs = theirs;
        }
        move(theirs, early);
      }
      move(mine, late);
      if (steps_ > last_step) break;
    }
    if (best_mine < 0 && best_theirs < 0) return false;
    move(best_mine, early);
    move(best_theirs, late);
    return true;
  }

  const GroupProblem& problem_;
  const Segments& segments_;
  int32_t num_nodes_;
  std::vector<int32_t> nodes_;      // [num_chunks]
  std::vector<int32_t> users_;      // [num_nodes][segments] chunks of the node that need the segment
  std::vector<int32_t> owner_;      // [segments] node
  std::vector<Load> loads_;         // [num_nodes]
  std::vector<int64_t> slow_rows_;  // [num_nodes] rows needed and owned elsewhere
  int64_t steps_ = 0;
};

std::vector<int32_t> contiguous(const GroupProblem& problem) {
  std::vector<int32_t> nodes(problem.weights.size());
  const int64_t total = std::accumulate(problem.slots.begin(), problem.slots.end(), int64_t{0});
  int64_t slots_before = 0;
  for (size_t node = 0; node < problem.slots.size(); ++node) {
    const int64_t num_chunks = int64_t(nodes.size());
    const int64_t begin = slots_before * num_chunks / total;
    slots_before += problem.slots[node];
    const int64_t end = slots_before * num_chunks / total;
    std::fill(nodes.begin() + begin, nodes.begin() + end, int32_t(node));
  }
  return nodes;
}

}  // namespace

NodeGroups group_by_node(const GroupProblem& problem, const std::vector<Need>& needs, const ChunkGrid& grid) {
  const Segments segments(needs, grid);
  Grouping grouping(problem, segments);
  // Two starts: neighbours together (few slow rows, uneven) and even loads (many slow rows).
  grouping.load(contiguous(problem));
  NodeGroups best{{}, grouping.descend(problem.max_steps)};
  best.nodes = grouping.nodes();
  grouping.load(balance_lpt({problem.weights, problem.slots, problem.speed}));
  const double estimate_us = grouping.descend(problem.max_steps / 4);
  if (estimate_us < best.estimate_us) best = {grouping.nodes(), estimate_us};
  return best;
}

}  // namespace fm3::planner
