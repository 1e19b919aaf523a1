// SPDX-License-Identifier: Apache-2.0
// Order by falling cost: the rank of a tile is the number of tiles that come before it.
#pragma once

#include <cstdint>

namespace fm3::sm90 {

constexpr int kRankThreads = 512, kRankWarps = kRankThreads / 32;
constexpr int32_t kRankTiles = 32;     // that a CTA ranks, a lane each
constexpr int32_t kRankOthers = 2048;  // that it ranks them among at a time

// For a whole CTA of kRankThreads; every warp brings the costs (0 <= cost < 2^20) of tiles
// [tile_begin, tile_begin + 32), a lane each, and warp 0 gets their ranks among all `count` of the
// list, equal ones in their order. cost_of(idx) is called once for each tile of the list, by some
// thread. The warps count in different parts of the list.
template <class CostOf>
__device__ __forceinline__ int32_t rank_tiles(int32_t count, int32_t tile_begin, int32_t own_cost,
                                              CostOf cost_of) {
  __shared__ int4 smem_keys[kRankOthers / 4];
  __shared__ int32_t smem_rank[kRankWarps][kRankTiles];
  const int32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int32_t rank = 0;
  for (int32_t base = 0; base < count; base += kRankOthers) {
    __syncthreads();
    for (int32_t idx = threadIdx.x; idx < kRankOthers; idx += kRankThreads) {
      // Of equal ones the later has the lesser key.
      reinterpret_cast<int32_t*>(smem_keys)[idx] =
          base + idx < count ? cost_of(base + idx) * kRankOthers + kRankOthers - 1 - idx : -1;
    }
    __syncthreads();
    const int32_t place = min(max(tile_begin + lane - base, 0), kRankOthers);
    const int32_t own_key = own_cost * kRankOthers + kRankOthers - 1 - place;
    const int32_t num_quads = (min(kRankOthers, count - base) + 3) / 4;
#pragma unroll 4
    for (int32_t quad = warp; quad < num_quads; quad += kRankWarps) {
      const int4 keys = smem_keys[quad];
      rank += (keys.x > own_key) + (keys.y > own_key) + (keys.z > own_key) + (keys.w > own_key);
    }
  }
  smem_rank[warp][lane] = rank;
  __syncthreads();
  if (warp == 0) {
    for (int32_t idx = 1; idx < kRankWarps; ++idx) rank += smem_rank[idx][lane];
  }
  return rank;
}

}  // namespace fm3::sm90
