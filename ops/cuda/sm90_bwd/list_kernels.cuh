// SPDX-License-Identifier: Apache-2.0
// The last two of the four passes that make a mask's lists: which row tiles each key tile visits. Their own test runs
// them on the host (test/unit/test_sm90_bwd_lists.py).
#pragma once

#include "../schedule/rank.cuh"
#include "cut_kernels.cuh"

namespace fm3::sm90_bwd {

// --- Third pass: rows hidden from each key; what each key tile visits ------------------------------
// Least and greatest bounds of keys [k_begin, k_end), in all lanes; the scan of the forward's schedule has no
// summary of 64 keys, and to read it would take longer than the bounds do. `maybe_rows`: where the rows hidden
// from each key of the tile go, everything for those it lacks.
template <BoundForm kForm>
__device__ __forceinline__ sm90::BoundSummary<kForm> read_keys(const MaskView& mask,
                                                               int64_t mask_idx, int32_t k_begin,
                                                               int32_t k_end, int32_t block_k,
                                                               KeyRows* maybe_rows) {
  const int32_t* const bounds = mask.bounds + mask_idx * mask.s_k * sm90::kNumBounds<kForm>;
  const int32_t padded_rows = mask.s_q + kBlockQ - 1;  // wherever the last row tile begins
  sm90::BoundSummary<kForm> keys;
  for (int32_t idx = threadIdx.x % 32; idx < block_k; idx += 32) {
    const int32_t k_idx = k_begin + idx;
    KeyRows rows = {0, mask.s_q, 0, 0};
    if (k_idx < k_end) {
      if constexpr (kForm != BoundForm::kNone) {
        keys.add(bounds + int64_t{k_idx} * sm90::kNumBounds<kForm>, mask, k_idx);
      }
      const TwoIntervals folded =
          fold_causal(sm90::hidden_rows(mask, bounds, k_idx), mask.is_causal, mask.s_q);
      rows = {folded.lt_begin, folded.lt_end, folded.ut_begin, folded.ut_end};
    }
    // With the last row, those past it: of a hidden key that is not finite their scores, 0 times that, would be NaN.
    if (rows.y == mask.s_q) rows.y = padded_rows;
    if (rows.w == mask.s_q) rows.w = padded_rows;
    if (maybe_rows != nullptr) maybe_rows[idx] = rows;
  }
#pragma unroll
  for (auto& range : keys.bounds) {
    range.low = __reduce_min_sync(kWholeWarp, range.low);
    range.high = __reduce_max_sync(kWholeWarp, range.high);
  }
  return keys;
}

// One warp a key tile: a lane judges the 32 row tiles of one chunk at once, and what remains open is
// looked at row tile by row tile, a lane each.
template <BoundForm kForm>
__device__ __forceinline__ void list_visits(const MaskView& mask, const MaskLists& lists,
                                            const TileLists& tiles, int64_t tile_idx,
                                            bool writes_bounds) {
  const int32_t lane = threadIdx.x % 32;
  const auto mask_idx = static_cast<int32_t>(tile_idx / tiles.num_k_tiles);
  const auto k_tile_idx = static_cast<int32_t>(tile_idx % tiles.num_k_tiles);
  int32_t* const k_begins = tiles.k_begins + tile_idx + mask_idx;
  int32_t k_begin = k_tile_idx * tiles.block_k;
  int32_t k_end = k_begin + smaller(mask.s_k - k_begin, tiles.block_k);
  if (lists.num_border_words > 0) {
    k_begin = k_begins[0], k_end = k_begins[1];
  } else if (lane == 0) {  // on the grid
    k_begins[0] = k_begin;
    if (k_end == mask.s_k) k_begins[1] = k_end;
    if (k_tile_idx == 0) tiles.num_tiles[mask_idx] = tiles.num_k_tiles;
  }
  // The last pass counts there.
  if (k_tile_idx == 0 && lane == 0) tiles.shared_rows[mask_idx] = 0;
  KeyRows* const rows = tiles.bounds + int64_t{mask_idx} * tiles.num_hulls * kHullK +
                        int64_t{k_tile_idx} * tiles.block_k;
  const auto keys = read_keys<kForm>(mask, mask_idx, k_begin, k_end, tiles.block_k,
                                     writes_bounds ? rows : nullptr);
  const int32_t num_q_tiles =
      lists.q_tiles == nullptr ? lists.num_q_tiles : lists.q_tiles[mask_idx];
  const auto rows_of_tile = [&](int32_t q_tile_idx) {
    return row_tile(lists.q_rows, int64_t{mask_idx} * lists.num_q_tiles, q_tile_idx, mask.s_q);
  };
  // First row of chunk `chunk`, s_q behind the last.
  const auto chunk_begin = [&](int32_t chunk) {
    return chunk < lists.num_q_chunks ? rows_of_tile(chunk * 32).first : mask.s_q;
  };
  StepBits* const bits = tiles.step_bits + tile_idx * lists.num_q_chunks;
  int32_t num_steps = 0, first_chunk = 0, end_chunk = 0;
  for (int32_t base = 0; base < lists.num_q_chunks; base += 32) {
    const int32_t own_chunk = base + lane;
    StepBits own = {0, 0};
    bool is_open = false;
    const int32_t num_rows = smaller(num_q_tiles - own_chunk * 32, 32);
    const int32_t chunk_rows[2] = {chunk_begin(own_chunk), chunk_begin(own_chunk + 1)};
    if (num_rows > 0 && k_begin < k_end) {
      const StepClass all = classify_rows<kForm>(mask, keys, k_begin, k_end, tiles.block_k,
                                                 chunk_rows[0], chunk_rows[1]);
      if (all == StepClass::kFull) own.visited = ~0u >> (32 - num_rows);
      is_open =
          all == StepClass::kPartial || (all == StepClass::kFull && mask.block_mask != nullptr);
    }
    for (uint32_t open = __ballot_sync(kWholeWarp, is_open); open != 0; open &= open - 1) {
      const int32_t chunk_lane = __ffs(open) - 1;
      const int32_t q_tile_idx = (base + chunk_lane) * 32 + lane;
      StepClass step = StepClass::kSkip;
      // Without a cut in the chunk rows need not be looked up.
      const int32_t first = __shfl_sync(kWholeWarp, chunk_rows[0], chunk_lane);
      const int32_t last = __shfl_sync(kWholeWarp, chunk_rows[1], chunk_lane);
      if (q_tile_idx < num_q_tiles) {
        const TilePair rows = last - first == 32 * kBlockQ
                                  ? TilePair{first + lane * kBlockQ, first + (lane + 1) * kBlockQ}
                                  : rows_of_tile(q_tile_idx);
        if (!is_dropped(mask, mask_idx, k_begin, rows.first)) {
          step = classify_rows<kForm>(mask, keys, k_begin, k_end, tiles.block_k, rows.first,
                                      rows.last);
        }
      }
      const uint32_t visited = __ballot_sync(kWholeWarp, step != StepClass::kSkip);
      const uint32_t partial = __ballot_sync(kWholeWarp, step == StepClass::kPartial);
      if (lane == chunk_lane) own = {visited, partial};
    }
    if (own_chunk < lists.num_q_chunks) bits[own_chunk] = own;
    num_steps += __popc(own.visited);
    const uint32_t visiting = __ballot_sync(kWholeWarp, own.visited != 0);
    if (visiting != 0) {
      if (end_chunk == 0) first_chunk = base + __ffs(visiting) - 1;
      end_chunk = base + 32 - __clz(visiting);
    }
  }
  num_steps = __reduce_add_sync(kWholeWarp, num_steps);
  __syncwarp();  // lane 0 reads what the others wrote
  if (lane != 0) return;
  tiles.tile_steps[tile_idx] = num_steps;
  tiles.step_chunks[tile_idx] = {first_chunk, end_chunk};
  // The row tile a walk is at after a few steps, from either end.
  TilePair sample = {-1, -1};
  if (num_steps > 0) {
    int32_t left = smaller(kSampleStep, num_steps - 1), chunk = first_chunk;
    for (; left >= __popc(bits[chunk].visited); ++chunk) left -= __popc(bits[chunk].visited);
    uint32_t steps = bits[chunk].visited;
    for (; left > 0; --left) steps &= steps - 1;
    sample.first = chunk * 32 + __ffs(steps) - 1;
    left = smaller(kSampleStep, num_steps - 1), chunk = end_chunk - 1;
    for (; left >= __popc(bits[chunk].visited); --chunk) left -= __popc(bits[chunk].visited);
    steps = bits[chunk].visited;
    for (; left > 0; --left) steps ^= 1u << (31 - __clz(steps));
    sample.last = chunk * 32 + 31 - __clz(steps);
  }
  tiles.sample_rows[tile_idx] = sample;
}

// Grid: num_tile_lists * visit_ctas.
template <BoundForm kForm>
__global__ void __launch_bounds__(kVisitThreads)
    visit_kernel(const MaskView mask, const MaskLists lists, const ListGrids grids) {
  const uint32_t size_idx = blockIdx.x / grids.visit_ctas, cta_idx = blockIdx.x % grids.visit_ctas;
  const TileLists& tiles = lists.tiles[size_idx];
  const int64_t tile_idx = int64_t{cta_idx} * kVisitWarps + threadIdx.x / 32;
  if (tile_idx < grids.num_masks * tiles.num_k_tiles) {
    list_visits<kForm>(mask, lists, tiles, tile_idx, size_idx == 0 || lists.num_border_words > 0);
  }
}

// --- Fourth pass: key tiles by length; who visits each row tile ------------------------------------
// What the key tiles of a list visit. A whole CTA; the result is thread 0's.
__device__ __forceinline__ VisitSummary summarize(const TileLists& tiles, int64_t mask_idx) {
  __shared__ int32_t smem_sums[5];
  __shared__ unsigned long long smem_steps;
  if (threadIdx.x < 5) smem_sums[threadIdx.x] = 0;
  if (threadIdx.x == 0) smem_steps = 0;
  __syncthreads();
  const int64_t tiles_begin = mask_idx * tiles.num_k_tiles;
  const int32_t num_tiles = tiles.num_tiles[mask_idx];
  unsigned long long num_steps = 0;
  int32_t max_steps = 0, max_late_steps = 0;
  int32_t num_visiting = 0, num_apart_up = 0, num_apart_down = 0;
  for (int32_t idx = threadIdx.x; idx < num_tiles; idx += sm90::kRankThreads) {
    const int32_t steps = tiles.tile_steps[tiles_begin + idx];
    num_steps += steps;
    max_steps = larger(max_steps, steps);
    if (idx >= num_tiles / 2) max_late_steps = larger(max_late_steps, steps);
    num_visiting += steps > 0;
    const TilePair own = tiles.sample_rows[tiles_begin + idx];
    const TilePair next = idx + 1 < num_tiles ? tiles.sample_rows[tiles_begin + idx + 1] : own;
    num_apart_up += own.first != next.first;
    num_apart_down += own.last != next.last;
  }
  max_steps = __reduce_max_sync(kWholeWarp, max_steps);
  max_late_steps = __reduce_max_sync(kWholeWarp, max_late_steps);
  num_visiting = __reduce_add_sync(kWholeWarp, num_visiting);
  num_apart_up = __reduce_add_sync(kWholeWarp, num_apart_up);
  num_apart_down = __reduce_add_sync(kWholeWarp, num_apart_down);
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    num_steps += __shfl_xor_sync(kWholeWarp, num_steps, distance);
  }
  if (threadIdx.x % 32 == 0) {
    atomicAdd(&smem_steps, num_steps);
    atomicMax(&smem_sums[0], max_steps);
    atomicMax(&smem_sums[1], max_late_steps);
    atomicAdd(&smem_sums[2], num_visiting);
    atomicAdd(&smem_sums[3], num_apart_up);
    atomicAdd(&smem_sums[4], num_apart_down);
  }
  __syncthreads();
  return {static_cast<int64_t>(smem_steps),
          smem_sums[0],
          smem_sums[1],
          smem_sums[2],
          smem_sums[3],
          smem_sums[4],
          num_tiles};
}

