// SPDX-License-Identifier: Apache-2.0
// Bookkeeping of chunks on nodes: loads, and rows each node must fetch over the slow link.
#pragma once

#include <algorithm>
#include <vector>

#include "balance.h"
#include "needs.h"

namespace fm3::planner {

struct NodeProblem {
  std::vector<Load> weights;          // [num_chunks]
  std::vector<int32_t> capacity;      // [num_ranks] chunks at most
  std::vector<double> speed;          // [num_ranks]
  std::vector<int32_t> node_of_rank;  // [num_ranks]
  double us_per_load;                 // compute time of one unit of weight at speed 1
  double us_per_row;                  // time of one K/V row (there and back) on one slow link
  int32_t block = 1;  // chunks that stay together on a rank where nothing is lost by it

  int32_t num_chunks() const { return int32_t(weights.size()); }
  int32_t num_ranks() const { return int32_t(capacity.size()); }
};

// What the ranks of one node have together.
struct Node {
  std::vector<int32_t> ranks;
  int32_t slots = 0;  // chunks at most
  double speed = 0;
};
std::vector<Node> nodes_of(const NodeProblem& problem);

// Key rows cut so finely that every chunk needs each segment wholly or (nearly) not at all.
class Segments {
 public:
  Segments(const std::vector<Need>& needs, const ChunkGrid& grid);
  int32_t count() const { return int32_t(cuts_.size()) - 1; }
  int32_t rows(int32_t segment) const { return cuts_[segment + 1] - cuts_[segment]; }
  const std::vector<Run>& needed_by(int32_t chunk) const { return needed_[chunk]; }
  Run of_chunk(int32_t chunk) const { return {first_of_chunk_[chunk], first_of_chunk_[chunk + 1]}; }
  int32_t chunk_of(int32_t segment) const {
    return int32_t(std::upper_bound(first_of_chunk_.begin(), first_of_chunk_.end(), segment) -
                   first_of_chunk_.begin()) -
           1;
  }
  int32_t rows_between(int32_t begin, int32_t end) const { return cuts_[end] - cuts_[begin]; }

 private:
  void collect(const std::vector<Need>& needs, const ChunkGrid& grid, int32_t unit);

  std::vector<int32_t> cuts_;             // [count + 1] ascending key rows
  std::vector<std::vector<Run>> needed_;  // [num_chunks] segments
  std::vector<int32_t> first_of_chunk_;   // [num_chunks + 1]
};

// What the overlap of compute and transfer fails to hide, as a share of the shorter of the two. A larger share buys
// less traffic with uneven ranks: at 0.3, 32 ranks are 1.5 % uneven on documents instead of 0.9 %.
constexpr double kUnhiddenShare = 0.05;
// A node that fetches kModestShare of the rows it does not own pays this share of its transfer besides, and soon much
// more, up to kMostCrowding times: links are shared, and estimates of heavy traffic are the first to be wrong.
constexpr double kCrowdedPrice = 0.05;
constexpr double kModestShare = 0.3;
constexpr double kMostCrowding = 16.0;
inline double overlapped_us(double compute_us, double transfer_us) {
  return std::max(compute_us, transfer_us) + kUnhiddenShare * std::min(compute_us, transfer_us);
}

// Which chunk is on which node, with loads and slow rows kept up to date while chunks move.
class Grouping {
 public:
  Grouping(const NodeProblem& problem, const std::vector<Node>& nodes, const Segments& segments)
      : problem_(problem),
        nodes_(nodes),
        segments_(segments),
        rows_elsewhere_(std::max(1.0, double(segments.rows_between(0, segments.count())) *
                                          double(nodes.size() - 1) / double(nodes.size()))) {
    double load = 0, speed = 0;
    for (Load weight : problem.weights) load += double(weight);
    for (const Node& node : nodes) speed += node.speed;
    mean_compute_us_ = load / speed * problem.us_per_load;
  }

  void load(const std::vector<int32_t>& node_of_chunk);
  void ignore_crowding() { mean_compute_us_ = 0; }
  void add(int32_t chunk, int32_t node);
  void remove(int32_t chunk);
  void move(int32_t chunk, int32_t node) {
    remove(chunk);
    add(chunk, node);
  }

  // What moving the chunk would add to the slow rows of its node and of `to`; moves nothing.
  struct MoveCost {
    int64_t from, to;
  };
  MoveCost cost_of_move(int32_t chunk, int32_t to);

  int32_t num_nodes() const { return int32_t(nodes_.size()); }
  int32_t node_of(int32_t chunk) const { return node_of_chunk_[chunk]; }
  const std::vector<int32_t>& node_of_chunk() const { return node_of_chunk_; }
  double compute_us(int32_t node) const {
    return double(loads_[node]) * problem_.us_per_load / nodes_[node].speed;
  }
  double transfer_us(int32_t node) const { return to_transfer_us(node, slow_rows_[node]); }
  double to_transfer_us(int32_t node, int64_t slow_rows) const {
    return double(slow_rows) * problem_.us_per_row / double(nodes_[node].ranks.size());
  }
  // Rows as a share of those that a node does not own, on average.
  double share(int64_t slow_rows) const { return double(slow_rows) / rows_elsewhere_; }
  // What `slow_rows` cost beyond the transfer itself.
  double crowding_us(int32_t node, int64_t slow_rows) const {
    const double crowd = share(slow_rows) / kModestShare, cube = crowd * crowd * crowd;
    return kCrowdedPrice * std::min(cube * cube, kMostCrowding) *
           std::min(to_transfer_us(node, slow_rows), mean_compute_us_);
  }
  double estimate_us(int32_t node, double compute_us, int64_t slow_rows) const {
    return overlapped_us(compute_us, to_transfer_us(node, slow_rows)) +
           crowding_us(node, slow_rows);
  }
  int64_t slow_rows(int32_t node) const { return slow_rows_[node]; }
  Load load_of(int32_t node) const { return loads_[node]; }
  // Elementary steps so far: a budget in these is the same on every machine, unlike a time.
  int64_t steps() const { return steps_; }

 private:
  const NodeProblem& problem_;
  const std::vector<Node>& nodes_;
  const Segments& segments_;
  const double rows_elsewhere_;  // mean over nodes
  double mean_compute_us_ = 0;   // 0: crowding costs nothing
  std::vector<int32_t> node_of_chunk_;
  std::vector<int32_t> users_;  // [num_nodes][segments] chunks of the node that need the segment
  std::vector<int32_t> owner_;  // [segments] node
  std::vector<Load> loads_;     // [num_nodes]
  std::vector<int64_t> slow_rows_;  // [num_nodes] rows needed and owned elsewhere
  int64_t steps_ = 0;
};

}  // namespace fm3::planner
