// SPDX-License-Identifier: Apache-2.0
#include "ops/schedule/build_schedule.h"

#include <algorithm>
#include <vector>

namespace fm3 {
namespace {

using Runs = std::vector<RowRun>;

// Sorts by begin and joins runs that overlap or touch, so that what is left is maximal.
void merge_runs(Runs* runs) {
  const auto by_begin = [](const RowRun& x, const RowRun& y) { return x.begin < y.begin; };
  if (!std::is_sorted(runs->begin(), runs->end(), by_begin)) {
    std::sort(runs->begin(), runs->end(), by_begin);
  }
  size_t num_merged = 0;
  for (const RowRun& run : *runs) {
    if (run.begin >= run.end) continue;
    if (num_merged > 0 && run.begin <= (*runs)[num_merged - 1].end) {
      RowRun& last = (*runs)[num_merged - 1];
      last.end = std::max(last.end, run.end);
    } else {
      (*runs)[num_merged++] = run;
    }
  }
  runs->resize(num_merged);
}

// Appends the gaps that merged `runs` leave in [0, s_q).
void append_complement(const Runs& runs, int32_t s_q, Runs* gaps) {
  int32_t gap_begin = 0;
  for (const RowRun& run : runs) {
    if (gap_begin < run.begin) gaps->push_back({gap_begin, run.begin});
    gap_begin = run.end;
  }
  if (gap_begin < s_q) gaps->push_back({gap_begin, s_q});
}

// Keeps the longest kMaxRuns runs (on equal length the lower begin wins), ascending; rest {0, 0}.
void store_longest(Runs* runs, RowRun (&slots)[kMaxRuns]) {
  if (runs->size() > kMaxRuns) {
    std::stable_sort(runs->begin(), runs->end(), [](const RowRun& x, const RowRun& y) {
      return x.end - x.begin > y.end - y.begin;
    });
    runs->resize(kMaxRuns);
    std::sort(runs->begin(), runs->end(),
              [](const RowRun& x, const RowRun& y) { return x.begin < y.begin; });
  }
  for (int run_idx = 0; run_idx < kMaxRuns; ++run_idx) {
    slots[run_idx] = run_idx < static_cast<int>(runs->size()) ? (*runs)[run_idx] : RowRun{0, 0};
  }
}

// Buffers reused over tiles; each holds O(block_k) runs.
struct Scratch {
  Runs column;     // rows one column hides
  Runs any_hides;  // union of `column` over the tile
  Runs any_shows;  // union of the complements of `column`
  Runs complement;
};

KeyTileSummary summarize(const MaskView& mask, const int32_t* bounds, int32_t k_begin,
                         int32_t k_end, Scratch* scratch) {
  const int num_column_bounds = num_bounds(mask.form);
  const int32_t s_q = mask.s_q;
  scratch->any_hides.clear();
  scratch->any_shows.clear();
  RowRun previous[3] = {};
  for (int32_t k_idx = k_begin; k_idx < k_end; ++k_idx) {
    const ColumnBounds column =
        expand_bounds(bounds + int64_t{k_idx} * num_column_bounds, mask.form, s_q);
    const RowRun hidden_by[3] = {
        {0, mask.is_causal ? causal_end(k_idx, s_q, mask.s_k) : 0},
        {column.ut_begin, column.ut_end},
        {column.lt_begin, column.lt_end},
    };
    const bool is_repeat =
        k_idx > k_begin &&
        std::equal(hidden_by, hidden_by + 3, previous, [](const RowRun& x, const RowRun& y) {
          return x.begin == y.begin && x.end == y.end;
        });
    if (is_repeat) continue;
    std::copy(hidden_by, hidden_by + 3, previous);
    scratch->column.assign(hidden_by, hidden_by + 3);
    merge_runs(&scratch->column);
    scratch->any_hides.insert(scratch->any_hides.end(), scratch->column.begin(),
                              scratch->column.end());
    append_complement(scratch->column, s_q, &scratch->any_shows);
  }
  KeyTileSummary summary;
  // Claim:      hidden_runs are exactly the maximal runs of rows that every column hides, and
  //             clear_runs those that no column hides.
  // Because:    a row is hidden by all columns iff no column's complement holds it, and shown by
  //             all iff no column's hidden set holds it; gaps of a merged union are maximal.
  // Breaks if:  a column is skipped that differs from its neighbour, or a run is left unmerged.
  // Tested by:  test/cpu/test_c_abi_schedule.py (brute force and against schedule.py)
  merge_runs(&scratch->any_shows);
  scratch->complement.clear();
  append_complement(scratch->any_shows, s_q, &scratch->complement);
  store_longest(&scratch->complement, summary.hidden_runs);
  merge_runs(&scratch->any_hides);
  scratch->complement.clear();
  append_complement(scratch->any_hides, s_q, &scratch->complement);
  store_longest(&scratch->complement, summary.clear_runs);
  return summary;
}

const int32_t* head_bounds(const MaskView& mask, int32_t b_idx, int32_t h_mask_idx) {
  if (mask.form == BoundForm::kNone) return mask.bounds;
  const int64_t head = int64_t{b_idx} * mask.h_mask + h_mask_idx;
  return mask.bounds + head * mask.s_k * num_bounds(mask.form);
}

}  // namespace

KeyTileSummary summarize_key_tile(const MaskView& mask, int32_t b_idx, int32_t h_mask_idx,
                                  int32_t k_begin, int32_t k_end) {
  Scratch scratch;
  return summarize(mask, head_bounds(mask, b_idx, h_mask_idx), k_begin, k_end, &scratch);
}

void build_schedule(const MaskView& mask, int32_t block_k, KeyTileSummary* summaries) {
  Scratch scratch;
  for (int32_t b_idx = 0; b_idx < mask.b; ++b_idx) {
    for (int32_t h_idx = 0; h_idx < mask.h_mask; ++h_idx) {
      const int32_t* bounds = head_bounds(mask, b_idx, h_idx);
      for (int64_t k_begin = 0; k_begin < mask.s_k; k_begin += block_k) {
        const int64_t k_end = std::min<int64_t>(k_begin + block_k, mask.s_k);
        *summaries++ = summarize(mask, bounds, static_cast<int32_t>(k_begin),
                                 static_cast<int32_t>(k_end), &scratch);
      }
    }
  }
}

}  // namespace fm3
