// SPDX-License-Identifier: Apache-2.0
// Builds the device schedule in three launches: scan the bounds into hulls (O(s_k)), make each
// query tile's list of spans, order the tiles by falling cost.
#include "build.cuh"
#include "device_schedule.cuh"
#include "span_writer.cuh"

namespace fm3::sm90 {
namespace {

constexpr int kWarp = 32;
constexpr int kWarpsPerCta = 4;
constexpr uint32_t kAllLanes = 0xFFFFFFFF;

__device__ __forceinline__ const int32_t* bounds_of_list(const MaskView& mask, int64_t list_idx) {
  return mask.bounds + list_idx * mask.s_k * num_bounds(mask.form);
}

// --- 1. Hulls: one warp a block of 128 columns ---------------------------------------------------
__global__ void __launch_bounds__(kWarp* kWarpsPerCta)
    scan_kernel(MaskView mask, ScheduleView schedule, int64_t num_blocks) {
  const int64_t block_idx = int64_t{blockIdx.x} * kWarpsPerCta + threadIdx.x / kWarp;
  if (block_idx >= num_blocks) return;
  if (block_idx == 0 && threadIdx.x == 0) *schedule.totals = {0, 0};
  const int lane = threadIdx.x % kWarp;
  const int64_t list_idx = block_idx / schedule.num_hulls;
  const int32_t k_begin = static_cast<int32_t>(block_idx % schedule.num_hulls) * kHullCols;
  const int32_t* bounds = bounds_of_list(mask, list_idx);
  int32_t low[4] = {kNever, kNever, kNever, kNever}, high[4] = {-1, -1, -1, -1};
  // low/high of lt_begin, lt_end, ut_begin, ut_end
#pragma unroll
  for (int step = 0; step < kHullCols / kWarp; ++step) {
    const int32_t k_idx = k_begin + step * kWarp + lane;
    if (k_idx >= mask.s_k) continue;
    const ColumnBounds column =
        expand_bounds(bounds + int64_t{k_idx} * num_bounds(mask.form), mask.form, mask.s_q);
    const bool has_lt = column.lt_begin < column.lt_end, has_ut = column.ut_begin < column.ut_end;
    const int32_t value[4] = {has_lt ? column.lt_begin : kNever, has_lt ? column.lt_end : -1,
                              has_ut ? column.ut_begin : kNever, has_ut ? column.ut_end : -1};
#pragma unroll
    for (int idx = 0; idx < 4; ++idx) {
      low[idx] = min(low[idx], value[idx]);
      high[idx] = max(high[idx], value[idx]);
    }
  }
#pragma unroll
  for (int idx = 0; idx < 4; ++idx) {
    low[idx] = __reduce_min_sync(kAllLanes, low[idx]);
    high[idx] = __reduce_max_sync(kAllLanes, high[idx]);
  }
  if (lane == 0) {
    schedule.hulls[block_idx] = {low[0], high[0], low[1], high[1],
                                 low[2], high[2], low[3], high[3]};
  }
}

// --- 2. Spans: one warp a query tile, or a pair of them ------------------------------------------
template <bool kIsPair>
__device__ __forceinline__ void make_list(const MaskView& mask, const ScheduleView& schedule,
                                          int64_t tile_idx) {
  constexpr int kTiles = kIsPair ? 2 : 1;
  constexpr int32_t kGranulesPerHull = kHullCols / kGranuleCols;
  constexpr uint32_t kHullOnes = (1u << kGranulesPerHull) - 1;
  static_assert(kTileQ == kBlockMaskTile && kHullCols == kBlockMaskTile);
  const SpanLists& lists = kIsPair ? schedule.pairs : schedule.tiles;
  const int lane = threadIdx.x % kWarp;
  const int64_t list_idx = tile_idx / lists.count;
  const int32_t q_tile_idx = static_cast<int32_t>(tile_idx % lists.count) * kTiles;
  const int32_t q_begin = q_tile_idx * kTileQ;
  const int32_t q_end = min(q_begin + kTiles * kTileQ, mask.s_q);
  const int32_t* bounds = bounds_of_list(mask, list_idx);
  const ColumnHull* hulls = schedule.hulls + list_idx * schedule.num_hulls;
  SpanWriter writer(lists.spans + tile_idx * schedule.max_spans, lane == 0,
                    kIsPair ? kPairItemCols : kTileItemCols);

  for (int32_t chunk = 0; chunk < schedule.num_hulls; chunk += kWarp) {
    const int32_t hull_idx = chunk + lane;
    const int32_t k_begin = hull_idx * kHullCols;
    HullClass hull_class = HullClass::kSkip;
    bool is_kept = false;  // by the block_mask of every tile
    if (hull_idx < schedule.num_hulls) {
      int32_t num_kept = 0;
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const int32_t row = q_tile_idx + tile;
        if (row < schedule.num_q_tiles &&
            (mask.block_mask == nullptr ||
             mask.block_mask[(list_idx * schedule.num_q_tiles + row) * schedule.num_hulls +
                             hull_idx] != 0)) {
          ++num_kept;
        }
      }
      const int32_t k_end = min(k_begin + kHullCols, mask.s_k);
      if (num_kept > 0) {
        hull_class = classify(hulls[hull_idx], mask, k_begin, k_end, q_begin, q_end);
      }
      is_kept = num_kept == kTiles;
      // Columns past s_k are never visible.
      const bool is_whole = k_end - k_begin == kHullCols && is_kept;
      if (!is_whole && hull_class == HullClass::kFull) hull_class = HullClass::kPartial;
    }
    uint32_t visible = hull_class == HullClass::kSkip ? 0 : kHullOnes;  // bit: granule
    uint32_t full = hull_class == HullClass::kFull ? kHullOnes : 0;

    for (uint32_t todo = __ballot_sync(kAllLanes, hull_class == HullClass::kPartial); todo != 0;
         todo &= todo - 1) {
      const int source = __ffs(todo) - 1;
      uint32_t visible_bits = 0, full_bits = 0;
#pragma unroll
      for (int step = 0; step < kHullCols / kWarp; ++step) {
        const int32_t k_idx = (chunk + source) * kHullCols + step * kWarp + lane;
        bool is_hidden = true, is_clear = false;
        if (k_idx < mask.s_k) {
          const HiddenRows rows = hidden_rows(mask, bounds, k_idx);
          is_hidden = covers(rows, q_begin, q_end);
          is_clear = !touches(rows, q_begin, q_end);
        }
        const uint32_t shown = __ballot_sync(kAllLanes, !is_hidden);
        const uint32_t clear = __ballot_sync(kAllLanes, is_clear);
#pragma unroll
        for (int part = 0; part < kWarp / kGranuleCols; ++part) {
          constexpr uint32_t kOnes = (1u << kGranuleCols) - 1;
          const int granule = step * (kWarp / kGranuleCols) + part;
          if ((shown >> (part * kGranuleCols) & kOnes) != 0) visible_bits |= 1u << granule;
          if ((clear >> (part * kGranuleCols) & kOnes) == kOnes) full_bits |= 1u << granule;
        }
      }
      if (lane == source) visible = visible_bits, full = is_kept ? full_bits : 0;
    }

    // All lanes walk the chunk together; runs of hulls that cannot change the state are jumped.
    const uint32_t all_full = __ballot_sync(kAllLanes, full == kHullOnes);
    const uint32_t all_hidden = __ballot_sync(kAllLanes, visible == 0);
    for (int step = 0; step < kWarp;) {
      const int32_t granule_begin = (chunk + step) * kGranulesPerHull;
      const uint32_t jump = writer.wants_only_full_end()       ? all_full >> step
                            : writer.is_idle_at(granule_begin) ? all_hidden >> step
                                                               : 0;
      if (jump & 1) {
        step += ~jump == 0 ? kWarp : __ffs(~jump) - 1;
        continue;
      }
      const uint32_t visible_bits = __shfl_sync(kAllLanes, visible, step);
      const uint32_t full_bits = __shfl_sync(kAllLanes, full, step);
      for (int granule = 0; granule < kGranulesPerHull; ++granule) {
        writer.granule(granule_begin + granule, visible_bits >> granule & 1,
                       full_bits >> granule & 1);
      }
      ++step;
    }
  }
  writer.finish(schedule.num_hulls * kGranulesPerHull);
  if (lane == 0) {
    lists.costs[tile_idx] = {writer.num_items(), writer.num_spans()};
    atomicAdd(kIsPair ? &schedule.totals->pair_items : &schedule.totals->tile_items,
              static_cast<unsigned long long>(writer.num_items()));
  }
}

__global__ void __launch_bounds__(kWarp* kWarpsPerCta)
    list_kernel(MaskView mask, ScheduleView schedule, int64_t num_tiles, int64_t num_pairs) {
  const int64_t idx = int64_t{blockIdx.x} * kWarpsPerCta + threadIdx.x / kWarp;
  if (idx < num_pairs) {
    make_list<true>(mask, schedule, idx);
  } else if (idx < num_pairs + num_tiles) {
    make_list<false>(mask, schedule, idx - num_pairs);
  }
}

// --- 3. Order: rank of each tile among those of its list -----------------------------------------
constexpr int kOrderThreads = 256;

// Grid: x over the lists of single tiles, then those of pairs.
__global__ void __launch_bounds__(kOrderThreads)
    order_kernel(ScheduleView schedule, uint32_t tile_ctas) {
  __shared__ int32_t smem_cost[kOrderThreads];
  const bool is_pair = blockIdx.x >= tile_ctas;
  const SpanLists lists = is_pair ? schedule.pairs : schedule.tiles;
  const uint32_t cta_idx = is_pair ? blockIdx.x - tile_ctas : blockIdx.x;
  const uint32_t ctas_per_list = (lists.count + kOrderThreads - 1) / kOrderThreads;
  const int64_t list_begin = int64_t{cta_idx / ctas_per_list} * lists.count;
  const int32_t tile_idx = cta_idx % ctas_per_list * kOrderThreads + threadIdx.x;
  const bool is_tile = tile_idx < lists.count;
  const TileCost own = is_tile ? lists.costs[list_begin + tile_idx] : TileCost{0, 0};
  int32_t rank = 0;
  for (int32_t base = 0; base < lists.count; base += kOrderThreads) {
    const int32_t other_idx = base + threadIdx.x;
    smem_cost[threadIdx.x] =
        other_idx < lists.count ? lists.costs[list_begin + other_idx].items : -1;
    __syncthreads();
    const int32_t others = min(kOrderThreads, lists.count - base);
    for (int idx = 0; idx < others; ++idx) {
      const int32_t cost = smem_cost[idx];
      rank += cost > own.items || (cost == own.items && base + idx < tile_idx);
    }
    __syncthreads();
  }
  if (is_tile) lists.order[list_begin + rank] = {tile_idx, own.spans};
}

int32_t div_up(int64_t value, int64_t divisor) {
  return static_cast<int32_t>((value + divisor - 1) / divisor);
}

}  // namespace

