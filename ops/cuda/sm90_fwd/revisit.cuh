// SPDX-License-Identifier: Apache-2.0
// Rows whose output is not finite although their sums are: computed once more, key by key.
//
// In a partial step a hidden pair has P = 0, and 0 times a NaN or infinite *value* is NaN: it would
// pass into rows that do not see the key. A warp that finds such an output notes its block of 16 rows
// and, when its CTA has no tile left, computes the block again over visible keys only. Finite inputs
// cost one instruction for two output elements; where every value that is not finite is seen, a look at
// the partial items is all.
#pragma once

#include "tile_lists.cuh"

namespace fm3::sm90 {

constexpr int32_t kRevisitRows = 16;  // rows of one warp
constexpr int32_t kRevisitsPerTile = kTileQ / kRevisitRows;

// A warp's noted blocks, chained through `args.revisit_next`: no limit, no atomics. `head` is the
// block noted last, or kNoBlock; it lives in shared memory because the consumers have no register
// to spare.
constexpr int32_t kNoBlock = -1;

__device__ __forceinline__ void note_revisit(const FwdArgs& args, int32_t* head,
                                             int32_t block_idx) {
  if (threadIdx.x % 32 == 0) {
    args.revisit_next[block_idx] = *head;
    *head = block_idx;
  }
}

// Blocks are numbered [b, h_q, q tile, 16-row block]; first_row as if all tiles were of 128 rows.
__device__ __forceinline__ int32_t revisit_block(const FwdArgs& args, int32_t b_idx, int32_t h_idx,
                                                 int32_t first_row) {
  return ((b_idx * args.h_q + h_idx) * args.schedule.tiles.count) * kRevisitsPerTile +
         first_row / kRevisitRows;
}

// out[row] of one head by the whole warp; lse[row] is known. Lanes hold 32 keys of a chunk for the
// scores, then columns lane, lane + 32, ... of the output.
template <class T, int kHeadV>
__device__ __noinline__ void revisit_row(const FwdArgs& args, int32_t b_idx, int32_t h_idx,
                                         int32_t q_idx) {
  constexpr uint32_t kLanes = 0xFFFFFFFF;
  const int lane = threadIdx.x % 32;
  const MaskView& mask = args.mask;
  const int64_t list_idx = int64_t{b_idx} * mask.h_mask + mask_head(args, h_idx);
  const int32_t* bounds = mask.bounds + list_idx * mask.s_k * num_bounds(mask.form);
  const int32_t* block_row =
      mask.block_mask == nullptr
          ? nullptr
          : mask.block_mask +
                (list_idx * args.schedule.num_q_tiles + q_idx / kTileQ) * args.schedule.num_hulls;
  const int32_t h_kv_idx = h_idx / (args.h_q / args.h_kv);
  const T* q = static_cast<const T*>(args.q) + b_idx * args.stride_q.b + q_idx * args.stride_q.s +
               h_idx * args.stride_q.h;  // [d_qk]
  const T* k = static_cast<const T*>(args.k) + b_idx * args.stride_k.b +
               h_kv_idx * args.stride_k.h;  // [s_k, d_qk]
  const T* v = static_cast<const T*>(args.v) + b_idx * args.stride_v.b +
               h_kv_idx * args.stride_v.h;  // [s_k, d_v]
  const float lse = args.lse[(int64_t{b_idx} * args.h_q + h_idx) * args.s_q + q_idx];
  const float sign = args.needs_prescale ? args.prescale : 1.0f;

  float acc[(kHeadV + 31) / 32];
#pragma unroll
  for (float& value : acc) value = 0.0f;
  bool is_open = true;  // until every output of the row is NaN for good
  for (int32_t k_begin = 0; k_begin < mask.s_k && is_open; k_begin += 32) {
    const int32_t k_idx = k_begin + lane;
    bool is_visible =
        k_idx < mask.s_k && !(block_row != nullptr && block_row[k_idx / kBlockMaskTile] == 0);
    if (is_visible) is_visible = !covers(hidden_rows(mask, bounds, k_idx), q_idx, q_idx + 1);
    uint32_t todo = __ballot_sync(kLanes, is_visible);
    if (todo == 0) continue;
    float score = 0.0f;
    if (is_visible) {
      const T* key = k + k_idx * args.stride_k.s;
      for (int32_t idx = 0; idx < args.d_qk; idx += 8) {  // 16 bytes, as the tensor maps demand
        const uint4 own = *reinterpret_cast<const uint4*>(q + idx);
        const uint4 other = *reinterpret_cast<const uint4*>(key + idx);
        const T* own_elems = reinterpret_cast<const T*>(&own);
        const T* other_elems = reinterpret_cast<const T*>(&other);
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          score = fmaf(static_cast<float>(own_elems[e]), static_cast<float>(other_elems[e]), score);
        }
      }
    }
    const float weight = is_visible ? expf(sign * score * args.scale - lse) : 0.0f;
    for (; todo != 0; todo &= todo - 1) {
      const int source = __ffs(todo) - 1;
      const float own_weight = __shfl_sync(kLanes, weight, source);
      const T* value = v + (k_begin + source) * args.stride_v.s;
#pragma unroll
      for (int idx = 0; idx < (kHeadV + 31) / 32; ++idx) {
        const int32_t column = 32 * idx + lane;
        if (column < args.d_v) {
          acc[idx] = fmaf(own_weight, static_cast<float>(value[column]), acc[idx]);
        }
      }
    }
    bool is_lane_open = false;
#pragma unroll
    for (int idx = 0; idx < (kHeadV + 31) / 32; ++idx) {
      is_lane_open |= 32 * idx + lane < args.d_v && !isnan(acc[idx]);
    }
    is_open = __any_sync(kLanes, is_lane_open);
  }
  T* out = static_cast<T*>(args.out) + b_idx * args.stride_out.b + q_idx * args.stride_out.s +
           h_idx * args.stride_out.h;  // [d_v]
#pragma unroll
  for (int idx = 0; idx < (kHeadV + 31) / 32; ++idx) {
    const int32_t column = 32 * idx + lane;
    if (column < args.d_v) out[column] = static_cast<T>(acc[idx]);
  }
}

