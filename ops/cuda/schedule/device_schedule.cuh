// SPDX-License-Identifier: Apache-2.0
// The prepared schedule of one mask on the device: where the forward's query tiles find the key
// columns they visit. Built once a mask (build.cu), read by every layer. The backward's lists, by key
// tile, are in a blob of their own (sm90_bwd/lists.h), by the same rules.
//
// One blob of bytes, addressed through `ScheduleView`:
//   order   per (b, h_mask): the query tiles, dearest first, each with its rows and the head of its list
//   rest    the same of the tiles that are in no pair, if tiles may leave the grid
//   spans   per (b, h_mask, query tile): the key columns the forward visits, ascending
//   totals  how much all tiles visit
//   q_begins   per (b, h_mask): where query tiles begin, if they may leave the grid (cuts.h)
//   hulls, granules   min and max of the bounds of 128 and of 16 key columns; scratch of the build
// Order and spans are there twice: of single tiles, and of pairs of neighbours, which two CTAs may
// walk together. The totals tell the forward which of the two is cheaper, or, of a mask with cuts, whether pairs come first.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuts.h"

namespace fm3::sm90 {

constexpr int32_t kHullCols = 128;    // key columns of one hull; = kBlockMaskTile
constexpr int32_t kGranuleCols = 16;  // an item begins at a multiple of this, or shifted (ListHead)
// Key columns of one item; results/sm90_fwd.md has figures of other widths. Wide heads take an item
// of a single tile in two steps, which needs a multiple of 32.
// Where a mask has cuts, pairs have the steps of single tiles, short ones, too: documents end anywhere.
constexpr int32_t kTileItemCols = 160, kPairItemCols = 176, kCutPairItemCols = kTileItemCols;
FM3_HOST_DEVICE int32_t pair_item_cols(bool has_cuts) {
  return has_cuts ? kCutPairItemCols : kPairItemCols;
}
constexpr int64_t kMaxLists = 0x7FFFFFFF / 256;  // b * h_mask: a grid of so many tiles of lists

constexpr int32_t kNever = 0x7FFFFFFF;  // the begin of an empty interval

// `count` items of kTileItemCols or pair_item_cols() columns each, the first at column
// granule * kGranuleCols plus the list's shift (ListHead). A FULL item shows all its columns to
// all rows of the query tile (or pair); others are computed with mask bits. Items of one list are
// disjoint, ascending and cover every column that is not SKIP. The last item of a list of several is
// SHORT if it shows nothing past its first kShortItemCols columns.
constexpr int32_t kShortItemCols = kTileItemCols / 2;
constexpr int32_t kSpanCountBits = 10, kSpanGranuleBits = 20;
constexpr int32_t kMaxSpanItems = (1 << kSpanCountBits) - 1;
constexpr int64_t kMaxKeyCols = (int64_t{1} << kSpanGranuleBits) * kGranuleCols;  // 16M
struct Span {
  uint32_t packed;  // [granule | count | ends_short | is_full]
  FM3_HOST_DEVICE static Span make(int32_t granule, int32_t count, bool is_full, bool ends_short) {
    return {static_cast<uint32_t>(granule) << (kSpanCountBits + 2) |
            static_cast<uint32_t>(count) << 2 | (ends_short ? 2u : 0u) | (is_full ? 1u : 0u)};
  }
  FM3_HOST_DEVICE int32_t k_begin() const {
    return static_cast<int32_t>(packed >> (kSpanCountBits + 2)) * kGranuleCols;
  }
  FM3_HOST_DEVICE int32_t count() const { return (packed >> 2) & kMaxSpanItems; }
  FM3_HOST_DEVICE bool ends_short() const { return (packed & 2) != 0; }
  FM3_HOST_DEVICE bool is_full() const { return packed & 1; }
};

// What those who walk a list must know of it. Documents begin anywhere: where all rows of a tile see
// the end of its first visible granule, from column `shift` on, and none what comes before, all its items
// begin later by `shift`, so that the first can be FULL. Lists with a gap, with a block mask, of more
// than one section (list_warp.cuh) or of pairs of a mask without cuts are not shifted.
struct ListHead {
  uint32_t packed;                      // [shift | num_spans]
  static constexpr int kShiftBits = 4;  // shift < kGranuleCols
  FM3_HOST_DEVICE static ListHead make(int32_t num_spans, int32_t shift) {
    return {static_cast<uint32_t>(shift) << (32 - kShiftBits) | static_cast<uint32_t>(num_spans)};
  }
  // >= 1: a tile that sees nothing visits one item whose bits are all hidden
  FM3_HOST_DEVICE int32_t num_spans() const {
    return static_cast<int32_t>(packed & (0xFFFFFFFF >> kShiftBits));
  }
  FM3_HOST_DEVICE int32_t shift() const {
    return static_cast<int32_t>(packed >> (32 - kShiftBits));
  }
};

// Rows of a tile, or of each tile of a pair, which lie one behind the other.
struct TileRows {
  int32_t begin;
  uint32_t counts;  // [second << 16 | first], each at most kTileQ; 0: none
  FM3_HOST_DEVICE static TileRows make(int32_t begin, int32_t middle, int32_t end) {
    return {begin,
            static_cast<uint32_t>(end - middle) << 16 | static_cast<uint32_t>(middle - begin)};
  }
  FM3_HOST_DEVICE int32_t count(int32_t member) const {
    return static_cast<int32_t>(counts >> 16 * member & 0xFFFF);
  }
  FM3_HOST_DEVICE int32_t begin_of(int32_t member) const {
    return begin + (member == 0 ? 0 : count(0));
  }
};

// A list has as many as the fullest list of the mask; those that it lacks have no spans.
struct alignas(16) QueryTileEntry {
  int32_t q_tile_idx;
  ListHead list;
  TileRows rows;
};

struct alignas(16) TileCost {
  int32_t halves;  // of items; a short one is one
  ListHead list;
  TileRows rows;
};

// Lists of single query tiles, or of pairs of neighbouring ones.
struct SpanLists {
  QueryTileEntry* order;  // [b, h_mask, count], by falling cost; those without a tile have no spans
  TileCost* costs;        // [b, h_mask, count], by tile; scratch of the build
  Span* spans;            // [b, h_mask, count, max_spans]; a count of 0 ends each list
  int32_t count;
};

// How many entries with a tile the order has that has most of them, and the one that has fewest.
struct EntryCounts {
  int32_t most, fewest;
};

// Over all lists of the mask.
struct ScheduleTotals {
  unsigned long long tile_halves, pair_halves;  // of the type that atomicAdd takes
  // Entries at the end of each order that come after all others of all lists; 0 but for order_local_first.
  int32_t late_tiles, late_pairs;
  EntryCounts tiles, pairs, rest;
  int32_t num_cuts;  // of all lists: places where a tile begins for a document's sake
  FM3_HOST_DEVICE bool has_cuts() const { return num_cuts > 0; }
};

// A pair saves 5 % of its energy, which is time at the power limit: each CTA copies half of K and V. So it is worth 1 / kPairShare
// more that it visits: for all tiles of a mask without cuts, or none; of a mask with cuts each pair is judged by itself.
constexpr int32_t kPairShare = 32;

// Whether a mask without cuts is walked in pairs.
FM3_HOST_DEVICE bool are_all_pairs_worth_it(const ScheduleTotals& totals) {
  return 2 * totals.pair_halves * kPairItemCols * kPairShare <=
         totals.tile_halves * kTileItemCols * (kPairShare + 1);
}

// Whether a mask with cuts is walked in pairs, and then singly: if pairs are 3/4 of the work. The other tiles read K and V from
// memory once more.
FM3_HOST_DEVICE bool are_pairs_worth_it(const ScheduleTotals& totals) {
  return 8 * totals.pair_halves >= 3 * totals.tile_halves;
}

// Of a mask with cuts, whether two tiles are walked as a pair; from the costs of the three lists.
FM3_HOST_DEVICE bool is_worth_a_pair(int32_t pair, int32_t first, int32_t second) {
  return pair > 0 && 2 * pair * kPairShare <= (first + second) * (kPairShare + 1);
}

struct ScheduleView {
  ScheduleTotals* totals;
  void *hulls, *granules;  // [b, h_mask, num_hulls] and [b, h_mask, 8 num_hulls] BoundSummary
  SpanLists tiles, pairs;  // room for so many: where tiles may leave the grid, more than there are
  // [b, h_mask, tiles.count], of tiles that are in no pair that is walked; nullptr if tiles are on the grid.
  QueryTileEntry* rest;
  // [b, h_mask, tiles.count + 1], those behind the last tile s_q; nullptr if tiles are on the grid.
  int32_t* q_begins;
  uint32_t* borders;  // [b, h_mask, 4 num_hulls], a bit a key; scratch of the build
  int32_t num_hulls, num_q_tiles, max_spans;  // num_q_tiles: on the grid
};

FM3_HOST_DEVICE int64_t align_up(int64_t bytes, int64_t alignment) {
  return (bytes + alignment - 1) / alignment * alignment;
}

// Lays the parts out from `base`; returns the bytes. `view` may be nullptr.
FM3_HOST_DEVICE int64_t schedule_layout(const MaskView& mask, void* base, ScheduleView* view) {
  const int64_t lists = int64_t{mask.b} * mask.h_mask;
  const int32_t num_hulls = (mask.s_k + kHullCols - 1) / kHullCols;
  const int32_t num_q_tiles = (mask.s_q + kTileQ - 1) / kTileQ;
  const int32_t max_spans = (mask.s_k + kTileItemCols - 1) / kTileItemCols + 2;
  char* at = static_cast<char*>(base);
  int64_t bytes = 0;
  const auto take = [&](int64_t size) {
    char* part = base == nullptr ? nullptr : at + bytes;
    bytes += align_up(size, 256);
    return part;
  };
  const auto take_lists = [&](int32_t count) {
    const int64_t all = lists * count;
    return SpanLists{reinterpret_cast<QueryTileEntry*>(take(all * int64_t{sizeof(QueryTileEntry)})),
                     reinterpret_cast<TileCost*>(take(all * int64_t{sizeof(TileCost)})),
                     reinterpret_cast<Span*>(take(all * max_spans * int64_t{sizeof(Span)})), count};
  };
  ScheduleView made;
  made.totals = reinterpret_cast<ScheduleTotals*>(take(sizeof(ScheduleTotals)));
  const bool may_cut = may_cut_rows(mask);
  const int32_t most_tiles = may_cut ? most_q_tiles(mask.s_q) : num_q_tiles;
  made.tiles = take_lists(most_tiles);
  made.pairs = take_lists((most_tiles + 1) / 2);
  const int64_t summary_bytes = num_bounds(mask.form) * 2 * int64_t{sizeof(int32_t)};
  made.hulls = take(lists * num_hulls * summary_bytes);
  made.granules = take(lists * num_hulls * (kHullCols / kGranuleCols) * summary_bytes);
  made.rest = nullptr, made.q_begins = nullptr, made.borders = nullptr;
  if (may_cut) {
    made.rest = reinterpret_cast<QueryTileEntry*>(
        take(lists * most_tiles * int64_t{sizeof(QueryTileEntry)}));
    made.q_begins = reinterpret_cast<int32_t*>(
        take(lists * (int64_t{most_tiles} + 1) * int64_t{sizeof(int32_t)}));
    made.borders = reinterpret_cast<uint32_t*>(take(lists * num_hulls * (kHullCols / 8)));
  }
  made.num_hulls = num_hulls, made.num_q_tiles = num_q_tiles, made.max_spans = max_spans;
  if (view != nullptr) *view = made;
  return bytes;
}

// Where tile `tile_idx` of a list begins, s_q behind the last one.
FM3_HOST_DEVICE int32_t tile_begin(const ScheduleView& schedule, int64_t list_idx, int32_t tile_idx,
                                   int32_t s_q) {
  if (schedule.q_begins == nullptr) {
    return tile_idx < schedule.num_q_tiles ? tile_idx * kTileQ : s_q;
  }
  return schedule.q_begins[list_idx * (schedule.tiles.count + 1) + tile_idx];
}

// --- Rows a column hides -------------------------------------------------------------------------
struct Interval {
  int32_t begin, end;  // empty iff begin >= end
};

// The three intervals one key column hides: both bounds and the causal rule's [0, causal_end).
struct HiddenRows {
  Interval lt, ut, causal;
};

// `bounds`: of the column alone.
FM3_HOST_DEVICE HiddenRows hidden_rows_of(const int32_t* bounds, BoundForm form,
                                          const MaskView& mask, int32_t k_idx) {
  const ColumnBounds column = expand_bounds(bounds, form, mask.s_q);
  return {{column.lt_begin, column.lt_end},
          {column.ut_begin, column.ut_end},
          {0, mask.is_causal ? causal_end(k_idx, mask.s_q, mask.s_k) : 0}};
}
FM3_HOST_DEVICE HiddenRows hidden_rows(const MaskView& mask, const int32_t* list_bounds,
                                       int32_t k_idx) {
  return hidden_rows_of(list_bounds + int64_t{k_idx} * num_bounds(mask.form), mask.form, mask,
                        k_idx);
}

// True iff the union of the three covers every row of [q_begin, q_end). The causal rule's begins at
// row 0; the other two can follow each other in either order.
FM3_HOST_DEVICE bool covers(const HiddenRows& rows, int32_t q_begin, int32_t q_end) {
  int32_t reached = larger(q_begin, rows.causal.end);  // [q_begin, reached) is covered
  if (rows.lt.begin <= reached && reached < rows.lt.end) reached = rows.lt.end;
  if (rows.ut.begin <= reached && reached < rows.ut.end) reached = rows.ut.end;
  if (rows.lt.begin <= reached && reached < rows.lt.end) reached = rows.lt.end;
  return reached >= q_end;
}

FM3_HOST_DEVICE bool touches(const Interval& rows, int32_t q_begin, int32_t q_end) {
  return rows.begin < rows.end && rows.begin < q_end && q_begin < rows.end;
}
FM3_HOST_DEVICE bool touches(const HiddenRows& rows, int32_t q_begin, int32_t q_end) {
  return touches(rows.lt, q_begin, q_end) || touches(rows.ut, q_begin, q_end) ||
         touches(rows.causal, q_begin, q_end);
}

}  // namespace fm3::sm90
