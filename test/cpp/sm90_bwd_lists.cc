// SPDX-License-Identifier: Apache-2.0
// The passes that make the backward's lists, run on the host: for test/unit/test_sm90_bwd_lists.py.
#include <algorithm>

#include "cuda_on_host.h"
#include "ops/cuda/schedule/with_form.cuh"
#include "ops/cuda/sm90_bwd/list_kernels.cuh"

using namespace fm3;
using namespace fm3::sm90_bwd;

namespace {

template <BoundForm kForm>
void build(const MaskView& mask, const MaskLists& lists) {
  const ListGrids grids = list_grids(mask, lists);
  cuda_on_host::launch(grids.border_ctas, kVisitThreads, border_kernel<kForm>, mask, lists, grids);
  cuda_on_host::launch(grids.cut_ctas, kVisitThreads, cut_kernel<kForm>, mask, lists, grids);
  cuda_on_host::launch(lists.num_tile_lists * grids.visit_ctas, kVisitThreads, visit_kernel<kForm>,
                       mask, lists, grids);
  cuda_on_host::launch(lists.num_tile_lists * (grids.order_ctas + grids.visitor_ctas),
                       sm90::kRankThreads, sm90_bwd::list_kernel, lists, grids);
}

}  // namespace

extern "C" {

int64_t lists_bytes(const MaskView* mask) {
  return lists_layout(*mask, kBlockKs, kNumBlockKs, nullptr, nullptr);
}

// Makes the lists of both sizes of key tile.
void build_lists(const MaskView* mask, void* blob) {
  MaskLists lists;
  lists_layout(*mask, kBlockKs, kNumBlockKs, blob, &lists);
  sm90::with_form(mask->form, [&](auto form) { build<decltype(form)::value>(*mask, lists); });
}

// Where the parts begin of the lists of key tiles of block_k keys: k_begins, num_tiles, bounds, step_bits,
// step_chunks, tile_steps, by_length, summaries, visitors, visits, shared_rows; then q_rows, q_tiles, row_places, < 0 if
// there are none.
void lists_offsets(const MaskView* mask, int32_t block_k, int64_t* offsets) {
  char base[1];
  MaskLists lists;
  lists_layout(*mask, kBlockKs, kNumBlockKs, base, &lists);
  const TileLists& tiles = lists.tiles[block_k == lists.tiles[0].block_k ? 0 : 1];
  const void* const parts[] = {
      tiles.k_begins,    tiles.num_tiles, tiles.bounds,    tiles.step_bits, tiles.step_chunks,
      tiles.tile_steps,  tiles.by_length, tiles.summaries, tiles.visitors,  tiles.visits,
      tiles.shared_rows, lists.q_rows,    lists.q_tiles,   lists.row_places};
  for (const void* part : parts) {
    *offsets++ = part == nullptr ? -1 : static_cast<const char*>(part) - base;
  }
}

// Key tiles of block_k keys that the lists have room for.
int32_t room_of_tiles(const MaskView* mask, int32_t block_k) { return max_k_tiles(*mask, block_k); }

// Row tiles that they have room for.
int32_t room_of_row_tiles(const MaskView* mask) { return max_q_tiles(*mask); }

int32_t visitors_before(uint32_t bits, int32_t before, int32_t k_tile_idx) {
  return Visitors{bits, before}.before_tile(k_tile_idx);
}

}  // extern "C"
