// SPDX-License-Identifier: Apache-2.0
// Arguments of the row kernels: partial results of context parallelism become whole ones. All sums
// are float32, in the order given, so that they do not depend on timing. Narrow values are the
// bfloat16 or float16 of `dtype`.
#pragma once

#include <cstdint>

#include "fm3/params.h"

namespace fm3 {

constexpr int32_t kMaxParts = 48;       // one launch's partial results
constexpr int32_t kMostRowTensors = 2;  // of one launch of pack or sum_rows: K and V
constexpr int32_t kMostBeginWords = 3, kMostReadyWords = 8;
constexpr int32_t kMostKeyEnds = 8;
constexpr int32_t kIpcHandleBytes = 64;
constexpr int32_t kMaxCheckedOutputs = 3;

// out[i] = sum over p of parts[p][i].
struct SumPartsParams {
  DType dtype;  // of parts and out
  int32_t num_parts;
  int64_t num_elems;  // a multiple of 8
  const void* parts[kMaxParts];
  void* out;
};

// out[rows[r].out] = part[rows[r].part] + sum of the staged rows in its entries; for each of b
// batch entries.
struct SumRow {
  int32_t out, part;
  int32_t entry_begin, entry_end;  // into `entries`
};
struct SumRowsParams {
  DType dtype;                     // of part and narrow
  int32_t is_out_float32;          // otherwise out has `dtype`
  int32_t b, num_rows, row_elems;  // row_elems = h_kv * d, a multiple of 8
  const SumRow* rows;              // [num_rows], device memory
  const int32_t* entries;          // e >= 0: row e of narrow; e < 0: row -1 - e of wide
  const void* part;                // [b, *, row_elems]
  const void* narrow;              // [b, *, row_elems]; may be nullptr
  const float* wide;               // [b, *, row_elems]; may be nullptr
  void* out;                       // [b, *, row_elems]
  int64_t part_stride_b, narrow_stride_b, wide_stride_b, out_stride_b;  // elements
};

// to[b, s, :] = from[b, s, :, :]: own rows at the front of a key buffer.
struct PackParams {
  int32_t b, s, h, d;  // 2-byte elements; d a multiple of 8
  const void* from;    // [b, s, h, d]
  Strides stride_from;
  void* to;             // [b, *, h, d], rows contiguous
  int64_t to_stride_b;  // elements
};

// Words that a launch of pack writes, for streams and kernels anywhere to wait for: as stream operations they would cost
// more than the copy itself. In device memory or registered host memory.
struct PackWords {
  uint32_t* begins[kMostBeginWords];  // written as the launch begins; nullptr: none
  uint32_t begin_values[kMostBeginWords];
  int32_t num_ready;                 // up to kMostReadyWords
  uint32_t ready_value;              // of the first of them; one more for each that follows
  uint32_t* ready[kMostReadyWords];  // written when every GPU sees all rows
  uint32_t* num_done;                // device memory; 0 before the launch, and after
};

// Which query tiles a forward begins with while keys are on their way: key rows [0, k_ends[0]) are there, and others
// come in parts. Tiles that wait for no part come first, then those that wait for the first part only, and so on, the
// dearest of each first, until they visit enough; the others follow, of all lists the dearest first.
struct LocalFirst {
  int32_t num_ends;              // up to kMostKeyEnds
  int32_t num_cols;              // key columns of a list, of 128 query rows each, that are enough
  int32_t k_ends[kMostKeyEnds];  // ascending; the last part is behind them
};

// Attention over disjoint sets of keys becomes attention over all of them.
struct MergeParams {
  DType dtype;  // of parts and out
  int32_t num_parts;
  int32_t b, s_q, h_q, d_v;      // d_v a multiple of 8
  const void* parts[kMaxParts];  // [b, s_q, h_q, d_v] contiguous
  const float* lses[kMaxParts];  // [b, h_q, s_q]
  void* out;                     // [b, s_q, h_q, d_v]
  Strides stride_out;
  float* lse;  // [b, h_q, s_q]
};

// Whether results may be used: `given` still holds what was kept of it, and nothing has failed on the
// way. If not, the outputs become NaN; and where `given` differs, `word` becomes `number`.
struct CheckSameParams {
  int32_t sizes[4];  // one of them 0: nothing to compare
  int32_t num_outputs;
  const int32_t* given;
  int64_t stride_given[4];  // elements
  const int32_t* kept;      // contiguous
  const uint32_t*
      failed;       // registered host memory, not 0 once something has failed; may be nullptr
  uint32_t* claim;  // device memory; numbers of earlier calls that were not to be used
  uint32_t* word;   // registered host memory
  uint32_t number;  // of the call, from 1 on and rising
  void* outputs[kMaxCheckedOutputs];  // bfloat16, float16 or float32, at multiples of 16 bytes
  int64_t output_bytes[kMaxCheckedOutputs];  // multiples of 4
};

}  // namespace fm3
