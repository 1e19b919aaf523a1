// SPDX-License-Identifier: Apache-2.0
// Order of a prepared schedule for keys that are still on their way (LocalFirst).
//
// A CTA that waits for keys waits with all it has, so tiles that need what is there, or comes first, are begun with;
// but no more of them than fill the time until the rest is in: short ones are worth more at the end, where they even
// out when CTAs are done.
#pragma once

#include "../schedule/device_schedule.cuh"
#include "fm3/rows.h"

namespace fm3::sm90 {

constexpr int32_t kOrderLanes = 32;  // one warp a list
static_assert(sizeof(TileCost) == sizeof(QueryTileEntry), "costs serve as scratch");

// CTA i of the first half of the grid orders list i of single tiles, one of the second half pairs.
__global__ void __launch_bounds__(kOrderLanes)
    local_first_kernel(ScheduleView schedule, const __grid_constant__ LocalFirst first) {
  constexpr uint32_t kAllLanes = 0xFFFFFFFF;
  const auto num_lists = static_cast<int32_t>(gridDim.x / 2);
  const auto cta = static_cast<int32_t>(blockIdx.x);
  const bool is_pair = cta >= num_lists;
  const SpanLists lists = is_pair ? schedule.pairs : schedule.tiles;
  const int32_t item_cols = is_pair ? pair_item_cols(schedule.totals->has_cuts()) : kTileItemCols;
  const int64_t list_begin = int64_t{is_pair ? cta - num_lists : cta} * lists.count;
  QueryTileEntry* const order = lists.order + list_begin;
  const TileCost* const costs = lists.costs + list_begin;
  const auto lane = static_cast<int32_t>(threadIdx.x);
  const uint32_t lanes_before = (1u << lane) - 1;
  const EntryCounts& counts = is_pair ? schedule.totals->pairs : schedule.totals->tiles;
  const int32_t count = counts.most;  // of the list's entries
  // The part that the tile at order[idx] waits for: it needs keys up to k_ends[part]. num_ends: what comes last.
  const auto part_of = [&](int32_t idx) {
    if (idx >= count) return -1;
    const QueryTileEntry entry = order[idx];
    if (entry.list.num_spans() == 0) return first.num_ends;  // no tile
    const Span* spans = lists.spans + (list_begin + entry.q_tile_idx) * schedule.max_spans;
    const Span last = spans[entry.list.num_spans() - 1];
    const int32_t k_end = last.k_begin() + entry.list.shift() + last.count() * item_cols;
    int32_t part = 0;
    while (part < first.num_ends && first.k_ends[part] < k_end) ++part;
    return part;
  };

  // What comes first: all of the parts before last_part, and the dearest num_of_last tiles of that one.
  int32_t last_part = 0, num_of_last = 0, num_first = 0;
  int64_t num_cols = 0;
  for (int32_t part = 0; part < first.num_ends && num_cols < first.num_cols; ++part) {
    last_part = part, num_of_last = 0;
    for (int32_t base = 0; base < count; base += kOrderLanes) {
      const bool is_in = part_of(base + lane) == part;
      const int32_t own = is_in ? costs[order[base + lane].q_tile_idx].halves * item_cols / 2 : 0;
      int32_t until = is_pair ? 2 * own : own;  // of this lane and those before it
      for (int32_t step = 1; step < kOrderLanes; step *= 2) {
        const int32_t before = __shfl_up_sync(kAllLanes, until, step);
        until += lane < step ? 0 : before;
      }
      const bool is_first = is_in && num_cols + until - (is_pair ? 2 * own : own) < first.num_cols;
      num_of_last += __popc(__ballot_sync(kAllLanes, is_first));
      num_cols += __shfl_sync(kAllLanes, until, kOrderLanes - 1);
    }
    num_first += num_of_last;
  }
  if (lane == 0) {  // of all lists the most, so that those before them come first in each
    atomicMax(is_pair ? &schedule.totals->late_pairs : &schedule.totals->late_tiles,
              count - num_first);
  }

  auto* const sorted = reinterpret_cast<QueryTileEntry*>(lists.costs + list_begin);
  int32_t num_sorted = 0;
  for (int32_t pass = 0; pass <= last_part + 1; ++pass) {  // the last one: what does not come first
    int32_t num_seen = 0;                                  // tiles of last_part
    for (int32_t base = 0; base < count; base += kOrderLanes) {
      const int32_t part = part_of(base + lane);
      const uint32_t same = __ballot_sync(kAllLanes, part == last_part);
      const int32_t rank = num_seen + __popc(same & lanes_before);
      const bool is_first = part < last_part || (part == last_part && rank < num_of_last);
      const bool is_due = pass > last_part ? !is_first : is_first && part == pass;
      const uint32_t due = __ballot_sync(kAllLanes, is_due && part >= 0);
      if (due >> lane & 1) sorted[num_sorted + __popc(due & lanes_before)] = order[base + lane];
      num_seen += __popc(same), num_sorted += __popc(due);
    }
  }
  __syncwarp();
  for (int32_t idx = lane; idx < count; idx += kOrderLanes) order[idx] = sorted[idx];
}

}  // namespace fm3::sm90
