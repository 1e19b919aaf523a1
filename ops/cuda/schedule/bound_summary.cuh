// SPDX-License-Identifier: Apache-2.0
// What some neighbouring key columns say about rows, and what follows for a query tile. Plain C++,
// tested on the host.
#pragma once

#include "device_schedule.cuh"

namespace fm3::sm90 {

template <BoundForm kForm>
constexpr int kNumBounds = kForm == BoundForm::kNone     ? 0
                           : kForm == BoundForm::kLower1 ? 1
                           : kForm == BoundForm::kBoth4  ? 4
                                                         : 2;
// Forms whose columns show one run of rows, [ut_end or the causal end, lt_begin).
template <BoundForm kForm>
constexpr bool kShowsOneRun = kForm != BoundForm::kLower2 && kForm != BoundForm::kBoth4;

// Least and greatest of each bound over the columns, the bounds in the form's order. With two free
// ends an empty interval has no begin and an end of -1, so that nothing is hidden by every column;
// one that joins what the causal rule hides begins at row 0; of two the one that ends with the rows
// comes last, so that neighbours differ little where the intervals change roles.
template <BoundForm kForm>
struct alignas(kNumBounds<kForm> == 1 ? 8 : 16) BoundSummary {
  struct Range {
    int32_t low = kNever, high = -kNever;
  };
  Range bounds[kNumBounds<kForm> == 0 ? 1 : kNumBounds<kForm>];

  FM3_HOST_DEVICE void add(const int32_t* column, const MaskView& mask, int32_t k_idx) {
    int32_t value[kNumBounds<kForm> + 1] = {};
#pragma unroll
    for (int idx = 0; idx < kNumBounds<kForm>; ++idx) value[idx] = clip_row(column[idx], mask.s_q);
    if constexpr (kShowsOneRun<kForm>) {
#pragma unroll
      for (int idx = 0; idx < kNumBounds<kForm>; ++idx) add(bounds[idx], value[idx]);
    } else {
      Interval first = {value[0], value[1]}, last = {0, 0};
      if constexpr (kForm == BoundForm::kBoth4) {
        last = {value[2], value[3]};
        if (first.end == mask.s_q && (last.begin >= last.end || last.end != mask.s_q)) {
          first = last, last = {value[0], value[1]};
        }
      }
      const int32_t causal = mask.is_causal ? causal_end(k_idx, mask.s_q, mask.s_k) : -1;
      add(0, first, causal);
      if constexpr (kForm == BoundForm::kBoth4) add(2, last, causal);
    }
  }