__device__ __forceinline__ void order_tiles(const TileLists& tiles, uint32_t cta_idx) {
  const uint32_t ctas_per_list = (tiles.num_k_tiles + sm90::kRankTiles - 1) / sm90::kRankTiles;
  const int64_t mask_idx = cta_idx / ctas_per_list;
  const int64_t tiles_begin = mask_idx * tiles.num_k_tiles;
  const int32_t tile_begin = static_cast<int32_t>(cta_idx % ctas_per_list) * sm90::kRankTiles;
  if (tile_begin == 0) {  // this CTA speaks for its list
    const VisitSummary summary = summarize(tiles, mask_idx);
    if (threadIdx.x == 0) tiles.summaries[mask_idx] = summary;
  }
  const int32_t tile_idx = tile_begin + static_cast<int32_t>(threadIdx.x % 32);
  const bool is_tile = tile_idx < tiles.num_k_tiles;
  const int32_t* const steps = tiles.tile_steps + tiles_begin;
  const int32_t rank =
      sm90::rank_tiles(tiles.num_k_tiles, tile_begin, is_tile ? steps[tile_idx] : 0,
                       [&](int32_t idx) { return steps[idx]; });
  if (threadIdx.x < 32 && is_tile) tiles.by_length[tiles_begin + rank] = tile_idx;
}

