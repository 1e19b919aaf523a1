// SPDX-License-Identifier: Apache-2.0
// How many tiles of 128 x 128 each chunk of query rows must compute. O(s) time and memory.
#pragma once

#include <vector>

#include "tile_scan.h"

namespace fm3::planner {

struct ChunkTiles {
  int64_t visited, full;  // full counts those of `visited` that hide nothing
};

// Summed over planes. Row tiles start at each chunk's first row.
std::vector<ChunkTiles> count_chunk_tiles(const TileScan& scan, const ChunkGrid& grid);

}  // namespace fm3::planner
