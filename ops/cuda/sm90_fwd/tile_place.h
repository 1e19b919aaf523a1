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
  int32_t team_heads = 1;   // heads worked on as one: divides h_q and heads_per_group
};

struct TilePlace {
  int32_t b_idx, h_idx, rank;  // rank: in the order of its list
};

// Tiles that are not late, then those that are. In each part batch entries in turn; in each, groups of
// heads; in a group, tiles in the order of their list, the heads of the group side by side.
// `tile_id` in [0, b * h_q / team_heads * count); h_idx is the first head of the team.
FM3_HOST_DEVICE TilePlace place_tile(const TileOrder& order, int32_t tile_id) {
  const int32_t num_teams = order.h_q / order.team_heads;  // a batch entry's
  const int32_t teams_per_group = order.heads_per_group / order.team_heads;
  int32_t first_rank = 0, count = order.count - order.num_late;
  const int32_t num_first = order.b * num_teams * count;
  if (tile_id >= num_first) tile_id -= num_first, first_rank = count, count = order.num_late;
  const int32_t tiles_per_batch = num_teams * count;
  const int32_t b_idx = tile_id / tiles_per_batch;
  int32_t rest = tile_id - b_idx * tiles_per_batch;
  const int32_t begin = rest / (teams_per_group * count) * teams_per_group;
  rest -= begin * count;
  const int32_t teams_left = num_teams - begin;
  const int32_t width = teams_left < teams_per_group ? teams_left : teams_per_group;
  const int32_t rank = rest / width;
  return {b_idx, (begin + rest - rank * width) * order.team_heads, first_rank + rank};
}

}  // namespace fm3::sm90
