// SPDX-License-Identifier: Apache-2.0
// Third pass: the lists of spans. One CTA four query tiles and their two pairs: all threads judge
// what these see, then a warp a list makes the spans.
#pragma once

#include "section_judge.cuh"

namespace fm3::sm90 {

template <BoundForm kForm, bool kIsCut>
__global__ void __launch_bounds__(kListThreads, 2)
    list_kernel(const MaskView mask, const ScheduleView schedule) {
  __shared__ ListSmem smem;
  const int32_t groups = (schedule.pairs.count + kPairsPerCta - 1) / kPairsPerCta;
  const int64_t list_idx = blockIdx.x / groups;
  const int32_t pair_begin = static_cast<int32_t>(blockIdx.x % groups) * kPairsPerCta;

  // Warps 0 and on: pair 0, its two tiles, pair 1, its two tiles.
  const int32_t warp = threadIdx.x / 32;
  const bool is_pair = warp % 3 == 0;
  const SpanLists lists = is_pair ? schedule.pairs : schedule.tiles;
  const int32_t pair = pair_begin + warp / 3, entry = is_pair ? pair : 2 * pair + warp % 3 - 1;
  const bool has_entry = warp < kListsPerCta && entry < lists.count;
  const int64_t out = list_idx * lists.count + entry;
  const bool has_cuts = kIsCut && schedule.totals->has_cuts();
  const int32_t pair_cols = pair_item_cols(has_cuts);
  ListWarp maker(lists.spans + out * schedule.max_spans, is_pair ? pair_cols : kTileItemCols);

  if constexpr (kIsCut) {
    if (warp == 0) {
      const auto lane = static_cast<int32_t>(threadIdx.x);
      const int32_t tile = min(2 * pair_begin + min(lane, kTilesPerCta), schedule.tiles.count);
      const int32_t begin = tile_begin(schedule, list_idx, tile, mask.s_q);
      const uint32_t with_rows = __ballot_sync(kWholeWarp, begin < mask.s_q);
      if (lane <= kTilesPerCta) smem.q_begins[lane] = begin;
      if (lane == 0) smem.num_tiles = __popc(with_rows & ((1u << kTilesPerCta) - 1));
    }
    __syncthreads();
  }
  const auto rows = [&]() {                         // of the entry
    const int32_t own = entry * (is_pair ? 2 : 1);  // the first tile
    const auto begin = [&](int32_t tile) {
      return kIsCut                        ? smem.q_begins[tile - 2 * pair_begin]
             : tile < schedule.num_q_tiles ? tile * kTileQ
                                           : mask.s_q;
    };
    return TileRows::make(begin(own), begin(own + 1), begin(own + (is_pair ? 2 : 1)));
  };
  bool has_list = has_entry;
  if constexpr (kIsCut) {
    has_list = has_entry && rows().count(0) > 0 && !(is_pair && has_cuts && rows().count(1) == 0);
    if (has_entry && !has_list && threadIdx.x % 32 == 0) lists.costs[out] = {0, {0}, rows()};
    if (smem.num_tiles == 0) return;
  }

  SectionJudge<kForm, kIsCut> judge(mask, schedule, smem, list_idx, 2 * pair_begin);
  for (int32_t section = 0; section * kSectionHulls < schedule.num_hulls; ++section) {
    const int32_t hull_begin = section * kSectionHulls;
    const int32_t num_words =
        min((schedule.num_hulls - hull_begin + kHullsPerWord - 1) / kHullsPerWord, kSectionWords);
    if (threadIdx.x == 0) smem.num_hulls = smem.num_granules = 0;
    __syncthreads();
    judge.judge_hulls(hull_begin);
    __syncthreads();
    judge.judge_granules(hull_begin);
    __syncthreads();
    if (kForm != BoundForm::kNone && smem.num_granules > 0) {
      judge.judge_columns(hull_begin);
      __syncthreads();
    }
    judge.find_begins(has_cuts);
    __syncthreads();
    judge.make_words(num_words, pair_cols);
    __syncthreads();
    if (has_list) {
      maker.section(smem.lists[warp], section, (num_words + kBlockWords - 1) / kBlockWords);
    }
  }
  if (has_list) {
    const ListBegin begin = smem.begins[warp];
    TileCost cost = maker.finish(begin.shift, begin.ends_early, !is_pair || has_cuts);
    cost.rows = rows();
    if (threadIdx.x % 32 == 0) lists.costs[out] = cost;
  }
}

}  // namespace fm3::sm90
