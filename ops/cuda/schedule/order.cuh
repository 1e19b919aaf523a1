// SPDX-License-Identifier: Apache-2.0
// Last pass: tiles, and pairs, by falling cost, and what all of them visit.
#pragma once

#include "device_schedule.cuh"
#include "rank.cuh"

namespace fm3::sm90 {

// Grid: x over the lists of single tiles, then those of pairs.
__global__ void __launch_bounds__(kRankThreads)
    order_kernel(ScheduleView schedule, uint32_t tile_ctas) {
  const bool is_pair = blockIdx.x >= tile_ctas;
  const SpanLists lists = is_pair ? schedule.pairs : schedule.tiles;
  const uint32_t cta_idx = is_pair ? blockIdx.x - tile_ctas : blockIdx.x;
  const uint32_t ctas_per_list = (lists.count + kRankTiles - 1) / kRankTiles;
  const int64_t list_begin = int64_t{cta_idx / ctas_per_list} * lists.count;
  const int32_t tile_begin = static_cast<int32_t>(cta_idx % ctas_per_list) * kRankTiles;
  const int32_t tile_idx = tile_begin + static_cast<int32_t>(threadIdx.x % 32);
  const bool is_tile = tile_idx < lists.count;
  const TileCost own = is_tile ? lists.costs[list_begin + tile_idx] : TileCost{0, {0}, {}};
  unsigned long long sum = 0;
  const int32_t rank = rank_tiles(lists.count, tile_begin, own.items, [&](int32_t idx) {
    const int32_t items = lists.costs[list_begin + idx].items;
    sum += items;
    return items;
  });
  if (threadIdx.x < 32 && is_tile) lists.order[list_begin + rank] = {tile_idx, own.list, own.rows};
  if (tile_begin == 0) {  // this CTA counts for its list
    for (int32_t distance = 16; distance > 0; distance /= 2) {
      sum += __shfl_xor_sync(0xFFFFFFFF, sum, distance);
    }
    if (threadIdx.x % 32 == 0 && sum != 0) {
      atomicAdd(is_pair ? &schedule.totals->pair_items : &schedule.totals->tile_items, sum);
    }
  }
}

}  // namespace fm3::sm90
