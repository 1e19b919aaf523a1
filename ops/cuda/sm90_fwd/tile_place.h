// SPDX-License-Identifier: Apache-2.0
// The order in which the forward's query tiles are worked on, for the device and for a test on the host.
#pragma once

#include <cstdint>

#include "fm3/mask.h"

namespace fm3::sm90 {

struct TileOrder {
  int32_t b, h_q, count;    // `count` tiles a list
  int32_t heads_per_group;  // query heads whose K/V share the L2 at a time
  int32_t num_late;         // tiles at the end of each list that come after all others of all lists
};

struct TilePlace {
  int32_t b_idx, h_idx, rank;  // rank: in the order of its list
};

// Tiles that are not late, then those that are. In each part batch entries in turn; in each, groups of
// heads; in a group, tiles in the order of their list, the heads of the group side by side.
// `tile_id` in [0, b * h_q * count).
FM3_HOST_DEVICE TilePlace place_tile(const TileOrder& order, int32_t tile_id) {
  int32_t first_rank = 0, count = order.count - order.num_late;
  const int32_t num_first = order.b * order.h_q * count;
  if (tile_id >= num_first) tile_id -= num_first, first_rank = count, count = order.num_late;
  const int32_t tiles_per_batch = order.h_q * count;
  const int32_t b_idx = tile_id / tiles_per_batch;
  int32_t rest = tile_id - b_idx * tiles_per_batch;
  const int32_t h_begin = rest / (order.heads_per_group * count) * order.heads_per_group;
  rest -= h_begin * count;
  const int32_t heads_left = order.h_q - h_begin;
  const int32_t width = heads_left < order.heads_per_group ? heads_left : order.heads_per_group;
  const int32_t rank = rest / width;
  return {b_idx, h_begin + rest - rank * width, first_rank + rank};
}

}  // namespace fm3::sm90
