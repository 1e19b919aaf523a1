// SPDX-License-Identifier: Apache-2.0
// The first two of the four passes that make a mask's lists: where its tiles begin, if they may leave the grid. Their
// own test runs them on the host (test/unit/test_sm90_bwd_cuts.py).
#pragma once

#include "../schedule/list_warp.cuh"
#include "lists.h"

namespace fm3::sm90_bwd {

using sm90::kWholeWarp;
constexpr int kVisitWarps = 8, kVisitThreads = kVisitWarps * 32;

// CTAs of the passes; of the last two for each size of key tile as many.
struct ListGrids {
  int64_t num_masks;
  uint32_t border_ctas, cut_ctas;
  uint32_t visit_ctas;                // key tiles of each size
  uint32_t order_ctas, visitor_ctas;  // for each size key tiles, then row tiles
};
inline ListGrids list_grids(const MaskView& mask, const MaskLists& lists) {
  const auto div_up = [](int64_t value, int64_t divisor) {
    return static_cast<uint32_t>((value + divisor - 1) / divisor);
  };
  ListGrids grids = {};
  grids.num_masks = int64_t{mask.b} * mask.h_mask;
  grids.border_ctas = div_up(grids.num_masks * lists.num_border_words, kVisitWarps);
  if (grids.border_ctas > 0) {
    grids.cut_ctas = static_cast<uint32_t>(grids.num_masks * lists.num_tile_lists);
  }
  for (int32_t idx = 0; idx < lists.num_tile_lists; ++idx) {
    const int32_t num_k_tiles = lists.tiles[idx].num_k_tiles;
    grids.visit_ctas =
        std::max(grids.visit_ctas, div_up(grids.num_masks * num_k_tiles, kVisitWarps));
    grids.order_ctas =
        std::max(grids.order_ctas,
                 static_cast<uint32_t>(grids.num_masks * div_up(num_k_tiles, sm90::kRankTiles)));
  }
  grids.visitor_ctas = static_cast<uint32_t>(grids.num_masks * lists.num_q_chunks);
  return grids;
}

// --- First pass: borders of documents --------------------------------------------------------------
// `bounds`: of the mask of one entry and head.
__device__ __forceinline__ TwoIntervals hidden_from_key(const MaskView& mask, const int32_t* bounds,
                                                        int32_t k_idx) {
  return fold_causal(sm90::hidden_rows(mask, bounds, k_idx), mask.is_causal, mask.s_q);
}
__device__ __forceinline__ ShownRows rows_of_key(const MaskView& mask, const int32_t* bounds,
                                                 int32_t k_idx) {
  return shown_rows(hidden_from_key(mask, bounds, k_idx), mask.s_q);
}

// Neighbours that show no row in common, nor do the 128 keys on either side. A warp 32 keys.
template <BoundForm kForm>
__global__ void __launch_bounds__(kVisitThreads)
    border_kernel(const MaskView mask, const MaskLists lists, const ListGrids grids) {
  const int64_t word_idx = int64_t{blockIdx.x} * kVisitWarps + threadIdx.x / 32;
  if (word_idx >= grids.num_masks * lists.num_border_words) return;
  const int64_t mask_idx = word_idx / lists.num_border_words;
  const int32_t lane = threadIdx.x % 32;
  const int32_t k_first = static_cast<int32_t>(word_idx % lists.num_border_words) * 32;
  const int32_t* const bounds = mask.bounds + mask_idx * mask.s_k * sm90::kNumBounds<kForm>;
  const auto rows_of = [&](int32_t k_idx) {
    if (k_idx < 0 || k_idx >= mask.s_k) return ShownRows{mask.s_q, 0};
    return rows_of_key(mask, bounds, k_idx);
  };
  const ShownRows before = rows_of(k_first + lane - 1), own = rows_of(k_first + lane);
  const bool is_apart = before.end <= own.begin || own.end <= before.begin;
  // Not between keys that show nothing.
  const bool is_open = is_apart && before.count() + own.count() > 0 && k_first + lane > 0;
  uint32_t borders = 0;
  for (uint32_t open = __ballot_sync(kWholeWarp, is_open); open != 0; open &= open - 1) {
    const int32_t border = k_first + __ffs(open) - 1;
    ShownRows sides[2] = {{mask.s_q, 0}, {mask.s_q, 0}};
#pragma unroll
    for (int side_idx = 0; side_idx < 2; ++side_idx) {
      ShownRows& side = sides[side_idx];
      for (int32_t idx = lane; idx < kBorderKeys; idx += 32) {
        const ShownRows rows = rows_of(border + (side_idx - 1) * kBorderKeys + idx);
        side = {smaller(side.begin, rows.begin), larger(side.end, rows.end)};
      }
      side.begin = __reduce_min_sync(kWholeWarp, side.begin);
      side.end = __reduce_max_sync(kWholeWarp, side.end);
    }
    if (sides[0].end <= sides[1].begin || sides[1].end <= sides[0].begin) {
      borders |= open & (~open + 1);
    }
  }
  if (lane == 0) lists.borders[word_idx] = borders;
}

// --- Second pass: where tiles begin ----------------------------------------------------------------
// Hands a warp the borders of a mask, a lane each. It looks at 4096 keys at a time and has asked for the next ones.
class BorderWalk {
 public:
  // `found`: 32 words of shared memory, the warp's own.
  __device__ BorderWalk(const uint32_t* words, int32_t num_words, int32_t s_k, int32_t* found)
      : words_(words),
        num_words_(num_words),
        s_k_(s_k),
        found_(found),
        own_(read(0)),
        ahead_(read(1)) {}
  // The lane's one of the next borders, ascending; s_k behind the last. That of the last lane comes first the next time.
  __device__ int32_t next() {
    const int32_t lane = own_lane();
    found_[lane] = s_k_;
    __syncwarp();
    for (int32_t count = 0; count < 32 && chunk_ * kChunkKeys < s_k_;) {
      const int32_t lane_begin = chunk_ * kChunkKeys + lane * kLaneKeys;
      uint32_t kept[kLaneKeys / 32];
      int32_t own_count = 0;
#pragma unroll
      for (int32_t word = 0; word < kLaneKeys / 32; ++word) {
        const int32_t skipped = from_ - lane_begin - word * 32;  // of the word's keys
        const uint32_t bits = reinterpret_cast<const uint32_t*>(&own_)[word];
        kept[word] = skipped <= 0 ? bits : skipped < 32 ? bits & ~0u << skipped : 0;
        own_count += __popc(kept[word]);
      }
      int32_t place = own_count;
#pragma unroll
      for (int32_t distance = 1; distance < 32; distance *= 2) {
        const int32_t before = __shfl_up_sync(kWholeWarp, place, distance);
        if (lane >= distance) place += before;
      }
      const int32_t chunk_count = __shfl_sync(kWholeWarp, place, 31);
      place += count - own_count;
#pragma unroll
      for (int32_t word = 0; word < kLaneKeys / 32; ++word) {
        for (uint32_t bits = kept[word]; bits != 0 && place < 32; bits &= bits - 1) {
          found_[place++] = lane_begin + word * 32 + __ffs(bits) - 1;
        }
      }
      count += chunk_count;
      if (count < 32) own_ = ahead_, ahead_ = read(++chunk_ + 1);
    }
    __syncwarp();
    const int32_t border = found_[lane];
    from_ = __shfl_sync(kWholeWarp, border, 31);
    return border;
  }

