// SPDX-License-Identifier: Apache-2.0
#include "localize.h"

namespace fm3::planner {
namespace {

// loc(r): how many of the rank's rows have a global index below r, for r in [0, s].
//
// Claim:      { local l : loc(begin) <= l < loc(end) } is exactly the rank's rows inside [begin, end).
// Because:    local order is ascending global order, so local l is the row x with loc(x) = l and x owned;
//             loc is monotone and steps by one right after each owned row, hence x in [begin, end) iff
//             loc(begin) <= l < loc(end).
// Breaks if:  a rank's local rows are not in ascending global order (Partition rules it out).
// Tested by:  test/unit/test_localize_native.py::test_ten_thousand_masks_against_dense
struct LocalRows {
  // loc(r) = before[r >> shift] + ((r & low_bits) & owned[r >> shift]): one entry for each 2^shift rows, the largest
  // power of two that divides every chunk's first row.
  std::vector<int32_t> before, owned;
  int32_t shift, low_bits, count = 0;

  LocalRows(const ChunkGrid& grid, const std::vector<int32_t>& chunk_ranks, int32_t rank) {
    uint32_t bits = 1u << 30;
    for (int32_t chunk = 1; chunk < grid.num_chunks(); ++chunk) bits |= uint32_t(grid.begin(chunk));
    shift = __builtin_ctz(bits);
    low_bits = (1 << shift) - 1;
    for (int32_t chunk = 0; chunk < grid.num_chunks(); ++chunk) {
      const bool is_own = chunk_ranks[chunk] == rank;
      for (int32_t row = grid.begin(chunk); row < grid.end(chunk); row += low_bits + 1) {
        before.push_back(count);
        owned.push_back(is_own ? -1 : 0);
        count += is_own ? std::min(low_bits + 1, grid.end(chunk) - row) : 0;
      }
    }
    before.push_back(count);  // r = s; if s cuts the last entry short, that one already serves
    owned.push_back(0);
  }

  int32_t at(int32_t row) const {
    return before[row >> shift] + ((row & low_bits) & owned[row >> shift]);
  }
};

__attribute__((target_clones("avx512f", "avx2", "default"))) void localize_rows(
    const int32_t* __restrict rows, int32_t* __restrict out, int64_t count,
    const int32_t* __restrict before, const int32_t* __restrict owned, int32_t shift,
    int32_t low_bits) {
  for (int64_t i = 0; i < count; ++i) {
    out[i] = before[rows[i] >> shift] + ((rows[i] & low_bits) & owned[rows[i] >> shift]);
  }
}

// Rows [0, prefix_end) joined with two intervals, written as two again. False if three remain apart.
bool fold_prefix(int32_t prefix_end, Run& lt, Run& ut) {
  if (prefix_end <= 0) return true;
  RunSet hidden;
  hidden.insert({0, prefix_end});
  hidden.insert(lt);
  hidden.insert(ut);
  const std::vector<Run>& runs = hidden.runs();
  if (runs.size() > 2) return false;
  ut = runs[0];
  lt = runs.size() > 1 ? runs[1] : Run{0, 0};
  return true;
}

}  // namespace

std::string localize(const MaskColumns& mask, const ChunkGrid& grid,
                     const std::vector<int32_t>& chunk_ranks, int32_t rank,
                     const std::vector<KeyRange>& keys, const LocalBounds& out) {
  const LocalRows loc(grid, chunk_ranks, rank);
  int64_t num_keys = 0;
  for (const KeyRange& range : keys) num_keys += range.num_rows;
  for (int32_t plane = 0; plane < mask.num_planes; ++plane) {
    int64_t to = plane * num_keys;
    for (const KeyRange& range : keys) {
      const int64_t from = int64_t(plane) * mask.s_k + range.k_begin;
      const auto write = [&](const int32_t* bound, int32_t* local) {
        localize_rows(bound + from, local + to, range.num_rows, loc.before.data(), loc.owned.data(),
                      loc.shift, loc.low_bits);
      };
      write(mask.lt_begin, out.lt_begin);
      write(mask.lt_end, out.lt_end);
      write(mask.ut_begin, out.ut_begin);
      write(mask.ut_end, out.ut_end);
      for (int32_t i = 0; mask.is_causal && i < range.num_rows; ++i) {
        const int32_t prefix_end = loc.at(mask.causal_end(range.k_begin + i));
        const int64_t at = to + i;
        Run lt{out.lt_begin[at], out.lt_end[at]}, ut{out.ut_begin[at], out.ut_end[at]};
        if (ut.begin >= ut.end && (lt.begin >= lt.end || lt.begin > prefix_end)) {
          ut = {0, prefix_end};  // the usual causal column, kept out of the general fold
        } else if (!fold_prefix(prefix_end, lt, ut)) {
          return "key column k=" + std::to_string(range.k_begin + i) + " (plane " +
                 std::to_string(plane) + ") hides local rows [0, " + std::to_string(prefix_end) +
                 ") by the causal rule, [" + std::to_string(lt.begin) + ", " +
                 std::to_string(lt.end) + ") and [" + std::to_string(ut.begin) + ", " +
                 std::to_string(ut.end) + "); a column holds at most two intervals";
        }
        out.lt_begin[at] = lt.begin;
        out.lt_end[at] = lt.end;
        out.ut_begin[at] = ut.begin;
        out.ut_end[at] = ut.end;
      }
      to += range.num_rows;
    }
  }
  return "";
}

}  // namespace fm3::planner
