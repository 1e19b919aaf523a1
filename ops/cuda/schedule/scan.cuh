// SPDX-License-Identifier: Apache-2.0
// First pass: the bounds, O(s_k), into summaries. One warp a hull, four neighbouring columns a lane.
#pragma once

#include "bound_summary.cuh"
#include "cut_tiles.cuh"

namespace fm3::sm90 {

constexpr int kScanThreads = 128;
constexpr int32_t kColsPerLane = kHullCols / 32, kLanesPerGranule = kGranuleCols / kColsPerLane;
constexpr int32_t kGranulesPerHull = kHullCols / kGranuleCols;

// A bit a column of a warp's hull: it is a border. `rows`: first ones of the lane's columns, which begin at k_begin.
template <BoundForm kForm>
__device__ __forceinline__ void note_borders(const MaskView& mask, const ScheduleView& schedule,
                                             const int32_t* columns, int32_t k_begin,
                                             const Interval (&rows)[kColsPerLane],
                                             int64_t block_idx) {
  const auto lane = static_cast<int32_t>(threadIdx.x % 32);
  Interval before = {__shfl_up_sync(kWholeWarp, rows[kColsPerLane - 1].begin, 1),
                     __shfl_up_sync(kWholeWarp, rows[kColsPerLane - 1].end, 1)};
  if (lane == 0) {
    before = {0, 0};
    if (k_begin > 0) {
      before = first_rows(hidden_rows_of(columns - kNumBounds<kForm>, kForm, mask, k_begin - 1),
                          mask.s_q);
    }
  }
  uint32_t word = 0;
#pragma unroll
  for (int32_t col = 0; col < kColsPerLane; ++col) {
    if (is_border(col == 0 ? before : rows[col == 0 ? 0 : col - 1], rows[col])) {
      word |= 1u << (lane * kColsPerLane + col) % 32;
    }
  }
  constexpr int32_t kWordLanes = 32 / kColsPerLane;
#pragma unroll
  for (int32_t distance = 1; distance < kWordLanes; distance *= 2) {
    word |= __shfl_xor_sync(kWholeWarp, word, distance);
  }
  if (lane % kWordLanes == 0) {
    schedule.borders[block_idx * (kHullCols / 32) + lane / kWordLanes] = word;
  }
}

template <BoundForm kForm>
__global__ void __launch_bounds__(kScanThreads)
    scan_kernel(MaskView mask, ScheduleView schedule, int64_t num_blocks) {
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    const EntryCounts tiles = {0, schedule.tiles.count}, pairs = {0, schedule.pairs.count};
    *schedule.totals = {0, 0, 0, 0, tiles, pairs, tiles, 0};
  }
  if constexpr (kForm != BoundForm::kNone) {
    constexpr int kNum = kNumBounds<kForm>;
    const int64_t block_idx = int64_t{blockIdx.x} * (kScanThreads / 32) + threadIdx.x / 32;
    if (block_idx >= num_blocks) return;
    const int32_t lane = threadIdx.x % 32;
    const int64_t list_idx = block_idx / schedule.num_hulls;
    const int32_t k_begin =
        static_cast<int32_t>(block_idx % schedule.num_hulls) * kHullCols + lane * kColsPerLane;
    const int32_t* const columns = mask.bounds + (list_idx * mask.s_k + k_begin) * kNum;
    BoundSummary<kForm> summary;
    Interval rows[kColsPerLane];  // where tiles may leave the grid
    const auto add = [&](const int32_t* column, int32_t col) {
      summary.add(column, mask, k_begin + col);
      if (schedule.q_begins == nullptr) return;
      rows[col] = first_rows(hidden_rows_of(column, kForm, mask, k_begin + col), mask.s_q);
    };
    if (k_begin + kColsPerLane <= mask.s_k && reinterpret_cast<uint64_t>(columns) % 16 == 0) {
      int4 raw[kNum];  // of kColsPerLane columns
#pragma unroll
      for (int idx = 0; idx < kNum; ++idx) raw[idx] = reinterpret_cast<const int4*>(columns)[idx];
#pragma unroll
      for (int col = 0; col < kColsPerLane; ++col) {
        add(reinterpret_cast<const int32_t*>(raw) + col * kNum, col);
      }
    } else {
#pragma unroll
      for (int32_t col = 0; col < kColsPerLane; ++col) {
        rows[col] = {mask.s_q, 0};
        if (k_begin + col < mask.s_k) add(columns + col * kNum, col);
      }
    }
    if (schedule.q_begins != nullptr) {
      note_borders<kForm>(mask, schedule, columns, k_begin, rows, block_idx);
    }
#pragma unroll
    for (auto& range : summary.bounds) {
#pragma unroll
      for (int32_t distance = 1; distance < kLanesPerGranule; distance *= 2) {
        range.low = min(range.low, __shfl_xor_sync(kWholeWarp, range.low, distance));
        range.high = max(range.high, __shfl_xor_sync(kWholeWarp, range.high, distance));
      }
    }
    if (lane % kLanesPerGranule == 0) {
      static_cast<BoundSummary<kForm>*>(
          schedule.granules)[block_idx * kGranulesPerHull + lane / kLanesPerGranule] = summary;
    }
#pragma unroll
    for (auto& range : summary.bounds) {
      range.low = __reduce_min_sync(kWholeWarp, range.low);
      range.high = __reduce_max_sync(kWholeWarp, range.high);
    }
    if (lane == 0) static_cast<BoundSummary<kForm>*>(schedule.hulls)[block_idx] = summary;
  }
}

}  // namespace fm3::sm90
