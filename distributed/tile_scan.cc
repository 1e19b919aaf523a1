// SPDX-License-Identifier: Apache-2.0
#include "tile_scan.h"

#include <limits>

namespace fm3::planner {
namespace {

constexpr int32_t kLow = std::numeric_limits<int32_t>::min();
constexpr int32_t kHigh = std::numeric_limits<int32_t>::max();

// Extremes of one hidden interval over the columns of a tile; "used" = over non-empty intervals only.
struct IntervalExtremes {
  int32_t used_begin_min = kHigh, used_begin_max = kLow;
  int32_t used_end_min = kHigh, used_end_max = kLow;
  bool has_empty = true;

  bool is_unused() const { return used_begin_min == kHigh; }
  // Rows that the interval hides in every column. Empty if some column's interval is.
  Run common() const {
    return has_empty || is_unused() ? Run{0, 0} : Run{used_begin_max, used_end_min};
  }
  // Smallest run around what the interval hides in any column.
  Run hull() const { return is_unused() ? Run{0, 0} : Run{used_begin_min, used_end_max}; }
  // The union over columns is the hull: all intervals share a row or meet in one point.
  bool is_hull_exact() const { return is_unused() || used_begin_max <= used_end_min; }
};

__attribute__((target_clones("avx512f", "avx2", "default"))) IntervalExtremes
extremes_with_empty(const int32_t* __restrict begin, const int32_t* __restrict end, int32_t count) {
  int32_t begin_min = kHigh, begin_max = kLow, end_min = kHigh, end_max = kLow;
  for (int32_t i = 0; i < count; ++i) {
    const bool is_used = begin[i] < end[i];
    begin_min = std::min(begin_min, is_used ? begin[i] : kHigh);
    begin_max = std::max(begin_max, is_used ? begin[i] : kLow);
    end_min = std::min(end_min, is_used ? end[i] : kHigh);
    end_max = std::max(end_max, is_used ? end[i] : kLow);
  }
  return {begin_min, begin_max, end_min, end_max, true};
}

// Most tiles have no empty interval, or none that is not: told by the shortest and the longest one.
__attribute__((target_clones("avx512f", "avx2", "default"))) IntervalExtremes
extremes(const int32_t* __restrict begin, const int32_t* __restrict end, int32_t count) {
  int32_t begin_min = kHigh, begin_max = kLow, end_min = kHigh, end_max = kLow, shortest = kHigh,
          longest = kLow;
  for (int32_t i = 0; i < count; ++i) {
    begin_min = std::min(begin_min, begin[i]);
    begin_max = std::max(begin_max, begin[i]);
    end_min = std::min(end_min, end[i]);
    end_max = std::max(end_max, end[i]);
    shortest = std::min(shortest, end[i] - begin[i]);
    longest = std::max(longest, end[i] - begin[i]);
  }
  if (longest <= 0) return {};
  if (shortest <= 0) return extremes_with_empty(begin, end, count);
  return {begin_min, begin_max, end_min, end_max, false};
}

bool overlap(Run x, Run y) {
  return x.begin < x.end && y.begin < y.end && x.begin < y.end && y.begin < x.end;
}

void append_complement(Run x, Run y, int32_t s_q, std::vector<Run>& out) {
  Run gaps[4];
  const int count = visible_runs(x, y, {0, 0}, s_q, gaps);
  out.insert(out.end(), gaps, gaps + count);
}

// Exact for any columns: the union of what they see, and the complement of the union of what they hide.
void scan_slowly(const MaskColumns& mask, int64_t plane_begin, int32_t k_begin, int32_t k_end,
                 RunSet& seen, RunSet& hidden, std::vector<Run>& visible, std::vector<Run>& clear) {
  seen.clear();
  hidden.clear();
  for (int32_t k_idx = k_begin; k_idx < k_end; ++k_idx) {
    Run runs[4];
    const int count = visible_runs(mask, plane_begin, k_idx, runs);
    int32_t covered = 0;
    for (int i = 0; i < count; ++i) {
      seen.insert(runs[i]);
      hidden.insert({covered, runs[i].begin});
      covered = runs[i].end;
    }
    hidden.insert({covered, mask.s_q});
  }
  visible.insert(visible.end(), seen.runs().begin(), seen.runs().end());
  int32_t covered = 0;
  for (const Run& run : hidden.runs()) {
    if (run.begin > covered) clear.push_back({covered, run.begin});
    covered = run.end;
  }
  if (covered < mask.s_q) clear.push_back({covered, mask.s_q});
}

}  // namespace

void apply_block_mask(const MaskColumns& mask, int32_t plane, int32_t k_tile,
                      std::vector<Run>& runs) {
  if (mask.block_mask == nullptr) return;
  const int64_t num_q_tiles = (mask.s_q + kTile - 1) / kTile,
                num_k_tiles = (mask.s_k + kTile - 1) / kTile;
  const int32_t* kept = mask.block_mask + plane * num_q_tiles * num_k_tiles + k_tile;
  RunSet cut;
  for (const Run& run : runs) {
    for (int32_t begin = run.begin; begin < run.end;) {
      const int32_t end = std::min(run.end, (begin / kTile + 1) * kTile);
      if (kept[(begin / kTile) * num_k_tiles] != 0) cut.insert({begin, end});
      begin = end;
    }
  }
  runs = cut.runs();
}

TileScan scan_tiles(const MaskColumns& mask) {
  TileScan scan;
  scan.num_planes = mask.num_planes;
  scan.num_k_tiles = (mask.s_k + kTile - 1) / kTile;
  const int64_t num_tiles = scan.num_tiles();
  scan.visible_begins.reserve(num_tiles + 1);
  scan.clear_begins.reserve(num_tiles + 1);
  scan.visible.reserve(num_tiles * 2);
  scan.clear.reserve(num_tiles * 2);
  RunSet seen, hidden;
  std::vector<Run> tile_visible, tile_clear;
  for (int32_t plane = 0; plane < mask.num_planes; ++plane) {
    const int64_t plane_begin = int64_t(plane) * mask.s_k;
    for (int32_t k_tile = 0; k_tile < scan.num_k_tiles; ++k_tile) {
      const int32_t k_begin = k_tile * kTile, k_end = std::min(mask.s_k, k_begin + kTile);
      const int64_t at = plane_begin + k_begin;
      const auto lt = extremes(mask.lt_begin + at, mask.lt_end + at, k_end - k_begin);
      auto ut = extremes(mask.ut_begin + at, mask.ut_end + at, k_end - k_begin);
      const bool is_two = !mask.is_causal || ut.is_unused();
      if (mask.is_causal &&
          is_two) {  // the causal rule takes the free interval: [0, causal_end(k))
        const int32_t first = mask.causal_end(k_begin), last = mask.causal_end(k_end - 1);
        if (last > 0) ut = {0, 0, std::max(first, 1), last, first == 0};
      }
      tile_visible.clear();
      tile_clear.clear();
      // Claim:      with disjoint hulls, rows hidden in every column are lt.common + ut.common, and with
      //             exact hulls rows hidden in some column are lt.hull + ut.hull.
      // Because:    a row inside one hull only can be hidden by that interval alone, so it is hidden in
      //             every column iff that interval contains it in every column.
      // Breaks if:  a third interval hides rows too (then is_two is false and the slow path runs).
      // Tested by:  test/unit/test_balance_workload.py::test_counts_match_dense
      if (is_two && lt.is_hull_exact() && ut.is_hull_exact() && !overlap(lt.hull(), ut.hull())) {
        append_complement(lt.common(), ut.common(), mask.s_q, tile_visible);
        append_complement(lt.hull(), ut.hull(), mask.s_q, tile_clear);
      } else {
        scan_slowly(mask, plane_begin, k_begin, k_end, seen, hidden, tile_visible, tile_clear);
      }
      apply_block_mask(mask, plane, k_tile, tile_visible);
      apply_block_mask(mask, plane, k_tile, tile_clear);
      scan.visible_begins.push_back(int32_t(scan.visible.size()));
      scan.clear_begins.push_back(int32_t(scan.clear.size()));
      scan.visible.insert(scan.visible.end(), tile_visible.begin(), tile_visible.end());
      scan.clear.insert(scan.clear.end(), tile_clear.begin(), tile_clear.end());
    }
  }
  scan.visible_begins.push_back(int32_t(scan.visible.size()));
  scan.clear_begins.push_back(int32_t(scan.clear.size()));
  return scan;
}

}  // namespace fm3::planner