 private:
  FM3_HOST_DEVICE static void add(Range& range, int32_t value) {
    range.low = smaller(range.low, value), range.high = larger(range.high, value);
  }
  FM3_HOST_DEVICE void add(int idx, Interval rows, int32_t causal) {
    const bool is_empty = rows.begin >= rows.end;
    if (!is_empty) add(bounds[idx], rows.begin <= causal ? 0 : rows.begin);
    add(bounds[idx + 1], is_empty ? -1 : rows.end);
  }
};

// Whether a granule of 16 columns has a visible pair, and whether it has none but visible ones.
struct Verdict {
  bool is_visible_known, is_visible, is_full_known, is_full;
  FM3_HOST_DEVICE bool is_known() const { return is_visible_known && is_full_known; }
};

// Some row of [begin, end) is in neither of the two intervals; one begins at row 0.
FM3_HOST_DEVICE bool leaves_a_row(int32_t begin, int32_t end, const Interval& rows,
                                  int32_t rows_from_0) {
  int32_t reached = larger(begin, rows_from_0);
  if (rows.begin <= reached && reached < rows.end) reached = rows.end;
  return reached < end;
}

// What the summary of columns [k_begin, k_end) says of rows [q_begin, q_end), not empty, either of
// one granule, or of every granule of a whole hull (kIsHull).
// Claim:      what is called known is so, for every mask with these summaries.
// Because:    a row hidden by every column is hidden, a row hidden by no column is visible, and each
//             end of a range is the bound of some column, which shows the rows beside it that the
//             other intervals leave.
// Breaks if:  the summary was made of other bounds than the ones the kernel masks with.
// Tested by:  test/unit/test_sm90_spans.py (brute force over random masks)
template <BoundForm kForm, bool kIsHull>
FM3_HOST_DEVICE Verdict judge(const BoundSummary<kForm>& summary, const MaskView& mask,
                              int32_t k_begin, int32_t k_end, int32_t q_begin, int32_t q_end) {
  const auto causal = [&](int32_t k_idx) {
    return mask.is_causal ? causal_end(k_idx, mask.s_q, mask.s_k) : 0;
  };
  // The causal rule hides something of each granule iff it does of the first one's last column.
  const int32_t first_granule_end = causal(kIsHull ? k_begin + kGranuleCols - 1 : k_end - 1);
  bool is_hidden, is_seen, is_full, is_touched;
  if constexpr (kShowsOneRun<kForm>) {
    int32_t begin_low = causal(k_begin), begin_high = causal(k_end - 1);
    int32_t end_low = mask.s_q, end_high = mask.s_q;
    int32_t begin_touch = first_granule_end, begin_of_some = begin_low;
    if constexpr (kForm != BoundForm::kNone) {
      end_low = summary.bounds[0].low, end_high = summary.bounds[0].high;
    }
    if constexpr (kForm == BoundForm::kOuter2) {
      begin_of_some =
          mask.is_causal ? larger(begin_high, summary.bounds[1].high) : summary.bounds[1].low;
      begin_low = larger(begin_low, summary.bounds[1].low);
      begin_high = larger(begin_high, summary.bounds[1].high);
      begin_touch = larger(begin_touch, kIsHull ? summary.bounds[1].low : begin_high);
    }
    const auto meets = [&](int32_t begin, int32_t end) {
      return larger(q_begin, begin) < smaller(q_end, end);
    };
    is_hidden = !meets(begin_low, end_high);
    is_seen = kIsHull ? meets(begin_high, end_low)
                      : meets(begin_high, end_high) || meets(begin_of_some, end_low);
    is_full = begin_high <= q_begin && end_low >= q_end;
    is_touched = begin_touch > q_begin || (kIsHull ? end_high : end_low) < q_end;
  } else {
    using Range = typename BoundSummary<kForm>::Range;
    const Range &lt_begin = summary.bounds[0], &lt_end = summary.bounds[1];
    Range ut_begin{kNever, kNever}, ut_end{-1, -1};
    if constexpr (kForm == BoundForm::kBoth4) {
      ut_begin = summary.bounds[2], ut_end = summary.bounds[3];
    }
    const int32_t causal_high = causal(k_end - 1);
    const Interval lt = {lt_begin.low, lt_end.high}, ut = {ut_begin.low, ut_end.high};
    const HiddenRows common = {
        {lt_begin.high, lt_end.low}, {ut_begin.high, ut_end.low}, {0, causal(k_begin)}};
    const HiddenRows reach = {lt, ut, {0, causal_high}};
    is_hidden = covers(common, q_begin, q_end);
    is_seen = !covers(reach, q_begin, q_end);
    is_full = !touches(reach, q_begin, q_end);
    is_touched = first_granule_end > q_begin;
    if (kIsHull) {
      is_touched = is_touched || (lt_begin.high < q_end && lt_end.low > q_begin) ||
                   (ut_begin.high < q_end && ut_end.low > q_begin);
    } else {
      is_seen = is_seen || leaves_a_row(q_begin, smaller(q_end, lt_begin.high), ut, causal_high) ||
                leaves_a_row(larger(q_begin, lt_end.low), q_end, ut, causal_high) ||
                leaves_a_row(q_begin, smaller(q_end, ut_begin.high), lt, causal_high) ||
                leaves_a_row(larger(q_begin, ut_end.low), q_end, lt, causal_high);
      const auto surely = [&](const Interval& rows, const Range& begin, const Range& end) {
        return touches(rows, q_begin, q_end) && (rows.begin >= q_begin || rows.end <= q_end ||
                                                 begin.high < q_end || end.low > q_begin);
      };
      is_touched = is_touched || surely(lt, lt_begin, lt_end) || surely(ut, ut_begin, ut_end);
    }
  }
  return {is_hidden || is_seen, !is_hidden, is_full || is_hidden || is_touched,
          is_full && !is_hidden};
}

}  // namespace fm3::sm90
