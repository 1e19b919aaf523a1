// SPDX-License-Identifier: Apache-2.0
// The forward's order of work, for test/unit/test_sm90_tile_place.py.
#include "ops/cuda/sm90_fwd/tile_place.h"

// Writes (b_idx, first h_idx, rank) of each tile id.
extern "C" void tile_places(int32_t b, int32_t h_q, int32_t count, int32_t heads_per_group,
                            int32_t num_late, int32_t team_heads, int32_t* places) {
  for (int32_t tile_id = 0; tile_id < b * h_q / team_heads * count; ++tile_id) {
    const fm3::sm90::TilePlace place =
        fm3::sm90::place_tile({b, h_q, count, heads_per_group, num_late, team_heads}, tile_id);
    places[3 * tile_id] = place.b_idx;
    places[3 * tile_id + 1] = place.h_idx;
    places[3 * tile_id + 2] = place.rank;
  }
}
