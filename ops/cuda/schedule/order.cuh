// SPDX-License-Identifier: Apache-2.0
// Last pass: tiles, and pairs, by falling cost, and what all of them visit. Of a mask with cuts only the pairs that are
// walked, and once more the tiles that are in none of them.
#pragma once

#include "device_schedule.cuh"
#include "rank.cuh"

namespace fm3::sm90 {

// Which entries of the list's tiles or pairs an order has.
struct Ordered {
  const TileCost *tiles, *pairs;  // of the list
  int32_t num_tiles;
  bool of_pairs;
  bool
      is_chosen;  // only those that are walked: pairs that are worth it, and tiles that are in no such pair

  __device__ __forceinline__ const TileCost& entry(int32_t idx) const {
    return of_pairs ? pairs[idx] : tiles[idx];
  }
  // 0 if the order does not have it.
  __device__ __forceinline__ int32_t cost(int32_t idx) const {
    const int32_t halves = entry(idx).halves;
    if (!is_chosen) return halves;
    const int32_t pair = of_pairs ? idx : idx / 2;
    const bool is_walked =
        2 * pair + 1 < num_tiles &&
        is_worth_a_pair(pairs[pair].halves, tiles[2 * pair].halves, tiles[2 * pair + 1].halves);
    return is_walked == of_pairs ? halves : 0;
  }
};

// Grid: x over the lists of single tiles, then those of pairs, then the rest.
__global__ void __launch_bounds__(kRankThreads)
    order_kernel(ScheduleView schedule, uint32_t tile_ctas, uint32_t pair_ctas) {
  constexpr uint32_t kAllLanes = 0xFFFFFFFF;
  const bool is_rest = blockIdx.x >= tile_ctas + pair_ctas;
  const bool of_pairs = blockIdx.x >= tile_ctas && !is_rest;
  const bool has_cuts = schedule.totals->has_cuts();
  if (is_rest && !has_cuts) return;
  const uint32_t cta_idx = blockIdx.x - (is_rest    ? tile_ctas + pair_ctas
                                         : of_pairs ? tile_ctas
                                                    : 0);
  const int32_t count = of_pairs ? schedule.pairs.count : schedule.tiles.count;
  const uint32_t ctas_per_list = (count + kRankTiles - 1) / kRankTiles;
  const int64_t list_idx = cta_idx / ctas_per_list;
  const Ordered ordered = {schedule.tiles.costs + list_idx * schedule.tiles.count,
                           schedule.pairs.costs + list_idx * schedule.pairs.count,
                           schedule.tiles.count, of_pairs, has_cuts && (of_pairs || is_rest)};
  const int32_t begin = static_cast<int32_t>(cta_idx % ctas_per_list) * kRankTiles;
  const int32_t idx = begin + static_cast<int32_t>(threadIdx.x % 32);
  const bool is_entry = idx < count;
  const int32_t own_cost = is_entry ? ordered.cost(idx) : 0;
  unsigned long long sum = 0;
  const int32_t rank = rank_tiles(count, begin, own_cost, [&](int32_t other) {
    const int32_t cost = ordered.cost(other);
    sum += cost;
    return cost;
  });
  if (threadIdx.x < 32) {
    QueryTileEntry* const order = is_rest    ? schedule.rest
                                  : of_pairs ? schedule.pairs.order
                                             : schedule.tiles.order;
    if (is_entry) {
      const TileCost own = ordered.entry(idx);
      order[list_idx * count + rank] = {idx, own_cost > 0 ? own.list : ListHead{0}, own.rows};
    }
    // Those that cost nothing rank last: the first of them has as many before it as there are others.
    const int32_t most = __reduce_max_sync(kAllLanes, own_cost > 0 ? rank + 1 : 0);
    const int32_t fewest = __reduce_min_sync(kAllLanes, is_entry && own_cost == 0 ? rank : count);
    if (threadIdx.x == 0) {
      ScheduleTotals& totals = *schedule.totals;
      EntryCounts& counts = is_rest ? totals.rest : of_pairs ? totals.pairs : totals.tiles;
      if (most > 0) atomicMax(&counts.most, most);
      if (fewest < count) atomicMin(&counts.fewest, fewest);
    }
  }
  if (begin == 0 && !is_rest) {  // this CTA counts for its list
    for (int32_t distance = 16; distance > 0; distance /= 2) {
      sum += __shfl_xor_sync(kAllLanes, sum, distance);
    }
    if (threadIdx.x % 32 == 0 && sum != 0) {
      atomicAdd(of_pairs ? &schedule.totals->pair_halves : &schedule.totals->tile_halves, sum);
    }
  }
}

}  // namespace fm3::sm90
