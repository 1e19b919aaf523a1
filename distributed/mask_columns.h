// SPDX-License-Identifier: Apache-2.0
// A mask as the planner reads it: four named bounds a key column, and the runs of rows they leave visible.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace fm3::planner {

constexpr int32_t kTile =
    128;  // rows and columns of one workload tile, and of one block_mask entry

struct Run {
  int32_t begin, end;  // half-open; empty iff begin >= end
};
inline bool operator==(const Run& x, const Run& y) { return x.begin == y.begin && x.end == y.end; }

struct MaskColumns {
  const int32_t *lt_begin, *lt_end, *ut_begin, *ut_end;  // [b, h_mask, s_k] each, inside [0, s_q]
  const int32_t* block_mask;  // [b, h_mask, ceil(s_q/128), ceil(s_k/128)], 0 hides; may be nullptr
  int32_t num_planes;         // b * h_mask
  int32_t s_q, s_k;
  bool is_causal;

  // Rows [0, causal_end) do not see key k_idx by the causal rule (bottom-right aligned).
  int32_t causal_end(int32_t k_idx) const {
    return is_causal ? std::clamp(k_idx - (s_k - s_q), 0, s_q) : 0;
  }
};

// Sorted, disjoint, maximal runs. Grows by insertion; a mask column moves little from its neighbour,
// so almost every insertion meets a run that already contains it.
class RunSet {
 public:
  void clear() { runs_.clear(); }
  const std::vector<Run>& runs() const { return runs_; }

  void insert(Run run) {
    if (run.begin >= run.end) return;
    size_t first = 0;
    while (first < runs_.size() && runs_[first].end < run.begin) ++first;
    if (first == runs_.size() || run.end < runs_[first].begin) {
      runs_.insert(runs_.begin() + first, run);
      return;
    }
    size_t last = first;  // runs [first, last] touch `run` and become one
    while (last + 1 < runs_.size() && runs_[last + 1].begin <= run.end) ++last;
    runs_[first].begin = std::min(runs_[first].begin, run.begin);
    runs_[first].end = std::max(runs_[last].end, run.end);
    runs_.erase(runs_.begin() + first + 1, runs_.begin() + last + 1);
  }

 private:
  std::vector<Run> runs_;
};

// Rows of [0, s_q) outside up to three hidden intervals, ascending; at most four. Returns how many.
inline int visible_runs(Run x, Run y, Run z, int32_t s_q, Run out[4]) {
  if (y.begin < x.begin) std::swap(x, y);
  if (z.begin < y.begin) std::swap(y, z);
  if (y.begin < x.begin) std::swap(x, y);
  int count = 0;
  int32_t covered = 0;
  for (const Run& hidden : {x, y, z}) {
    if (hidden.begin >= hidden.end) continue;
    if (hidden.begin > covered) out[count++] = {covered, hidden.begin};
    covered = std::max(covered, hidden.end);
  }
  if (covered < s_q) out[count++] = {covered, s_q};
  return count;
}

// Visible runs of one key column of one plane, the block mask left aside.
inline int visible_runs(const MaskColumns& mask, int64_t plane_begin, int32_t k_idx, Run out[4]) {
  const int64_t at = plane_begin + k_idx;
  return visible_runs({mask.lt_begin[at], mask.lt_end[at]}, {mask.ut_begin[at], mask.ut_end[at]},
                      {0, mask.causal_end(k_idx)}, mask.s_q, out);
}

// Consecutive chunks of the query and key axis; maps a row to its chunk in O(1).
class ChunkGrid {
 public:
  explicit ChunkGrid(std::vector<int32_t> begins) : begins_(std::move(begins)) {
    hints_.reserve(size_t(s() >> 7) + 2);
    int32_t chunk = 0;
    for (int32_t row = 0; row <= s(); row += kTile) {
      while (chunk + 1 < num_chunks() && begins_[chunk + 1] <= row) ++chunk;
      hints_.push_back(chunk);
    }
  }
  int32_t num_chunks() const { return int32_t(begins_.size()) - 1; }
  int32_t s() const { return begins_.back(); }
  int32_t begin(int32_t chunk) const { return begins_[chunk]; }
  int32_t end(int32_t chunk) const { return begins_[chunk + 1]; }
  int32_t rows(int32_t chunk) const { return end(chunk) - begin(chunk); }
  int32_t chunk_of(int32_t row) const {  // row in [0, s)
    int32_t chunk = hints_[row >> 7];
    while (begins_[chunk + 1] <= row) ++chunk;
    return chunk;
  }

 private:
  std::vector<int32_t> begins_;  // [num_chunks + 1]
  std::vector<int32_t> hints_;   // [s / 128 + 1] chunk of every 128th row
};

}  // namespace fm3::planner
