// SPDX-License-Identifier: Apache-2.0
// Where the forward's query tiles begin. On a grid of 128 rows a tile over the border of two documents visits the keys of
// both, all in masked steps, and its rows of the second have seen nothing yet in those of the first. So tiles may begin at
// borders. Of a document's tiles one is short: the first where rows see more and more keys (causal documents), as its step
// is the cheapest and the others then end with the document; else the last.
//
// Cycles of the benchmark's masks by a model (3,000 a step, 1,700 a short one, 600 a masked one more, 1,250 a tile): causal
// document -5.0 %, -3.5 and -1.3 at 8K, 32K and 128K, document -1.6, -3.6, -1.0, share question -4.2, -3.1, -1.4, prefix
// document -4.5, -4.0, -1.4, causal blockwise -2.1, -1.5, -0.5, the others 0. With the best cuts of all share question takes
// -5.8 and -3.8. Documents of up to 250, 600, 1,000, 4,000 tokens: causal 0, -4.3, -7.3, -4.3, bidirectional -3.4, -8.7, -9.0,
// -3.4 (best: -10.3, -10.3, -9.1, -4.3 and -16.4, -11.0, -9.3, -3.4).
#pragma once

#include "fm3/mask.h"

namespace fm3::sm90 {

constexpr int32_t kTileQ = 128;  // query rows of one forward work tile

FM3_HOST_DEVICE int32_t smaller(int32_t x, int32_t y) { return y < x ? y : x; }
FM3_HOST_DEVICE int32_t larger(int32_t x, int32_t y) { return x < y ? y : x; }

// Cuts take 4 to 10 us where a schedule is made and a second launch in each call, so masks of fewer pairs stay on the grid.
// Sanitizers, whose masks are small, and tests on the host have -DFM3_CUT_ALL_SIZES.
#ifdef FM3_CUT_ALL_SIZES
constexpr int64_t kCutRowPairs = 0;
#else
constexpr int64_t kCutRowPairs = int64_t{1} << 28;
#endif
constexpr int32_t kMostQTiles = UINT16_MAX;  // of a list: what a step's flags have room for

// Query tiles that there can be of any mask: those of the grid and a quarter more.
FM3_HOST_DEVICE int32_t most_q_tiles(int32_t s_q) {
  const auto on_grid = static_cast<int32_t>((int64_t{s_q} + kTileQ - 1) / kTileQ);
  return on_grid + on_grid / 4 + 1;
}

// block_mask is on the grid, and without bounds there are no documents.
FM3_HOST_DEVICE bool may_cut_rows(const MaskView& mask) {
  const int64_t lists = int64_t{mask.b} * mask.h_mask;
  return mask.block_mask == nullptr && mask.form != BoundForm::kNone && lists > 0 &&
         int64_t{mask.s_q} * mask.s_k >= kCutRowPairs / lists &&
         most_q_tiles(mask.s_q) <= kMostQTiles;
}

// What documents must have for a cut between them. A cut saves a masked step for 160 rows of the document before it and,
// where its rows see more and more, brings its last tile to its end; a tile more takes some 5,000 cycles.
constexpr int32_t kCutRows = 384;
FM3_HOST_DEVICE bool is_worth_a_cut(int32_t rows_before, bool grows, int32_t rows_behind) {
  return (grows ? rows_before : rows_before + rows_behind) >= kCutRows;
}

// Tiles that a document of so many rows gets. An even number, so that no pair of tiles lies in two documents: one may be empty.
FM3_HOST_DEVICE int32_t tiles_of(int32_t rows) {
  return (rows / kTileQ + (rows % kTileQ > 0) + 1) / 2 * 2;
}

// Where tile `idx` of those of rows [begin, end) begins.
FM3_HOST_DEVICE int32_t begin_in(int32_t begin, int32_t end, bool grows, int32_t idx) {
  if (idx == 0) return begin;
  if (!grows) return smaller(begin + idx * kTileQ, end);
  return larger(begin, end - (tiles_of(end - begin) - idx) * kTileQ);
}

}  // namespace fm3::sm90