 private:
  static constexpr int32_t kLaneKeys = 128, kChunkKeys = 32 * kLaneKeys;
  static __device__ int32_t own_lane() { return static_cast<int32_t>(threadIdx.x % 32); }
  __device__ uint4 read(int32_t chunk) const {
    const int32_t first = (chunk * 32 + own_lane()) * (kLaneKeys / 32);
    return first < num_words_ ? *reinterpret_cast<const uint4*>(words_ + first) : uint4{0, 0, 0, 0};
  }
  const uint32_t* words_;
  int32_t num_words_, s_k_;
  int32_t* found_;
  int32_t chunk_ = 0, from_ = 0;
  uint4 own_, ahead_;
};

// Where tiles begin anew: {key or row, tile}, ascending; the last one stands for the end.
struct Cuts {
  int32_t count;  // without the end
  TilePair at[kMostBorders + 2];
  // By one thread.
  __device__ void add(int32_t begin, int32_t tile) { at[count++] = {begin, tile}; }
  __device__ void end(int32_t size, int32_t num_tiles) { at[count] = {size, num_tiles}; }
  // tile_of(idx, tile, begin) of each tile; it is behind the idx-th cut. A CTA.
  template <class TileOf>
  __device__ void visit_tiles(int32_t block, TileOf tile_of) const {
    int32_t idx = 0;
#pragma unroll 1
    for (int32_t tile = threadIdx.x; tile < at[count].last; tile += kVisitThreads) {
      while (at[idx + 1].last <= tile) ++idx;
      tile_of(idx, tile, at[idx].first + (tile - at[idx].last) * block);
    }
  }
};

// A warp.
template <BoundForm kForm>
__device__ __forceinline__ void find_cuts(const MaskView& mask, const MaskLists& lists,
                                          const TileLists& tiles, int64_t mask_idx, Cuts& k_cuts,
                                          Cuts& q_cuts) {
  const auto lane = static_cast<int32_t>(threadIdx.x);
  const int32_t* const bounds = mask.bounds + mask_idx * mask.s_k * sm90::kNumBounds<kForm>;
  const auto rows_of = [&](int32_t k_idx) { return rows_of_key(mask, bounds, k_idx); };
  if (lane == 0) k_cuts.count = q_cuts.count = 0, q_cuts.add(0, 0);
  RowCuts row_cuts;
  __shared__ int32_t smem_found[32];
  BorderWalk borders(lists.borders + mask_idx * lists.num_border_words, lists.num_border_words,
                     mask.s_k, smem_found);
  // What is read at a border is read for 32 at a time: lists of four 32K sequences take 28 us, 38 with one after the other.
  const auto visit_borders = [&](auto look) {
    int32_t num_left = kMostBorders;
    for (int32_t last = 0; last < mask.s_k && num_left > 0; num_left -= 31) {
      const int32_t border = borders.next();
      const bool is_border = border < mask.s_k;
      const ShownRows before = rows_of(border - 1);
      const TwoIntervals hidden =
          is_border ? hidden_from_key(mask, bounds, border) : TwoIntervals{0, mask.s_q, 0, 0};
      const ShownRows rows = is_border ? shown_rows(hidden, mask.s_q) : ShownRows{0, 0};
      // A key of fewer rows begins nothing that saves kCutSteps. The last lane's border is but the end of the one before.
      const bool is_open = lane < 31 && rows.count() >= kCutSteps * kBlockQ;
      const int32_t num_keys = __shfl_sync(kWholeWarp, border, smaller(lane + 1, 31)) - border;
      const int32_t last_end = __shfl_sync(kWholeWarp, before.end, smaller(lane + 1, 31));
      bool may_cut_rows = lists.q_rows != nullptr && is_open && before.end <= rows.begin &&
                          num_keys >= kCutSteps * kRowCutKeys && shows_a_tile(hidden, rows);
      int32_t row_begin = row_cuts.begin;  // the last cut of row tiles that this border is behind
      while (true) {
        const bool pays = may_cut_rows && row_cuts.pays(mask.s_q, lists.num_q_tiles, rows.begin,
                                                        rows.end, last_end, num_keys);
        const uint32_t paying = __ballot_sync(kWholeWarp, pays);
        if (paying == 0) break;
        const int32_t idx = __ffs(paying) - 1;
        row_cuts.cut(__shfl_sync(kWholeWarp, rows.begin, idx));
        if (lane == 0) q_cuts.add(row_cuts.begin, row_cuts.num_tiles);
        if (lane >= idx) row_begin = row_cuts.begin;
        may_cut_rows = may_cut_rows && lane > idx;
      }
      const int32_t inside = RowCuts::inside(rows.begin, row_begin);
      const int32_t cut = is_open ? cut_of(mask.s_k, border, inside, rows, rows_of) : border;
      for (uint32_t open = __ballot_sync(kWholeWarp, is_open); open != 0; open &= open - 1) {
        const int32_t idx = __ffs(open) - 1;
        look(__shfl_sync(kWholeWarp, cut, idx), __shfl_sync(kWholeWarp, border, idx + 1),
             __shfl_sync(kWholeWarp, rows.count(), idx),
             __shfl_sync(kWholeWarp, before.count(), idx + 1));
      }
      last = __shfl_sync(kWholeWarp, border, 31);
    }
  };
  const int32_t num_tiles = cut_tiles(mask.s_k, tiles.block_k, tiles.num_k_tiles, visit_borders,
                                      [&](int32_t first, int32_t k_begin, int32_t) {
                                        if (lane == 0) k_cuts.add(k_begin, first);
                                      });
  if (lane == 0) {
    k_cuts.end(mask.s_k, num_tiles);
    q_cuts.end(mask.s_q, row_cuts.tiles_before(mask.s_q));
  }
}

// The row tiles of a mask, and where the row pass puts their rows. A CTA.
__device__ __forceinline__ void write_row_tiles(const MaskView& mask, const MaskLists& lists,
                                                int64_t mask_idx, const Cuts& cuts) {
  TilePair* const rows = lists.q_rows + mask_idx * lists.num_q_tiles;
  cuts.visit_tiles(kBlockQ, [&](int32_t idx, int32_t tile, int32_t begin) {
    rows[tile] = {begin, smaller(cuts.at[idx + 1].first - begin, kBlockQ) + begin};
  });
  const int32_t num_q_tiles = cuts.at[cuts.count].last;
  for (int32_t tile = num_q_tiles + threadIdx.x; tile < lists.num_q_tiles; tile += kVisitThreads) {
    rows[tile] = {mask.s_q, mask.s_q};
  }
  if (threadIdx.x == 0) lists.q_tiles[mask_idx] = num_q_tiles;
  const int32_t num_places = (mask.s_q + kBlockQ - 1) / kBlockQ;
  RowPlaces* const places = lists.row_places + mask_idx * num_places;
  const auto shift_of = [&](const TilePair& cut) { return cut.last * kBlockQ - cut.first; };
  int32_t idx = 0;
#pragma unroll 1
  for (int32_t place = threadIdx.x; place < num_places; place += kVisitThreads) {
    while (idx + 1 < cuts.count && cuts.at[idx + 1].first / kBlockQ <= place) ++idx;
    const TilePair own = cuts.at[idx];
    const bool has_cut = idx > 0 && own.first / kBlockQ == place;
    places[place] = {shift_of(has_cut ? cuts.at[idx - 1] : own), has_cut ? own.first : INT32_MAX,
                     shift_of(own), 0};
  }
}

// A CTA a mask and size of key tile: its first warp finds the cuts, those of the mask's row tiles, too; all write. That of the
// first size writes the row tiles.
template <BoundForm kForm>
__global__ void __launch_bounds__(kVisitThreads, 1)
    cut_kernel(const MaskView mask, const MaskLists lists, const ListGrids grids) {
  const int64_t mask_idx = blockIdx.x / lists.num_tile_lists;
  const int32_t list_idx = blockIdx.x % lists.num_tile_lists;
  const TileLists& tiles = lists.tiles[list_idx];
  __shared__ Cuts smem_k_cuts, smem_q_cuts;
  if (threadIdx.x < 32) {
    find_cuts<kForm>(mask, lists, tiles, mask_idx, smem_k_cuts, smem_q_cuts);
  }
  __syncthreads();
  int32_t* const k_begins = tiles.k_begins + mask_idx * (tiles.num_k_tiles + 1);
  smem_k_cuts.visit_tiles(tiles.block_k,
                          [&](int32_t, int32_t tile, int32_t begin) { k_begins[tile] = begin; });
  const int32_t num_tiles = smem_k_cuts.at[smem_k_cuts.count].last;
  for (int32_t tile = num_tiles + threadIdx.x; tile <= tiles.num_k_tiles; tile += kVisitThreads) {
    k_begins[tile] = mask.s_k;
  }
  if (threadIdx.x == 0) tiles.num_tiles[mask_idx] = num_tiles;
  if (lists.q_rows != nullptr && list_idx == 0) {
    write_row_tiles(mask, lists, mask_idx, smem_q_cuts);
  }
}

}  // namespace fm3::sm90_bwd
