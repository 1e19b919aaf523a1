// SPDX-License-Identifier: Apache-2.0
// Where key tiles and row tiles begin. On a grid of block_k keys a tile over the border of two documents visits the rows of
// both, so tiles may begin at borders, where that saves steps. Of the benchmark's masks (on the grid = 1): causal document 0.988,
// 0.973 and 0.993 at 8K, 32K and 128K, document 1, 0.977, 0.994, share question 0.971, 0.959, 0.990, prefix document
// 0.987, 0.970, 0.994, the others 1. With three steps more a tile the best cuts of all take 1.2 % fewer of the 32K share
// question, 0.6 of the 8K prefix document and at most 0.2 elsewhere; of bidirectional documents of up to 500 keys, 2 to 10.
// So may row tiles, which the keys of both documents would visit. Both together: causal document 0.979, 0.949, 0.988,
// document 0.996, 0.965, 0.991, share question 0.953, 0.915, 0.981, prefix document 0.986, 0.947, 0.988, and 0.52 to 0.87 of
// the partial steps that key tiles alone leave. Cut at every border of as many keys row tiles save less.
#pragma once

#include "steps.h"

namespace fm3::sm90_bwd {

constexpr int kBorderKeys = 128;  // on either side of a border, what it is judged by
// What a cut must save: a tile more takes three steps, and the borders behind it lie elsewhere in their tiles.
constexpr float kCutSteps = 4;
constexpr float kRowCutKeys = 128;  // of a key tile, for what a cut of row tiles saves

// Borders of a mask that are looked at; tiles behind them stay on the grid. A warp does so, 31 at a time: documents of a few
// keys, by the thousand, must not hold a call up that makes its lists. Lists of 128K keys, an H200: documents of 1 key 28 ms
// without an end and 0.14 to 0.20 now, of 20 to 100 keys 0.54 to 0.88 and 0.05, of 100 to 400 0.17 to 0.28 and 0.11 to 0.18.
constexpr int32_t kMostBorders = 16 * 31;

constexpr int32_t kMostTiles = UINT16_MAX;  // of a list: a grid axis, and visitors of a row tile

inline int32_t tiles_on_grid(int32_t size, int32_t block) {
  return static_cast<int32_t>((int64_t{size} + block - 1) / block);
}
// Tiles that there can be of any mask: those of the grid and a few more. A cut of row tiles takes a third of one, and what is
// kept of each row takes memory.
inline int32_t most_k_tiles(int32_t s_k, int32_t block_k) {
  return tiles_on_grid(s_k, block_k) + tiles_on_grid(s_k, block_k) / 16 + 1;
}
inline int32_t most_q_tiles(int32_t s_q) {
  return tiles_on_grid(s_q, kBlockQ) + tiles_on_grid(s_q, kBlockQ) / 32 + 1;
}

// Cuts take 10 to 33 us where lists are made, so masks of fewer pairs stay on the grid: of one sequence those below 16K,
// of 8K those of fewer than four. The lists do not know how many heads will save steps; with 8, so small a backward
// saves about as much. Sanitizers, whose masks are small, and tests on the host have -DFM3_CUT_ALL_SIZES.
#ifdef FM3_CUT_ALL_SIZES
constexpr int64_t kCutPairs = 0;
#else
constexpr int64_t kCutPairs = int64_t{1} << 28;
#endif

// Whether tiles of a mask may leave the grid, as far as its shape says.
inline bool may_cut(const MaskView& mask) {
  // block_mask is on the grid; without bounds there are no documents; heads of one item may have masks of their own.
  return mask.block_mask == nullptr && mask.form != BoundForm::kNone && mask.h_mask == 1 &&
         int64_t{mask.s_q} * mask.s_k >= kCutPairs / larger(mask.b, 1);
}
// Key tiles, and row tiles, that its lists have room for.
inline int32_t max_k_tiles(const MaskView& mask, int32_t block_k) {
  const int32_t most = most_k_tiles(mask.s_k, block_k);
  return may_cut(mask) && most <= kMostTiles ? most : tiles_on_grid(mask.s_k, block_k);
}
inline int32_t max_q_tiles(const MaskView& mask) {
  const int32_t most = most_q_tiles(mask.s_q);
  const bool has_borders = may_cut(mask) && most_k_tiles(mask.s_k, 128) <= kMostTiles;
  return has_borders && most <= kMostTiles ? most : tiles_on_grid(mask.s_q, kBlockQ);
}

// From the first row that a key shows to behind the last one; begin >= end if it shows none.
struct ShownRows {
  int32_t begin, end;
  FM3_HOST_DEVICE int32_t count() const { return larger(end - begin, 0); }
};
FM3_HOST_DEVICE ShownRows shown_rows(const TwoIntervals& hidden, int32_t s_q) {
  ShownRows rows = {0, s_q};
  for (int32_t round = 0; round < 2; ++round) {  // one interval may continue the other
    if (hidden.ut_begin <= rows.begin) rows.begin = larger(rows.begin, hidden.ut_end);
    if (hidden.lt_begin <= rows.begin) rows.begin = larger(rows.begin, hidden.lt_end);
    if (hidden.lt_end >= rows.end) rows.end = smaller(rows.end, hidden.lt_begin);
    if (hidden.ut_end >= rows.end) rows.end = smaller(rows.end, hidden.ut_begin);
  }
  return rows.begin < rows.end ? rows : ShownRows{s_q, 0};
}

// Whether the key shows each of the kBlockQ rows that follow the first one it shows.
FM3_HOST_DEVICE bool shows_a_tile(const TwoIntervals& hidden, const ShownRows& rows) {
  const int32_t end = rows.begin + kBlockQ;
  return rows.count() >= kBlockQ && (hidden.lt_begin >= end || hidden.lt_end <= rows.begin) &&
         (hidden.ut_begin >= end || hidden.ut_end <= rows.begin);
}

// Where row tiles begin: at row 0 and every kBlockQ rows, and anew at the first rows of some documents.
// Claim:      what a tile that ends at a cut reads behind its end are rows that see some key (they may not hold just anything).
// Because:    a cut is made only where the border's first key shows the kBlockQ rows behind it.
// Breaks if:  shows_a_tile is not asked.
// Tested by:  test/unit/test_sm90_bwd_row_cuts.py
struct RowCuts {
  int32_t begin = 0;      // the last one
  int32_t num_tiles = 0;  // before it
  FM3_HOST_DEVICE int32_t tiles_before(int32_t row) const {
    return num_tiles + (row - begin + kBlockQ - 1) / kBlockQ;
  }
  // Whether it pays to cut at `row`, where a document begins, of num_keys keys. The rows of its first key end at first_end,
  // those of its last one at last_end. Uncut, a tile reaches `over` rows beyond it. A key tile whose rows end in the first
  // `over` of a tile's, counted from the cut, visits as many tiles either way; others one less. So cuts need no more tiles
  // up to the document's end, and few behind it.
  FM3_HOST_DEVICE bool pays(int32_t s_q, int32_t max_tiles, int32_t row, int32_t first_end,
                            int32_t last_end, int32_t num_keys) const {
    if (row < begin + kBlockQ || (row - begin) % kBlockQ == 0) return false;
    if (tiles_before(row) + (s_q - row + kBlockQ - 1) / kBlockQ > max_tiles) return false;
    const int32_t over = kBlockQ - (row - begin) % kBlockQ;
    const int32_t num_saved =
        ((first_end - row - 1) % kBlockQ >= over) + ((last_end - row - 1) % kBlockQ >= over);
    return .5f * num_saved * num_keys >= kCutSteps * kRowCutKeys;
  }
  FM3_HOST_DEVICE void cut(int32_t row) { num_tiles = tiles_before(row), begin = row; }
  // Rows between a row and the begin of its tile, if it is behind the last cut.
  FM3_HOST_DEVICE static int32_t inside(int32_t row, int32_t begin) {
    return row > begin ? (row - begin) % kBlockQ : 0;
  }
};

// Where a key tile is cut for the sake of `border`. If key after key begins at later rows, at the row tile where the
// border's rows begin, `inside` rows before: the keys from there on visit no other one, and the tiles behind it begin at row
// tiles, too.
template <class RowsOf>
FM3_HOST_DEVICE int32_t cut_of(int32_t s_k, int32_t border, int32_t inside, const ShownRows& rows,
                               RowsOf rows_of) {
  const int32_t earlier = border - inside;
  if (inside == 0 || earlier <= 0) return border;
  const bool are_later = rows_of(smaller(border + kBlockQ, s_k) - 1).begin > rows.begin;
  return are_later && rows_of(earlier).begin >= rows.begin - inside ? earlier : border;
}

// Steps that a cut saves where a tile would reach `over` keys beyond it, of block_k, and the next border is `length`
// keys away. The first key shows `first_rows` rows, the last one `last_rows`, those between decreasingly many.
FM3_HOST_DEVICE float saved_steps(int32_t block_k, int32_t over, int32_t length, int32_t first_rows,
                                  int32_t last_rows) {
  if (length <= over) return 0;  // many short documents share a tile
  const int32_t num_cut = (length + block_k - 1) / block_k;
  const int32_t num_uncut = (length - over + block_k - 1) / block_k;
  const float fewer = 1.f * larger(first_rows - last_rows, 0) / length;  // rows from key to key
  // Uncut, one tile more has all rows; then either as many tiles as cut that begin `over` keys later, or one less.
  const float rows = num_uncut == num_cut ? first_rows - fewer * over * num_cut
                                          : fewer * (block_k - over) * (num_cut - 1);
  return rows / kBlockQ;
}

// Cuts the keys into tiles of at most block_k. visit_borders(look): look(cut, end, first_rows, last_rows) of each border in
// ascending order: where it would be cut, the next border (s_k if there is none), rows that its first key shows, and the
// last one before `end`. emit(first, begin, count): tiles first, ... begin at begin, begin + block_k, ... Returns their
// number. A warp's lanes go through it together.
// Claim:      there are at most max_tiles tiles, if the grid has no more.
// Because:    a cut is made only if the tiles before it and the grid behind it fit.
// Breaks if:  borders do not come in ascending order.
// Tested by:  test/unit/test_sm90_bwd_cuts.py
template <class VisitBorders, class Emit>
FM3_HOST_DEVICE int32_t cut_tiles(int32_t s_k, int32_t block_k, int32_t max_tiles,
                                  VisitBorders visit_borders, Emit emit) {
  const auto tiles_of = [&](int32_t keys) { return keys / block_k + (keys % block_k > 0); };
  int32_t begin = 0, num_tiles = 0;
  visit_borders([&](int32_t cut, int32_t end, int32_t first_rows, int32_t last_rows) {
    if (cut <= begin || (cut - begin) % block_k == 0) return;
    const int32_t over = block_k - (cut - begin) % block_k;
    const int32_t num_before = num_tiles + tiles_of(cut - begin);
    if (num_before + tiles_of(s_k - cut) > max_tiles) return;
    if (saved_steps(block_k, over, end - cut, first_rows, last_rows) < kCutSteps) return;
    emit(num_tiles, begin, num_before - num_tiles);
    begin = cut, num_tiles = num_before;
  });
  emit(num_tiles, begin, tiles_of(s_k - begin));
  return num_tiles + tiles_of(s_k - begin);
}

}  // namespace fm3::sm90_bwd
