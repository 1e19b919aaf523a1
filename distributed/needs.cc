// SPDX-License-Identifier: Apache-2.0
#include "needs.h"

namespace fm3::planner {
namespace {

// Chunks that the runs touch, as ascending disjoint intervals (adjacent ones joined).
void chunks_touched(const Run* runs, int count, const ChunkGrid& grid, std::vector<Run>& out) {
  out.clear();
  for (int i = 0; i < count; ++i) {
    const Run touched{grid.chunk_of(runs[i].begin), grid.chunk_of(runs[i].end - 1) + 1};
    if (!out.empty() && touched.begin <= out.back().end) {
      out.back().end = std::max(out.back().end, touched.end);
    } else {
      out.push_back(touched);
    }
  }
}

// Joins consecutive key rows with the same chunks into one rectangle each.
class NeedWriter {
 public:
  explicit NeedWriter(std::vector<Need>& out) : out_(out) {}
  void add(const std::vector<Run>& chunks, int32_t k_begin, int32_t k_end) {
    if (k_begin != k_end_ || !(chunks == chunks_)) {
      flush();
      chunks_ = chunks;
      k_begin_ = k_begin;
    }
    k_end_ = k_end;
  }
  void flush() {
    for (const Run& chunk : chunks_) out_.push_back({chunk.begin, chunk.end, k_begin_, k_end_});
    chunks_.clear();
    k_end_ = -1;
  }

 private:
  std::vector<Need>& out_;
  std::vector<Run> chunks_;
  int32_t k_begin_ = 0, k_end_ = -1;
};

}  // namespace

std::vector<Need> find_needs(const MaskColumns& mask, const TileScan& scan, const ChunkGrid& grid) {
  std::vector<Need> needs;
  NeedWriter writer(needs);
  std::vector<Run> by_any, by_all, column, kept;
  for (int32_t plane = 0; plane < mask.num_planes; ++plane) {
    const int64_t plane_begin = int64_t(plane) * mask.s_k;
    for (int32_t k_tile = 0; k_tile < scan.num_k_tiles; ++k_tile) {
      const int64_t tile = int64_t(plane) * scan.num_k_tiles + k_tile;
      const int32_t k_begin = k_tile * kTile, k_end = std::min(mask.s_k, k_begin + kTile);
      const auto touched = [&](const std::vector<Run>& runs, const std::vector<int32_t>& begins,
                               std::vector<Run>& out) {
        chunks_touched(runs.data() + begins[tile], begins[tile + 1] - begins[tile], grid, out);
      };
      touched(scan.visible, scan.visible_begins, by_any);
      touched(scan.clear, scan.clear_begins, by_all);
      // Claim:      if the rows that some column sees and the rows that all columns see touch the same
      //             chunks, every column of the tile touches exactly these chunks.
      // Because:    all see <= one column sees <= some see, and touching a chunk is monotone.
      // Breaks if:  scan_tiles' clear runs held a row that a column hides.
      // Tested by:  test/unit/test_route.py::test_needs_match_dense
      if (by_any == by_all) {
        writer.add(by_any, k_begin, k_end);
        continue;
      }
      for (int32_t k_idx = k_begin; k_idx < k_end; ++k_idx) {
        Run runs[4];
        const int count = visible_runs(mask, plane_begin, k_idx, runs);
        if (mask.block_mask == nullptr) {
          chunks_touched(runs, count, grid, column);
        } else {
          kept.assign(runs, runs + count);
          apply_block_mask(mask, plane, k_tile, kept);
          chunks_touched(kept.data(), int(kept.size()), grid, column);
        }
        writer.add(column, k_idx, k_idx + 1);
      }
    }
    writer.flush();
  }
  return needs;
}

RankNeeds needs_of_ranks(const std::vector<Need>& needs, const std::vector<int32_t>& chunk_ranks,
                         int32_t num_ranks, int32_t num_planes, int32_t coalesce_rows,
                         int32_t align_rows, int32_t s_k) {
  std::vector<std::vector<Run>> by_rank(num_ranks);
  const int32_t join =
      std::max(coalesce_rows, 1) - 1;  // holes of at most this many rows are filled
  for (Need need : needs) {
    need.k_begin = need.k_begin / align_rows * align_rows;
    need.k_end = std::min(s_k, (need.k_end + align_rows - 1) / align_rows * align_rows);
    for (int32_t chunk = need.chunk_begin; chunk < need.chunk_end; ++chunk) {
      auto& runs = by_rank[chunk_ranks[chunk]];
      // `needs` of one plane ascend, so only the last run can touch. Planes restart from 0.
      if (!runs.empty() && need.k_begin >= runs.back().begin &&
          need.k_begin - runs.back().end <= join) {
        runs.back().end = std::max(runs.back().end, need.k_end);
      } else {
        runs.push_back({need.k_begin, need.k_end});
      }
    }
  }
  RankNeeds result;
  result.begins.push_back(0);
  for (auto& runs : by_rank) {
    if (num_planes > 1) {
      std::sort(runs.begin(), runs.end(), [](Run x, Run y) { return x.begin < y.begin; });
    }
    for (const Run& run : runs) {
      const bool is_first = int32_t(result.runs.size()) == result.begins.back();
      if (!is_first && run.begin - result.runs.back().end <= join) {
        result.runs.back().end = std::max(result.runs.back().end, run.end);
      } else {
        result.runs.push_back(run);
      }
    }
    result.begins.push_back(int32_t(result.runs.size()));
  }
  return result;
}

ForeignRows count_foreign_rows(const RankNeeds& needs, const ChunkGrid& grid,
                               const std::vector<int32_t>& chunk_ranks,
                               const std::vector<int32_t>& node_of_rank) {
  const int32_t num_ranks = int32_t(node_of_rank.size());
  const int32_t num_nodes = *std::max_element(node_of_rank.begin(), node_of_rank.end()) + 1;
  ForeignRows rows;
  rows.fast_of_rank.resize(num_ranks);
  rows.slow_of_rank.resize(num_ranks);
  std::vector<std::vector<Run>> slow(num_nodes);
  for (int32_t rank = 0; rank < num_ranks; ++rank) {
    const int32_t node = node_of_rank[rank];
    for (int32_t i = needs.begins[rank]; i < needs.begins[rank + 1]; ++i) {
      const Run run = needs.runs[i];
      for (int32_t chunk = grid.chunk_of(run.begin), begin = run.begin; begin < run.end; ++chunk) {
        const int32_t end = std::min(run.end, grid.end(chunk)), owner = chunk_ranks[chunk];
        if (node_of_rank[owner] != node) {
          rows.slow_of_rank[rank] += end - begin;
          slow[node].push_back({begin, end});
        } else if (owner != rank) {
          rows.fast_of_rank[rank] += end - begin;
        }
        begin = end;
      }
    }
  }
  for (auto& runs : slow) {
    std::sort(runs.begin(), runs.end(), [](Run x, Run y) { return x.begin < y.begin; });
    int64_t total = 0;
    int32_t covered = 0;
    for (const Run& run : runs) {
      total += std::max(0, run.end - std::max(run.begin, covered));
      covered = std::max(covered, run.end);
    }
    rows.slow_of_node.push_back(total);
  }
  return rows;
}

}  // namespace fm3::planner
