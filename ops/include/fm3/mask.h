// SPDX-License-Identifier: Apache-2.0
// The meaning of a column mask, stated once for every kernel, the schedule and the C++ tests.
// The Python twin is paddle_fm3/mask/column_mask.py; the dense Python oracle is derived separately.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define FM3_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define FM3_HOST_DEVICE inline
#endif

namespace fm3 {

// How the last axis of `startend_row_indices` is read. Only `bounds_at` looks at this.
enum class BoundForm : int32_t {
  kNone = 0,    // no indices: only `is_causal` hides anything
  kLower1 = 1,  // [LTS]                  rows [LTS, s_q) hidden        (causal, n = 1)
  kLower2 = 2,  // [LTS, LTE]             rows [LTS, LTE) hidden        (causal, n = 2)
  kOuter2 = 3,  // [LTS, UTE]             rows [LTS, s_q) and [0, UTE)  (not causal, n = 2)
  kBoth4 = 4,   // [LTS, LTE, UTS, UTE]   rows [LTS, LTE) and [UTS, UTE) (not causal, n = 4)
};

FM3_HOST_DEVICE int num_bounds(BoundForm form) {
  return form == BoundForm::kBoth4    ? 4
         : form == BoundForm::kLower1 ? 1
         : form == BoundForm::kNone   ? 0
                                      : 2;
}

// A mask as it is stored: O(s_k) integers, never a dense table.
struct MaskView {
  const int32_t* bounds;      // [b, h_mask, s_k, num_bounds(form)] contiguous; nullptr iff kNone
  const int32_t* block_mask;  // [b, h_mask, ceil(s_q/128), ceil(s_k/128)], 0 hides; may be nullptr
  BoundForm form;
  int32_t is_causal;  // 0 or 1; bottom-right aligned when s_q != s_k
  int32_t b, h_mask, s_q, s_k;
};

// Rows hidden from one key column: [lt_begin, lt_end) and [ut_begin, ut_end), each inside [0, s_q].
// An interval is empty iff begin >= end. They may overlap.
struct ColumnBounds {
  int32_t lt_begin, lt_end, ut_begin, ut_end;
};

FM3_HOST_DEVICE int32_t clip_row(int32_t row, int32_t s_q) {
  return row < 0 ? 0 : row > s_q ? s_q : row;
}

// `column` points at the num_bounds(form) integers of one key column.
FM3_HOST_DEVICE ColumnBounds expand_bounds(const int32_t* column, BoundForm form, int32_t s_q) {
  switch (form) {
    case BoundForm::kLower1:
      return {clip_row(column[0], s_q), s_q, 0, 0};
    case BoundForm::kLower2:
      return {clip_row(column[0], s_q), clip_row(column[1], s_q), 0, 0};
    case BoundForm::kOuter2:
      return {clip_row(column[0], s_q), s_q, 0, clip_row(column[1], s_q)};
    case BoundForm::kBoth4:
      return {clip_row(column[0], s_q), clip_row(column[1], s_q), clip_row(column[2], s_q),
              clip_row(column[3], s_q)};
    default:
      return {s_q, s_q, 0, 0};
  }
}

// First row that the causal rule lets see key `k_idx`: rows [0, causal_end) are hidden.
// Row q sees key k iff k <= q + (s_k - s_q).
FM3_HOST_DEVICE int32_t causal_end(int32_t k_idx, int32_t s_q, int32_t s_k) {
  return clip_row(k_idx - (s_k - s_q), s_q);
}

FM3_HOST_DEVICE bool hidden(int32_t q_idx, const ColumnBounds& column) {
  return (column.lt_begin <= q_idx && q_idx < column.lt_end) ||
         (column.ut_begin <= q_idx && q_idx < column.ut_end);
}

FM3_HOST_DEVICE bool hidden(int32_t q_idx, int32_t k_idx, const ColumnBounds& column,
                            bool is_causal, int32_t s_q, int32_t s_k) {
  return (is_causal && q_idx < causal_end(k_idx, s_q, s_k)) || hidden(q_idx, column);
}

constexpr int32_t kBlockMaskTile = 128;  // side of one block_mask entry, in rows and columns

}  // namespace fm3
