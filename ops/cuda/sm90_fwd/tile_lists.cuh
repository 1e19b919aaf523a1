// SPDX-License-Identifier: Apache-2.0
// How the warps of the producer find a claimed tile's list of spans.
#pragma once

#include "config.cuh"

namespace fm3::sm90 {

constexpr uint32_t kAllLanes = 0xFFFFFFFF;

// Spans of a tile are read 32 at a time into the lanes of a warp: those from `base` on.
__device__ __forceinline__ uint32_t fetch_spans(const Span* spans, int32_t num_spans,
                                                int32_t base) {
  const int32_t idx = base + static_cast<int32_t>(threadIdx.x % 32);
  return idx < num_spans ? __ldg(&spans[idx].packed) : 0;
}

__device__ __forceinline__ int64_t mask_list(const FwdArgs& args, int32_t b_idx, int32_t h_idx) {
  return int64_t{b_idx} * args.mask.h_mask + mask_head(args, h_idx);
}

template <class Config>
__device__ __forceinline__ int32_t steps_of(const Span& span) {
  const int32_t num_left_out = Config::kStepsPerItem == 2 && span.ends_short() ? 1 : 0;
  return span.count() * Config::kStepsPerItem - num_left_out;
}

// The lists that a team of CTAs walks: those of single tiles or of pairs.
template <class Config>
__device__ __forceinline__ const SpanLists& team_lists(const FwdArgs& args) {
  if constexpr (Config::kTeamTiles == 2) return args.schedule.pairs;
  return args.schedule.tiles;
}

template <class Config>
__device__ __forceinline__ const Span* tile_spans(const FwdArgs& args, int64_t list_idx,
                                                  int32_t q_tile_idx) {
  const SpanLists& lists = team_lists<Config>(args);
  const int32_t entry = q_tile_idx / Config::kTeamTiles;
  return lists.spans + (list_idx * lists.count + entry) * args.schedule.max_spans;
}
template <class Config>
__device__ __forceinline__ const Span* tile_spans(const FwdArgs& args,
                                                  const typename Config::Tile& tile) {
  return tile_spans<Config>(args, mask_list(args, tile.b_idx, tile.h_idx), tile.q_tile_idx);
}

}  // namespace fm3::sm90
