// SPDX-License-Identifier: Apache-2.0
// What the backward knows of a mask before any tensor: which row tiles each key tile visits. A caller may
// keep it for all calls with the mask (fm3_sm90_build_bwd_schedule); a call without makes its own. It
// depends on the mask and the size of a key tile, on nothing else of a call. Plain C++, tested on the host.
#pragma once

#include "cuts.h"
#include "plan.h"

namespace fm3::sm90_bwd {

// Of 32 row tiles: which a key tile visits, which of those are partial.
struct alignas(8) StepBits {
  uint32_t visited, partial;
};

// Of 32 key tiles: which visit a row tile, and how many of those before them do.
struct alignas(8) Visitors {
  uint32_t bits;
  int32_t before;
  // How many of the key tiles before `k_tile_idx` visit the row tile.
  FM3_HOST_DEVICE int32_t before_tile(int32_t k_tile_idx) const {
    const uint32_t earlier = bits & ((1u << k_tile_idx % 32) - 1);
#ifdef __CUDA_ARCH__
    return before + __popc(earlier);
#else
    return before + __builtin_popcount(earlier);
#endif
  }
};

// Of a row tile.
struct alignas(8) RowVisits {
  int32_t count;  // visiting key tiles
  int32_t q_begin;
};

struct alignas(8) TilePair {
  int32_t first, last;
};

// Lists of the key tiles of at most block_k keys of every mask, num_masks = b * h_mask. There is room for num_k_tiles
// of each; those that it does not have (VisitSummary::num_tiles) are empty: begin at s_k, visit nothing.
struct TileLists {
  int32_t block_k, num_k_tiles;
  int32_t num_k_words;  // ceil(num_k_tiles / 32)
  // [num_masks, num_k_tiles + 1] tile t is of keys [k_begins[t], k_begins[t + 1])
  int32_t* k_begins;
  int32_t* num_tiles;  // [num_masks]
  // Rows hidden from each key, everything for what a tile lacks of block_k keys: [num_masks, num_hulls * kHullK], of
  // tile t from t * block_k on.
  KeyRows* bounds;
  int32_t num_hulls;        // ceil(num_k_tiles * block_k / kHullK)
  StepBits* step_bits;      // [num_masks, num_k_tiles, num_q_chunks]
  TilePair* step_chunks;    // [num_masks, num_k_tiles] all visits are in chunks [first, last)
  int32_t* tile_steps;      // [num_masks, num_k_tiles] visited row tiles
  int32_t* by_length;       // [num_masks, num_k_tiles] key tiles, that with most steps first
  VisitSummary* summaries;  // [num_masks]
  Visitors* visitors;       // [num_masks, num_k_words, num_q_tiles]
  RowVisits* visits;        // [num_masks, num_q_tiles]
  int32_t* shared_rows;     // [num_masks] row tiles with more than one visitor
  TilePair* sample_rows;    // [num_masks, num_k_tiles] row tile after kSampleStep steps up, down
};

// Sizes of key tiles that the kernels have.
constexpr int32_t kBlockKs[] = {128, 64};
constexpr int32_t kNumBlockKs = 2;
constexpr bool has_lists(int32_t block_k) {
  return block_k == kBlockKs[0] || block_k == kBlockKs[1];
}

// Rows [first, last) of a row tile. `q_rows`: MaskLists::q_rows; `list_begin`: of the entry.
FM3_HOST_DEVICE TilePair row_tile(const TilePair* q_rows, int64_t list_begin, int32_t q_tile_idx,
                                  int32_t s_q) {
  if (q_rows != nullptr) return q_rows[list_begin + q_tile_idx];
  const int32_t begin = q_tile_idx * kBlockQ;
  return {begin, smaller(s_q - begin, kBlockQ) + begin};
}

// Where the row pass puts rows [kBlockQ r, + kBlockQ) of an entry: row q to the (q + shift)-th of all rows of all row tiles,
// which have kBlockQ each. At most one cut lies among them.
struct alignas(16) RowPlaces {
  int32_t shift;      // of rows before `cut`
  int32_t cut;        // none: INT32_MAX
  int32_t cut_shift;  // of rows from there on; larger by what the tile before lacks of kBlockQ rows
  int32_t unused;
  FM3_HOST_DEVICE int32_t place(int32_t q_idx) const {
    return q_idx + (q_idx < cut ? shift : cut_shift);
  }
};

struct MaskLists {
  int32_t num_q_tiles, num_q_chunks;  // room for row tiles, ceil(num_q_tiles / 32)
  // If row tiles may begin at documents (then h_mask is 1), else nullptr. Tile t is of rows [first, last); those that a mask
  // does not have begin at s_q.
  TilePair* q_rows;          // [num_masks, num_q_tiles]
  int32_t* q_tiles;          // [num_masks] how many it has
  RowPlaces* row_places;     // [num_masks, ceil(s_q / kBlockQ)]
  int32_t num_border_words;  // 4 * ceil(s_k / 128) if tiles may begin at borders, else 0
  uint32_t* borders;         // [num_masks, num_border_words] a bit a key
  int32_t num_tile_lists;
  TileLists tiles[kNumBlockKs];
};

// Lays the lists of key tiles of `num_block_ks` sizes out from `base` (may be nullptr); returns the bytes.
inline int64_t lists_layout(const MaskView& mask, const int32_t* block_ks, int32_t num_block_ks,
                            void* base, MaskLists* lists) {
  const int64_t num_masks = int64_t{mask.b} * mask.h_mask;
  const auto div_up = [](int32_t value, int32_t divisor) {
    return static_cast<int32_t>((int64_t{value} + divisor - 1) / divisor);
  };
  MaskLists made = {};
  made.num_q_tiles = max_q_tiles(mask);
  // If tiles of one size may leave the grid, so may those of the other, as far as they have room.
  const bool cuts_keys = max_k_tiles(mask, kBlockKs[0]) > div_up(mask.s_k, kBlockKs[0]);
  made.num_q_chunks = div_up(made.num_q_tiles, 32);
  made.num_border_words = cuts_keys ? 4 * div_up(mask.s_k, 128) : 0;
  made.num_tile_lists = num_block_ks;
  int64_t offset = 0;
  const auto take = [&](auto** pointer, int64_t count) {
    using Element = std::remove_reference_t<decltype(**pointer)>;
    *pointer = reinterpret_cast<Element*>(static_cast<char*>(base) + offset);
    offset = sm90::align_up(offset + count * int64_t{sizeof(Element)}, 256);
  };
  take(&made.borders, num_masks * made.num_border_words);
  const int32_t num_places = div_up(mask.s_q, kBlockQ);
  if (made.num_q_tiles > num_places) {
    take(&made.q_rows, num_masks * made.num_q_tiles);
    take(&made.q_tiles, num_masks);
    take(&made.row_places, num_masks * num_places);
  }
  for (int32_t idx = 0; idx < num_block_ks; ++idx) {
    TileLists& tiles = made.tiles[idx];
    tiles.block_k = block_ks[idx];
    tiles.num_k_tiles = max_k_tiles(mask, tiles.block_k);
    tiles.num_k_words = div_up(tiles.num_k_tiles, 32);
    const int64_t num_tiles = num_masks * tiles.num_k_tiles;
    take(&tiles.k_begins, num_masks * (tiles.num_k_tiles + 1));
    take(&tiles.num_tiles, num_masks);
    tiles.num_hulls = div_up(tiles.num_k_tiles, kHullK / tiles.block_k);
    tiles.bounds = made.tiles[0].bounds;  // on the grid the same ones for every size
    if (idx == 0 || cuts_keys) take(&tiles.bounds, num_masks * tiles.num_hulls * kHullK);
    take(&tiles.step_bits, num_tiles * made.num_q_chunks);
    take(&tiles.step_chunks, num_tiles);
    take(&tiles.tile_steps, num_tiles);
    take(&tiles.by_length, num_tiles);
    take(&tiles.summaries, num_masks);
    take(&tiles.visitors, num_masks * tiles.num_k_words * made.num_q_tiles);
    take(&tiles.visits, num_masks * made.num_q_tiles);
    take(&tiles.shared_rows, num_masks);
    take(&tiles.sample_rows, num_tiles);
  }
  if (lists != nullptr) *lists = made;
  return offset;
}

}  // namespace fm3::sm90_bwd
