// SPDX-License-Identifier: Apache-2.0
#include "workload.h"

namespace fm3::planner {
namespace {

// Row tiles of 128 rows, cut anew at each chunk's first row.
class RowTiles {
 public:
  explicit RowTiles(const ChunkGrid& grid) : grid_(grid) {
    int32_t count = 0;
    for (int32_t chunk = 0; chunk < grid.num_chunks(); ++chunk) {
      tile_begins_.push_back(count);
      count += (grid.rows(chunk) + kTile - 1) / kTile;
    }
    tile_begins_.push_back(count);
  }
  int32_t num_tiles() const { return tile_begins_.back(); }
  int32_t first_of_chunk(int32_t chunk) const { return tile_begins_[chunk]; }
  int32_t tile_of(int32_t row) const {
    const int32_t chunk = grid_.chunk_of(row);
    return tile_begins_[chunk] + (row - grid_.begin(chunk)) / kTile;
  }
  // First tile that begins at or after `row`.
  int32_t tile_at_or_after(int32_t row) const {
    if (row >= grid_.s()) return num_tiles();
    const int32_t chunk = grid_.chunk_of(row);
    return tile_begins_[chunk] + (row - grid_.begin(chunk) + kTile - 1) / kTile;
  }
  // Number of tiles that end at or before `row`.
  int32_t tiles_ending_by(int32_t row) const {
    if (row >= grid_.s()) return num_tiles();
    return tile_of(row);
  }

 private:
  const ChunkGrid& grid_;
  std::vector<int32_t> tile_begins_;  // [num_chunks + 1]
};

}  // namespace

std::vector<ChunkTiles> count_chunk_tiles(const TileScan& scan, const ChunkGrid& grid) {
  const RowTiles tiles(grid);
  // Differences along row tiles: +1 where a run of visited (or full) tiles begins, -1 where it ends.
  std::vector<int64_t> visited(tiles.num_tiles() + 1), full(tiles.num_tiles() + 1);
  for (int64_t tile = 0; tile < scan.num_tiles(); ++tile) {
    int32_t counted = 0;  // two visible runs may touch one row tile; it is visited once
    for (int32_t i = scan.visible_begins[tile]; i < scan.visible_begins[tile + 1]; ++i) {
      const int32_t first = std::max(counted, tiles.tile_of(scan.visible[i].begin));
      const int32_t last = tiles.tile_of(scan.visible[i].end - 1) + 1;
      if (first >= last) continue;
      ++visited[first];
      --visited[last];
      counted = last;
    }
    for (int32_t i = scan.clear_begins[tile]; i < scan.clear_begins[tile + 1]; ++i) {
      const int32_t first = tiles.tile_at_or_after(scan.clear[i].begin);
      const int32_t last = tiles.tiles_ending_by(scan.clear[i].end);
      if (first >= last) continue;
      ++full[first];
      --full[last];
    }
  }
  std::vector<ChunkTiles> counts(grid.num_chunks());
  int64_t visited_now = 0, full_now = 0;
  for (int32_t chunk = 0; chunk < grid.num_chunks(); ++chunk) {
    for (int32_t tile = tiles.first_of_chunk(chunk); tile < tiles.first_of_chunk(chunk + 1);
         ++tile) {
      visited_now += visited[tile];
      full_now += full[tile];
      counts[chunk].visited += visited_now;
      counts[chunk].full += full_now;
    }
  }
  return counts;
}

}  // namespace fm3::planner