// Whether a value that some row in [q_begin, q_end) of a tile does not see, but whose step was computed for
// them, is not finite. If not, the outputs are what the visible values make them.
template <class T, class Config>
__device__ __noinline__ bool has_spoilt_value(const FwdArgs& args, int32_t b_idx, int32_t h_idx,
                                              int32_t q_tile_idx, int32_t q_begin, int32_t q_end) {
  const int lane = threadIdx.x % 32;
  const MaskView& mask = args.mask;
  const int64_t list_idx = mask_list(args, b_idx, h_idx);
  const int32_t* bounds = mask.bounds + list_idx * mask.s_k * num_bounds(mask.form);
  const int32_t* block_row =
      mask.block_mask == nullptr
          ? nullptr
          : mask.block_mask +
                (list_idx * args.schedule.num_q_tiles + q_tile_idx) * args.schedule.num_hulls;
  const T* v = static_cast<const T*>(args.v) + b_idx * args.stride_v.b +
               h_idx / (args.h_q / args.h_kv) * args.stride_v.h;  // [s_k, d_v]
  const Span* spans = tile_spans<Config>(args, list_idx, q_tile_idx);
  for (; spans->count() > 0; ++spans) {
    if (spans->is_full()) continue;
    // With any shift: a column too many costs time only.
    const int32_t k_end =
        min(spans->k_begin() + spans->count() * Config::kItemCols + kGranuleCols - 1, mask.s_k);
    for (int32_t k_begin = spans->k_begin(); k_begin < k_end; k_begin += 32) {
      const int32_t k_idx = k_begin + lane;
      float trace = 0.0f;  // NaN if a value is not finite
      if (k_idx < k_end && ((block_row != nullptr && block_row[k_idx / kBlockMaskTile] == 0) ||
                            touches(hidden_rows(mask, bounds, k_idx), q_begin, q_end))) {
        for (int32_t column = 0; column < args.d_v; ++column) {
          trace = fmaf(static_cast<float>(v[k_idx * args.stride_v.s + column]), 0.0f, trace);
        }
      }
      if (__any_sync(0xFFFFFFFF, trace != 0.0f)) return true;
    }
  }
  return false;
}

// Rows without a visible key, or whose sums are not finite, keep what they have.
template <class Config>
__device__ __forceinline__ void revisit(const FwdArgs& args, const int32_t* head) {
  using T = typename Config::T;
  __syncwarp();  // after the warp's own stores
  int32_t block_idx = *head;
  while (block_idx != kNoBlock) {
    const int32_t tile = block_idx / kRevisitsPerTile;
    const int32_t bh_idx = tile / args.schedule.tiles.count;
    const int32_t q_tile_idx = tile % args.schedule.tiles.count;
    const int64_t list_idx = mask_list(args, bh_idx / args.h_q, bh_idx % args.h_q);
    const int32_t first_row = tile_begin(args.schedule, list_idx, q_tile_idx, args.s_q) +
                              block_idx % kRevisitsPerTile * kRevisitRows;
    const int32_t end_row = min(first_row + kRevisitRows,
                                tile_begin(args.schedule, list_idx, q_tile_idx + 1, args.s_q));
    const bool is_spoilt = has_spoilt_value<T, Config>(args, bh_idx / args.h_q, bh_idx % args.h_q,
                                                       q_tile_idx, first_row, end_row);
    for (int32_t row = first_row; is_spoilt && row < end_row; ++row) {
      if (isfinite(args.lse[int64_t{bh_idx} * args.s_q + row])) {
        revisit_row<T, Config::kHeadV>(args, bh_idx / args.h_q, bh_idx % args.h_q, row);
      }
    }
    block_idx = args.revisit_next[block_idx];
  }
}

}  // namespace fm3::sm90