int64_t schedule_bytes(const MaskView& mask) { return schedule_layout(mask, nullptr, nullptr); }

cudaError_t build_schedule(const MaskView& mask, void* blob, cudaStream_t stream) {
  ScheduleView schedule;
  schedule_layout(mask, blob, &schedule);
  const int64_t num_lists = int64_t{mask.b} * mask.h_mask;
  const int64_t num_blocks = num_lists * schedule.num_hulls;
  const int64_t num_tiles = num_lists * schedule.tiles.count;
  const int64_t num_pairs = num_lists * schedule.pairs.count;
  if (num_blocks == 0 || num_tiles == 0) return cudaSuccess;
  constexpr int kThreads = kWarp * kWarpsPerCta;
  scan_kernel<<<div_up(num_blocks, kWarpsPerCta), kThreads, 0, stream>>>(mask, schedule,
                                                                         num_blocks);
  list_kernel<<<div_up(num_tiles + num_pairs, kWarpsPerCta), kThreads, 0, stream>>>(
      mask, schedule, num_tiles, num_pairs);
  const auto ctas = [&](const SpanLists& lists) {
    return static_cast<uint32_t>(num_lists * div_up(lists.count, kOrderThreads));
  };
  order_kernel<<<ctas(schedule.tiles) + ctas(schedule.pairs), kOrderThreads, 0, stream>>>(
      schedule, ctas(schedule.tiles));
  return cudaGetLastError();
}

}  // namespace fm3::sm90