// A CTA a chunk of 32 row tiles: a warp turns the bits of 32 key tiles at a time.
__device__ __forceinline__ void list_visitors(const MaskLists& lists, const TileLists& tiles,
                                              uint32_t cta_idx) {
  __shared__ int32_t smem_counts[sm90::kRankWarps][32];
  const int64_t mask_idx = cta_idx / lists.num_q_chunks;
  const auto chunk = static_cast<int32_t>(cta_idx % lists.num_q_chunks);
  const int32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int32_t q_tile_idx = chunk * 32 + lane;
  const bool is_row = q_tile_idx < lists.num_q_tiles;
  int32_t num_before = 0;  // in words of earlier rounds
  const TilePair rows_of_tile =
      is_row ? row_tile(lists.q_rows, mask_idx * lists.num_q_tiles, q_tile_idx, INT32_MAX)
             : TilePair{0, 0};
  for (int32_t base = 0; base < tiles.num_k_words; base += sm90::kRankWarps) {
    const int32_t word = base + warp, k_tile_idx = word * 32 + lane;
    uint32_t rows = 0;
    if (k_tile_idx < tiles.num_k_tiles) {
      const int64_t tile_idx = mask_idx * tiles.num_k_tiles + k_tile_idx;
      rows = tiles.step_bits[tile_idx * lists.num_q_chunks + chunk].visited;
    }
    uint32_t visitors = 0;
#pragma unroll
    for (int32_t row = 0; row < 32; ++row) {
      const uint32_t of_row = __ballot_sync(kWholeWarp, (rows >> row & 1) != 0);
      if (lane == row) visitors = of_row;
    }
    smem_counts[warp][lane] = __popc(visitors);
    __syncthreads();
    int32_t earlier = 0, all = 0;
#pragma unroll
    for (int32_t other = 0; other < sm90::kRankWarps; ++other) {
      const int32_t count = smem_counts[other][lane];
      earlier += other < warp ? count : 0;
      all += count;
    }
    if (is_row && word < tiles.num_k_words) {
      tiles.visitors[(mask_idx * tiles.num_k_words + word) * lists.num_q_tiles + q_tile_idx] = {
          visitors, num_before + earlier};
    }
    num_before += all;
    __syncthreads();
  }
  if (warp != 0) return;
  if (is_row) {
    tiles.visits[mask_idx * lists.num_q_tiles + q_tile_idx] = {num_before, rows_of_tile.first};
  }
  const uint32_t shared = __ballot_sync(kWholeWarp, is_row && num_before > 1);
  if (lane == 0 && shared != 0) atomicAdd(&tiles.shared_rows[mask_idx], __popc(shared));
}

// Grid: num_tile_lists * (order_ctas + visitor_ctas).
__global__ void __launch_bounds__(sm90::kRankThreads)
    list_kernel(const MaskLists lists, const ListGrids grids) {
  const uint32_t ctas = grids.order_ctas + grids.visitor_ctas;
  const TileLists& tiles = lists.tiles[blockIdx.x / ctas];
  const uint32_t cta_idx = blockIdx.x % ctas;
  if (cta_idx >= grids.order_ctas) {
    list_visitors(lists, tiles, cta_idx - grids.order_ctas);
  } else if (cta_idx <
             grids.num_masks * ((tiles.num_k_tiles + sm90::kRankTiles - 1) / sm90::kRankTiles)) {
    order_tiles(tiles, cta_idx);
  }
}

}  // namespace fm3::sm90_bwd
