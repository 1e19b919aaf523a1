// SPDX-License-Identifier: Apache-2.0
// The Hopper schedule's decisions, run on the host for test/unit/test_sm90_spans.py.
#include <algorithm>
#include <vector>

#include "ops/cuda/schedule/device_schedule.cuh"
#include "ops/cuda/schedule/span_writer.cuh"

using namespace fm3;
using namespace fm3::sm90;

namespace {

ColumnHull make_hull(const MaskView& mask, const int32_t* bounds, int32_t k_begin, int32_t k_end) {
  int32_t low[4] = {kNever, kNever, kNever, kNever}, high[4] = {-1, -1, -1, -1};
  for (int32_t k_idx = k_begin; k_idx < k_end; ++k_idx) {
    const HiddenRows rows = hidden_rows(mask, bounds, k_idx);
    const bool has_lt = rows.lt.begin < rows.lt.end, has_ut = rows.ut.begin < rows.ut.end;
    const int32_t value[4] = {has_lt ? rows.lt.begin : kNever, has_lt ? rows.lt.end : -1,
                              has_ut ? rows.ut.begin : kNever, has_ut ? rows.ut.end : -1};
    for (int idx = 0; idx < 4; ++idx) {
      low[idx] = std::min(low[idx], value[idx]);
      high[idx] = std::max(high[idx], value[idx]);
    }
  }
  return {low[0], high[0], low[1], high[1], low[2], high[2], low[3], high[3]};
}

}  // namespace

extern "C" {

int32_t item_cols(int32_t is_pair) { return is_pair ? kPairItemCols : kTileItemCols; }
int32_t hull_cols() { return kHullCols; }

// 0 skip, 1 partial, 2 full.
int32_t hull_class(const MaskView* mask, int32_t list_idx, int32_t hull_idx, int32_t q_begin,
                   int32_t q_end) {
  const int32_t* bounds = mask->bounds + int64_t{list_idx} * mask->s_k * num_bounds(mask->form);
  const int32_t k_begin = hull_idx * kHullCols;
  const int32_t k_end = std::min(k_begin + kHullCols, mask->s_k);
  return static_cast<int32_t>(
      classify(make_hull(*mask, bounds, k_begin, k_end), *mask, k_begin, k_end, q_begin, q_end));
}

// Spans of one query tile, or of the pair that begins with it, as {k_begin, count, is_full} triples;
// the number of spans.
int32_t spans(const MaskView* mask, int32_t list_idx, int32_t q_tile_idx, int32_t is_pair,
              int32_t* triples, int32_t capacity) {
  const int32_t* bounds = mask->bounds + int64_t{list_idx} * mask->s_k * num_bounds(mask->form);
  const int32_t num_tiles = is_pair ? 2 : 1;
  const int32_t q_begin = q_tile_idx * kTileQ;
  const int32_t q_end = std::min(q_begin + num_tiles * kTileQ, mask->s_q);
  const int32_t num_hulls = (mask->s_k + kHullCols - 1) / kHullCols;
  const int32_t num_q_tiles = (mask->s_q + kTileQ - 1) / kTileQ;
  std::vector<Span> written(mask->s_k / kTileItemCols + 3);  // and the end
  SpanWriter writer(written.data(), true, item_cols(is_pair));
  const int32_t num_granules = num_hulls * (kHullCols / kGranuleCols);
  for (int32_t granule = 0; granule < num_granules; ++granule) {
    bool is_visible = false, is_full = true;
    for (int32_t k_idx = granule * kGranuleCols; k_idx < (granule + 1) * kGranuleCols; ++k_idx) {
      int32_t num_kept = 0;
      for (int32_t tile = q_tile_idx; tile < q_tile_idx + num_tiles; ++tile) {
        if (k_idx < mask->s_k && tile < num_q_tiles &&
            (mask->block_mask == nullptr ||
             mask->block_mask[(int64_t{list_idx} * num_q_tiles + tile) * num_hulls +
                              k_idx / kHullCols] != 0)) {
          ++num_kept;
        }
      }
      const HiddenRows rows = num_kept == 0 ? HiddenRows{} : hidden_rows(*mask, bounds, k_idx);
      is_visible = is_visible || (num_kept > 0 && !covers(rows, q_begin, q_end));
      is_full = is_full && num_kept == num_tiles && !touches(rows, q_begin, q_end);
    }
    writer.granule(granule, is_visible, is_full);
  }
  writer.finish(num_granules);
  for (int32_t idx = 0; idx < std::min(writer.num_spans(), capacity); ++idx) {
    triples[3 * idx] = written[idx].k_begin();
    triples[3 * idx + 1] = written[idx].count();
    triples[3 * idx + 2] = written[idx].is_full();
  }
  return writer.num_spans();
}

}  // extern "C"
