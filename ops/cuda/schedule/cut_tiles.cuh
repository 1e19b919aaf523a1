// SPDX-License-Identifier: Apache-2.0
// Second pass, for masks whose query tiles may leave the grid: where they begin (cuts.h). The scan has noted borders, key
// columns none of whose rows the column before shows.
#pragma once

#include "list_warp.cuh"

namespace fm3::sm90 {

// Rows that a key column shows up to the first one behind them that it hides; begin >= end if it shows none.
FM3_HOST_DEVICE Interval first_rows(const HiddenRows& hidden, int32_t s_q) {
  int32_t begin = hidden.causal.end;
  for (int32_t round = 0; round < 2; ++round) {  // one interval may continue the other
    if (hidden.ut.begin <= begin) begin = larger(begin, hidden.ut.end);
    if (hidden.lt.begin <= begin) begin = larger(begin, hidden.lt.end);
  }
  if (begin >= s_q) return {s_q, 0};
  int32_t end = s_q;
  if (hidden.ut.begin >= begin && hidden.ut.begin < hidden.ut.end) end = hidden.ut.begin;
  if (hidden.lt.begin >= begin && hidden.lt.begin < hidden.lt.end) {
    end = smaller(end, hidden.lt.begin);
  }
  return {begin, end};
}

// Whether documents may meet at a column that shows `own`, behind one that shows `before`. Not at keys that nobody sees.
FM3_HOST_DEVICE bool is_border(const Interval& before, const Interval& own) {
  return before.begin < before.end && before.end <= own.begin && own.begin < own.end;
}

constexpr int kCutThreads = 1024, kCutWarps = kCutThreads / 32;
constexpr int32_t kMostBorders = 1024;  // looked at; what is behind them counts as one document
constexpr int32_t kBorderCols =
    128;  // on either side of a border that is cut: none shows rows of both

struct CutSmem {
  // Of borders, ascending, and behind the last one s_k and s_q.
  int32_t border[kMostBorders + 1], row[kMostBorders + 1];  // key column; first row that it shows
  int32_t last[kMostBorders + 1];  // first row that the column before shows
  uint32_t is_cut[kMostBorders / 32];
  int32_t counts[kCutWarps];
  // Of cuts, from row 0 on, and behind the last one s_q.
  int32_t cut_row[kMostBorders + 2], cut_tile[kMostBorders + 2];  // tiles before it
  bool cut_grows[kMostBorders + 2];  // whether rows behind it see more and more
  int32_t num_cuts;
};

// The list's first kMostBorders borders to shared memory; how many. By the whole CTA, a thread a hull.
__device__ __forceinline__ int32_t find_borders(const MaskView& mask, const ScheduleView& schedule,
                                                int64_t list_idx, CutSmem& smem) {
  const auto thread = static_cast<int32_t>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const auto* const hulls =
      reinterpret_cast<const uint4*>(schedule.borders) + list_idx * schedule.num_hulls;
  int32_t num_found = 0;
  for (int32_t base = 0; base < schedule.num_hulls && num_found < kMostBorders;
       base += kCutThreads) {
    const int32_t hull = base + thread;
    const uint4 own = hull < schedule.num_hulls ? hulls[hull] : uint4{0, 0, 0, 0};
    const int32_t own_count = __popc(own.x) + __popc(own.y) + __popc(own.z) + __popc(own.w);
    int32_t place = own_count;
#pragma unroll
    for (int32_t distance = 1; distance < 32; distance *= 2) {
      const int32_t before = __shfl_up_sync(kWholeWarp, place, distance);
      if (lane >= distance) place += before;
    }
    if (lane == 31) smem.counts[warp] = place;
    __syncthreads();
    place += num_found - own_count;
    for (int32_t idx = 0; idx < kCutWarps; ++idx) {
      const int32_t count = smem.counts[idx];
      if (idx < warp) place += count;
      num_found += count;
    }
#pragma unroll
    for (int32_t word = 0; word < kHullCols / 32; ++word) {
      uint32_t bits = reinterpret_cast<const uint32_t*>(&own)[word];
      for (; bits != 0 && place < kMostBorders; bits &= bits - 1) {
        smem.border[place++] = hull * kHullCols + word * 32 + __ffs(bits) - 1;
      }
    }
    __syncthreads();
  }
  num_found = min(num_found, kMostBorders);
  if (thread == 0) smem.border[num_found] = mask.s_k;
  __syncthreads();
  return num_found;
}

// Marks the borders that are worth a cut. By the whole CTA; `bounds`: of the list.
template <BoundForm kForm>
__device__ __forceinline__ void mark_cuts(const MaskView& mask, const int32_t* bounds,
                                          int32_t num_borders, CutSmem& smem) {
  const auto thread = static_cast<int32_t>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const auto rows_of = [&](int32_t k_idx) {
    return first_rows(
        hidden_rows_of(bounds + int64_t{k_idx} * num_bounds(kForm), kForm, mask, k_idx), mask.s_q);
  };
  // A thread a border.
  for (int32_t idx = thread; idx <= num_borders; idx += kCutThreads) {
    const int32_t border = smem.border[idx];
    smem.row[idx] = border < mask.s_k ? rows_of(border).begin : mask.s_q;
    smem.last[idx] = rows_of(border - 1).begin;
  }
  __syncthreads();
  const auto row_before = [&](int32_t idx) { return idx == 0 ? 0 : smem.row[idx - 1]; };
  const auto grows_before = [&](int32_t idx) {
    return row_before(idx) < smem.last[idx] && smem.last[idx] < mask.s_q;
  };

  // A warp a border: whether it is worth a cut, and the border of more than two keys.
  for (int32_t idx = thread; idx < kMostBorders / 32; idx += kCutThreads) smem.is_cut[idx] = 0;
  __syncthreads();
  for (int32_t idx = warp; idx < num_borders; idx += kCutWarps) {
    if (!is_worth_a_cut(smem.row[idx] - row_before(idx), grows_before(idx),
                        smem.row[idx + 1] - smem.row[idx])) {
      continue;
    }
    const int32_t border = smem.border[idx];
    int32_t end_before = 0, begin_behind = mask.s_q;
#pragma unroll
    for (int32_t round = 0; round < kBorderCols / 32; ++round) {
      const int32_t before = border - 1 - round * 32 - lane, behind = border + round * 32 + lane;
      if (before >= 0) end_before = larger(end_before, rows_of(before).end);
      if (behind < mask.s_k) begin_behind = smaller(begin_behind, rows_of(behind).begin);
    }
    end_before = __reduce_max_sync(kWholeWarp, end_before);
    begin_behind = __reduce_min_sync(kWholeWarp, begin_behind);
    if (lane == 0 && end_before <= begin_behind) atomicOr(&smem.is_cut[idx / 32], 1u << idx % 32);
  }
  __syncthreads();
}

// Cuts of those marked in is_cut. By one warp.
// Claim:      there are at most schedule.tiles.count tiles.
// Because:    a cut is made only if the tiles before it and the grid behind it fit, and the first that do not end it.
// Breaks if:  rows of cuts do not ascend.
// Tested by:  test/unit/test_sm90_fwd_cuts.py
__device__ __forceinline__ void choose_cuts(const MaskView& mask, const ScheduleView& schedule,
                                            int32_t num_borders, CutSmem& smem) {
  const auto lane = static_cast<int32_t>(threadIdx.x % 32);
  const uint32_t lanes_before = (1u << lane) - 1;
  const auto grows = [&](int32_t row, int32_t last) { return row < last && last < mask.s_q; };
  int32_t num_cuts = 1, last_row = 0, last_tile = 0;  // so far; the last one's
  for (int32_t base = 0; base < num_borders; base += 32) {
    const int32_t idx = base + lane;
    const bool is_marked = (smem.is_cut[base / 32] >> lane & 1) != 0;
    const int32_t row = is_marked ? smem.row[idx] : 0;
    int32_t reached = row;
#pragma unroll
    for (int32_t distance = 1; distance < 32; distance *= 2) {
      const int32_t before = __shfl_up_sync(kWholeWarp, reached, distance);
      if (lane >= distance) reached = max(reached, before);
    }
    const int32_t reached_before = __shfl_up_sync(kWholeWarp, reached, 1);
    const bool ascends = row > max(last_row, lane == 0 ? 0 : reached_before);
    uint32_t cuts = __ballot_sync(kWholeWarp, ascends);
    const uint32_t before = cuts & lanes_before;
    const int32_t row_before = __shfl_sync(kWholeWarp, row, 31 - __clz(before | 1));
    int32_t tile = ascends ? tiles_of(row - (before == 0 ? last_row : row_before)) : 0;
#pragma unroll
    for (int32_t distance = 1; distance < 32; distance *= 2) {
      const int32_t before = __shfl_up_sync(kWholeWarp, tile, distance);
      if (lane >= distance) tile += before;
    }
    tile += last_tile;
    const bool fits = tile + tiles_of(mask.s_q - row) <= schedule.tiles.count;
    const uint32_t too_many = __ballot_sync(kWholeWarp, ascends && !fits);
    cuts &= (too_many & (~too_many + 1)) - 1;
    if ((cuts >> lane & 1) != 0) {
      const int32_t place = num_cuts + __popc(cuts & lanes_before);
      smem.cut_row[place] = row, smem.cut_tile[place] = tile;
      smem.cut_grows[place] = grows(row, smem.last[idx + 1]);
    }
    if (cuts != 0) {
      num_cuts += __popc(cuts);
      last_row = __shfl_sync(kWholeWarp, row, 31 - __clz(cuts));
      last_tile = __shfl_sync(kWholeWarp, tile, 31 - __clz(cuts));
    }
    if (too_many != 0) break;
  }
  if (lane == 0) {
    smem.cut_row[0] = smem.cut_tile[0] = 0;
    smem.cut_grows[0] = num_cuts > 1 && grows(0, smem.last[0]);
    smem.cut_row[num_cuts] = mask.s_q;
    smem.cut_tile[num_cuts] = last_tile + tiles_of(mask.s_q - last_row);
    smem.num_cuts = num_cuts;
  }
}

// A CTA a list.
template <BoundForm kForm>
__global__ void __launch_bounds__(kCutThreads)
    cut_kernel(const MaskView mask, const ScheduleView schedule) {
  __shared__ CutSmem smem;
  const auto list_idx = static_cast<int64_t>(blockIdx.x);
  const auto thread = static_cast<int32_t>(threadIdx.x), warp = thread / 32;
  const int32_t* const bounds = mask.bounds + list_idx * mask.s_k * num_bounds(kForm);
  const int32_t num_borders = find_borders(mask, schedule, list_idx, smem);

  if (num_borders > 0) mark_cuts<kForm>(mask, bounds, num_borders, smem);
  if (warp == 0) choose_cuts(mask, schedule, num_borders, smem);
  __syncthreads();
  const int32_t num_cuts = smem.num_cuts, num_tiles = smem.cut_tile[num_cuts];
  int32_t* const q_begins = schedule.q_begins + list_idx * (schedule.tiles.count + 1);
  for (int32_t tile = thread; tile <= schedule.tiles.count; tile += kCutThreads) {
    int32_t cut = 0;  // the last one at or before the tile
    for (int32_t step = kMostBorders; step > 0; step /= 2) {
      if (cut + step < num_cuts && smem.cut_tile[cut + step] <= tile) cut += step;
    }
    q_begins[tile] = tile < num_tiles ? begin_in(smem.cut_row[cut], smem.cut_row[cut + 1],
                                                 smem.cut_grows[cut], tile - smem.cut_tile[cut])
                                      : mask.s_q;
  }
  if (thread == 0 && num_cuts > 1) atomicAdd(&schedule.totals->num_cuts, num_cuts - 1);
}

}  // namespace fm3::sm90
