// SPDX-License-Identifier: Apache-2.0
// First pass: the bounds, O(s_k), into summaries. One warp a hull, four neighbouring columns a lane.
#pragma once

#include "bound_summary.cuh"
#include "list_warp.cuh"

namespace fm3::sm90 {

constexpr int kScanThreads = 128;
constexpr int32_t kColsPerLane = kHullCols / 32, kLanesPerGranule = kGranuleCols / kColsPerLane;
constexpr int32_t kGranulesPerHull = kHullCols / kGranuleCols;

template <BoundForm kForm>
__global__ void __launch_bounds__(kScanThreads)
    scan_kernel(MaskView mask, ScheduleView schedule, int64_t num_blocks) {
  if (blockIdx.x == 0 && threadIdx.x == 0) *schedule.totals = {0, 0};
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
    if (k_begin + kColsPerLane <= mask.s_k && reinterpret_cast<uint64_t>(columns) % 16 == 0) {
      int4 raw[kNum];  // of kColsPerLane columns
#pragma unroll
      for (int idx = 0; idx < kNum; ++idx) raw[idx] = reinterpret_cast<const int4*>(columns)[idx];
#pragma unroll
      for (int col = 0; col < kColsPerLane; ++col) {
        summary.add(reinterpret_cast<const int32_t*>(raw) + col * kNum, mask, k_begin + col);
      }
    } else {
      for (int32_t col = 0; col < kColsPerLane && k_begin + col < mask.s_k; ++col) {
        summary.add(columns + col * kNum, mask, k_begin + col);
      }
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
