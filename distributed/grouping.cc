// SPDX-License-Identifier: Apache-2.0
#include "grouping.h"

#include <algorithm>

namespace fm3::planner {
namespace {

std::vector<int32_t> chunk_cuts(const ChunkGrid& grid) {
  std::vector<int32_t> cuts;
  for (int32_t chunk = 0; chunk < grid.num_chunks(); ++chunk) cuts.push_back(grid.begin(chunk));
  cuts.push_back(grid.s());
  return cuts;
}

void append(std::vector<Run>& runs, Run run) {  // joins with the last one if they touch
  if (!runs.empty() && runs.back().begin <= run.begin && run.begin <= runs.back().end) {
    runs.back().end = std::max(runs.back().end, run.end);
  } else {
    runs.push_back(run);
  }
}

}  // namespace

std::vector<Node> nodes_of(const NodeProblem& problem) {
  std::vector<Node> nodes;
  for (int32_t rank = 0; rank < problem.num_ranks(); ++rank) {
    const size_t node = size_t(problem.node_of_rank[rank]);
    if (nodes.size() <= node) nodes.resize(node + 1);
    nodes[node].ranks.push_back(rank);
    nodes[node].slots += problem.capacity[rank];
    nodes[node].speed += problem.speed[rank];
  }
  return nodes;
}

void Segments::collect(const std::vector<Need>& needs, const ChunkGrid& grid, int32_t unit) {
  cuts_ = chunk_cuts(grid);
  for (const Need& need : needs) {
    cuts_.push_back(need.k_begin / unit * unit);
    cuts_.push_back(std::min((need.k_end + unit - 1) / unit * unit, grid.s()));
  }
  std::sort(cuts_.begin(), cuts_.end());
  cuts_.erase(std::unique(cuts_.begin(), cuts_.end()), cuts_.end());
}

Segments::Segments(const std::vector<Need>& needs, const ChunkGrid& grid) {
  const size_t max_cuts = size_t(grid.num_chunks()) * 4 + 512;
  collect(needs, grid, 1);
  if (cuts_.size() > max_cuts)
    collect(needs, grid, kTile);  // single-row needs: round outwards to tiles
  if (cuts_.size() > max_cuts * 4) cuts_ = chunk_cuts(grid);
  std::vector<int32_t> segment_of_tile;  // first segment that ends after each 128th row
  for (int32_t row = 0, segment = 0; row <= grid.s(); row += kTile) {
    while (segment + 1 < count() && cuts_[segment + 1] <= row) ++segment;
    segment_of_tile.push_back(segment);
  }
  needed_.resize(grid.num_chunks());
  for (const Need& need : needs) {
    Run run{segment_of_tile[need.k_begin / kTile], segment_of_tile[(need.k_end - 1) / kTile]};
    while (cuts_[run.begin + 1] <= need.k_begin) ++run.begin;
    while (cuts_[run.end] < need.k_end) ++run.end;
    for (int32_t chunk = need.chunk_begin; chunk < need.chunk_end; ++chunk)
      append(needed_[chunk], run);
  }
  std::vector<Run> joined;
  for (auto& runs : needed_) {
    std::sort(runs.begin(), runs.end(), [](Run x, Run y) { return x.begin < y.begin; });
    joined.clear();
    for (const Run& run : runs) append(joined, run);
    runs = joined;
  }
  int32_t segment = 0;
  for (int32_t chunk = 0; chunk < grid.num_chunks(); ++chunk) {
    while (cuts_[segment] < grid.begin(chunk)) ++segment;
    first_of_chunk_.push_back(segment);
  }
  first_of_chunk_.push_back(count());
}

void Grouping::load(const std::vector<int32_t>& node_of_chunk) {
  node_of_chunk_.assign(node_of_chunk.size(), -1);
  users_.assign(nodes_.size() * size_t(segments_.count()), 0);
  owner_.assign(segments_.count(), -1);
  loads_.assign(nodes_.size(), 0);
  slow_rows_.assign(nodes_.size(), 0);
  for (int32_t chunk = 0; chunk < int32_t(node_of_chunk.size()); ++chunk)
    add(chunk, node_of_chunk[chunk]);
}

void Grouping::add(int32_t chunk, int32_t node) {
  int32_t* users = &users_[size_t(node) * segments_.count()];
  const Run own = segments_.of_chunk(chunk);
  for (int32_t segment = own.begin; segment < own.end; ++segment) {
    owner_[segment] = node;
    if (users[segment] > 0) slow_rows_[node] -= segments_.rows(segment);
  }
  for (const Run& run : segments_.needed_by(chunk)) {
    for (int32_t segment = run.begin; segment < run.end; ++segment) {
      if (users[segment]++ == 0 && owner_[segment] != node)
        slow_rows_[node] += segments_.rows(segment);
    }
    steps_ += run.end - run.begin;
  }
  loads_[node] += problem_.weights[chunk];
  node_of_chunk_[chunk] = node;
  steps_ += own.end - own.begin + 8;
}

void Grouping::remove(int32_t chunk) {
  const int32_t node = node_of_chunk_[chunk];
  int32_t* users = &users_[size_t(node) * segments_.count()];
  for (const Run& run : segments_.needed_by(chunk)) {
    for (int32_t segment = run.begin; segment < run.end; ++segment) {
      if (--users[segment] == 0 && owner_[segment] != node)
        slow_rows_[node] -= segments_.rows(segment);
    }
    steps_ += run.end - run.begin;
  }
  const Run own = segments_.of_chunk(chunk);
  for (int32_t segment = own.begin; segment < own.end; ++segment) {
    owner_[segment] = -1;
    if (users[segment] > 0) slow_rows_[node] += segments_.rows(segment);
  }
  loads_[node] -= problem_.weights[chunk];
  node_of_chunk_[chunk] = -1;
  steps_ += own.end - own.begin + 8;
}

Grouping::MoveCost Grouping::cost_of_move(int32_t chunk, int32_t to) {
  const int32_t from = node_of_chunk_[chunk];
  const int32_t* users_from = &users_[size_t(from) * segments_.count()];
  const int32_t* users_to = &users_[size_t(to) * segments_.count()];
  const Run own = segments_.of_chunk(chunk);
  MoveCost cost{0, 0};
  // Rows that it owns: `to` has them now, and `from` fetches what its other chunks need of them.
  for (int32_t segment = own.begin; segment < own.end; ++segment) {
    if (users_to[segment] > 0) cost.to -= segments_.rows(segment);
    if (users_from[segment] > 0) cost.from += segments_.rows(segment);
  }
  for (const Run& run : segments_.needed_by(chunk)) {
    for (int32_t segment = run.begin; segment < run.end; ++segment) {
      const bool is_own = segment >= own.begin && segment < own.end;
      // Without this chunk nobody on `from` needs the segment: not fetched, or, if it was owned, not fetched either.
      if (users_from[segment] == 1 && (is_own || owner_[segment] != from))
        cost.from -= segments_.rows(segment);
      if (users_to[segment] == 0 && !is_own && owner_[segment] != to)
        cost.to += segments_.rows(segment);
    }
    steps_ += run.end - run.begin;
  }
  steps_ += own.end - own.begin + 8;
  return cost;
}

}  // namespace fm3::planner
