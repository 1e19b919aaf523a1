// SPDX-License-Identifier: Apache-2.0
// Warp 0: claims work, walks the visited row tiles, keeps Q, dO, K and V coming.
#pragma once

#include "../sm90_fwd/remote_rows.cuh"
#include "row_walk.cuh"

namespace fm3::sm90_bwd {

// Copies one [rows, kCols] tile of 2-byte elements, a panel of 64 columns at a time (128-byte swizzled rows).
template <int kRows, int kCols>
__device__ __forceinline__ void load_panels(uint32_t smem_dst, const CUtensorMap* map,
                                            uint32_t barrier, int32_t row, int32_t h_idx,
                                            int32_t b_idx, uint64_t l2_policy) {
#pragma unroll
  for (int panel = 0; panel < kCols / 64; ++panel) {
    ptx::tma_load_4d(smem_dst + panel * kRows * 128, map, barrier, panel * 64, row, h_idx, b_idx,
                     l2_policy);
  }
}

// Claims the next work item and copies what it is about to slot `tile_pos`. All lanes; the slot is read
// by the loader too.
template <class C>
__device__ __forceinline__ void publish_tile(const KernelArgs& args, Smem<C>& smem,
                                             const RingPos<2>& tile_pos) {
  const int32_t lane = threadIdx.x % 32;
  int32_t work_idx = 0;
  if (lane == 0) work_idx = atomicAdd(args.next_work, 1);
  work_idx = __shfl_sync(kAllLanes, work_idx, 0);
  constexpr int32_t kParts = sizeof(TileInfo) / sizeof(int4);
  int4 part = make_int4(0, 0, 0, -1);
  if (lane < kParts && work_idx < __ldg(&args.plan->num_items)) {
    part = __ldg(reinterpret_cast<const int4*>(args.items + work_idx) + lane);
  }
  ptx::mbar_wait(&smem.tile_empty[tile_pos.slot()], tile_pos.write_parity());
  if (lane < kParts) reinterpret_cast<int4*>(&smem.tile[tile_pos.slot()])[lane] = part;
  __syncwarp();
  if (ptx::arrives(lane == 0)) ptx::mbar_arrive(&smem.tile_full[tile_pos.slot()]);
  __syncwarp();
}

__device__ __forceinline__ uint32_t step_flags(const RowWalk& walk, uint32_t bounds_slot) {
  return static_cast<uint32_t>(walk.q_tile_idx()) << StepInfo::kStepTileShift |
         (walk.is_partial() ? kStepPartial : 0) | (bounds_slot ? kStepBoundsSlot : 0);
}

// Copies Q and dO of a step, lse, delta and bounds, and says what the step is. All lanes.
template <class C>
__device__ __forceinline__ void load_step(const KernelArgs& args, Smem<C>& smem,
                                          const volatile TileInfo& tile, const RowWalk& walk,
                                          const RingPos<C::kQStages>& step_pos, int32_t mask_idx,
                                          int32_t h_q_idx, uint32_t visits_order,
                                          uint32_t bounds_slot, bool needs_bounds) {
  using Row = RowValue<C>;
  constexpr uint32_t kRowBytes = kBlockQ * sizeof(Row);
  // Operands of copies, worked out by all lanes ahead of the waits: 110 instructions a step instead of 250. That alone
  // gives 0.2 % of the cycles; the rest of 1 to 1.4 % is the order in which ptxas then puts the consumers' instructions
  // (compare the machine code before this form changes: 8K full 105.8 Mcycles, 107.2 in the other order).
  const uint32_t slot = step_pos.slot(), dout_slot = step_pos.count % C::kDoutStages;
  const int32_t q_tile_idx = ptx::uniform(walk.q_tile_idx());
  const int32_t h_idx = ptx::uniform(h_q_idx), b_idx = ptx::uniform(tile.b_idx);
  // Of this step, among all rows of all heads. 32 bits number their row tiles: lse of 2^31 would be 2 TB.
  const int64_t first_row =
      int64_t{(b_idx * args.shape.h_q + h_idx) * args.num_q_tiles + q_tile_idx} * kBlockQ;
  const int32_t q_begin = walk.q_begin();
  const uint32_t base = ptx::uniform(ptx::smem_addr(&smem));
  const uint32_t q_slot = ptx::uniform(slot), count = ptx::uniform(step_pos.count);
  const uint32_t q_full = base + offsetof(Smem<C>, q_full) + q_slot * sizeof(Barrier);
  const uint32_t q_at = base + offsetof(Smem<C>, q) + q_slot * Sizes<C>::kQBytes;
  const uint32_t lse_at = base + offsetof(Smem<C>, lse) + count % C::kLseStages * kRowBytes;
  const uint32_t dout_full =
      base + offsetof(Smem<C>, dout_full) + count % C::kDoutStages * sizeof(Barrier);
  const uint32_t dout_at =
      base + offsetof(Smem<C>, dout) + count % C::kDoutStages * Sizes<C>::kDoutBytes;
  const uint32_t delta_at =
      base + offsetof(Smem<C>, minus_delta) + count % C::kDoutStages * kRowBytes;
  ptx::mbar_wait(&smem.q_empty[slot], step_pos.write_parity());
  if (C::kQStages > C::kLseStages && step_pos.count == C::kLseStages) {
    ptx::mbar_wait(&smem.q_empty[0], 0);  // step 0 has read its lse
  }
  __syncwarp();
  if (ptx::elect_one()) {
    smem.info[step_pos.count % kNumInfo] = {q_begin, step_flags(walk, bounds_slot), h_idx,
                                            visits_order};
    ptx::mbar_arrive_expect_tx(&smem.q_full[slot], Sizes<C>::kQBytes + kRowBytes);
    load_panels<kBlockQ, C::kDim>(q_at, &args.map_q, q_full, q_begin, h_idx, b_idx,
                                  ptx::kEvictNormal);
    ptx::bulk_load(lse_at, static_cast<const Row*>(args.lse) + first_row, kRowBytes, q_full);
  }
  __syncwarp();
  RingPos<C::kDoutStages> dout_pos;
  dout_pos.count = step_pos.count;
  ptx::mbar_wait(&smem.dout_empty[dout_slot], dout_pos.write_parity());
  if (C::kDoutStages > 2 && needs_bounds && step_pos.count >= 2) {  // see below
    const uint32_t before = step_pos.count - 2;
    ptx::mbar_wait(&smem.dout_empty[before % C::kDoutStages], before / C::kDoutStages & 1);
  }
  __syncwarp();
  if (ptx::elect_one()) {
    constexpr uint32_t kBoundsBytes = C::kBlockK * sizeof(int4);
    ptx::mbar_arrive_expect_tx(&smem.dout_full[dout_slot], Sizes<C>::kDoutBytes + kRowBytes +
                                                               (needs_bounds ? kBoundsBytes : 0));
    load_panels<kBlockQ, C::kDimV>(dout_at, &args.map_dout, dout_full, q_begin, h_idx, b_idx,
                                   ptx::kEvictNormal);
    ptx::bulk_load(delta_at, static_cast<const Row*>(args.minus_delta) + first_row, kRowBytes,
                   dout_full);
    // With dO, not with Q: the bounds slot was last read two bounds tiles ago, hence not after
    // step count - 2, whose end dout_empty has just announced.
    if (needs_bounds) {
      ptx::bulk_load(ptx::smem_addr(smem.bounds[bounds_slot]),
                     args.bounds + static_cast<int64_t>(mask_idx) * args.num_hulls * kHullK +
                         tile.k_tile_idx * C::kBlockK,
                     kBoundsBytes, dout_full);
    }
  }
}
// The same with one lane working out what it needs when it needs it: at 256 the form above takes 5.7 % more cycles.
template <class C>
__device__ __forceinline__ void load_wide_step(const KernelArgs& args, Smem<C>& smem,
                                               const volatile TileInfo& tile, const RowWalk& walk,
                                               const RingPos<C::kQStages>& step_pos,
                                               int32_t mask_idx, int32_t h_q_idx,
                                               uint32_t visits_order, uint32_t bounds_slot,
                                               bool needs_bounds) {
  using Row = RowValue<C>;
  constexpr uint32_t kRowBytes = kBlockQ * sizeof(Row);
  const bool is_leader = threadIdx.x % 32 == 0;
  const uint32_t slot = step_pos.slot();
  const int32_t q_begin = walk.q_begin();
  const auto first_row = [&]() {  // of this step, among all rows of all heads
    return ((static_cast<int64_t>(tile.b_idx) * args.shape.h_q + h_q_idx) * args.num_q_tiles +
            walk.q_tile_idx()) *
           kBlockQ;
  };
  ptx::mbar_wait(&smem.q_empty[slot], step_pos.write_parity());
  if (C::kQStages > C::kLseStages && step_pos.count == C::kLseStages) {
    ptx::mbar_wait(&smem.q_empty[0], 0);  // step 0 has read its lse
  }
  if (is_leader) {
    smem.info[step_pos.count % kNumInfo] = {q_begin, step_flags(walk, bounds_slot), h_q_idx,
                                            visits_order};
    Barrier* const q_full = &smem.q_full[slot];
    ptx::mbar_arrive_expect_tx(q_full, Sizes<C>::kQBytes + kRowBytes);
    load_panels<kBlockQ, C::kDim>(ptx::smem_addr(smem.q[slot]), &args.map_q, ptx::smem_addr(q_full),
                                  q_begin, h_q_idx, tile.b_idx, ptx::kEvictNormal);
    ptx::bulk_load(smem.lse[step_pos.count % C::kLseStages],
                   static_cast<const Row*>(args.lse) + first_row(), kRowBytes, q_full);
  }
  __syncwarp();
  RingPos<C::kDoutStages> dout_pos;
  dout_pos.count = step_pos.count;
  const uint32_t dout_slot = dout_pos.slot();
  ptx::mbar_wait(&smem.dout_empty[dout_slot], dout_pos.write_parity());
  if (is_leader) {
    Barrier* const dout_full = &smem.dout_full[dout_slot];
    constexpr uint32_t kBoundsBytes = C::kBlockK * sizeof(int4);
    ptx::mbar_arrive_expect_tx(
        dout_full, Sizes<C>::kDoutBytes + kRowBytes + (needs_bounds ? kBoundsBytes : 0));
    load_panels<kBlockQ, C::kDimV>(ptx::smem_addr(smem.dout[dout_slot]), &args.map_dout,
                                   ptx::smem_addr(dout_full), q_begin, h_q_idx, tile.b_idx,
                                   ptx::kEvictNormal);
    ptx::bulk_load(smem.minus_delta[dout_slot],
                   static_cast<const Row*>(args.minus_delta) + first_row(), kRowBytes, dout_full);
    // With dO, not with Q: the bounds slot was last read two bounds tiles ago, hence not after
    // step count - 2, whose end dout_empty has just announced (its stages are at most two).
    if (needs_bounds) {
      ptx::bulk_load(smem.bounds[bounds_slot],
                     args.bounds + static_cast<int64_t>(mask_idx) * args.num_hulls * kHullK +
                         tile.k_tile_idx * C::kBlockK,
                     kBoundsBytes, dout_full);
    }
  }
}

// What a tile is about is read from shared memory where it is used: registers are few here.
template <class C>
__device__ __forceinline__ void run_loader(const KernelArgs& args, Smem<C>& smem) {
  const auto issues = [is_leader = threadIdx.x % 32 == 0]() {
    return C::kSplitsColumns ? is_leader : ptx::elect_one();
  };
  RingPos<2> tile_pos;
  RingPos<C::kQStages> step_pos;
  uint32_t num_kv = 0;      // K/V tiles loaded
  uint32_t num_bounds = 0;  // bounds tiles loaded
  bool has_tile = false;    // tile_pos is published
  for (;; ++tile_pos.count) {
    if (!has_tile) publish_tile(args, smem, tile_pos);
    has_tile = false;
    const volatile TileInfo& tile = smem.tile[tile_pos.slot()];
    int32_t steps_left = tile.num_steps;
    if (steps_left < 0) return;
    if (steps_left == 0) continue;
    bool needs_kv = true;
    // Heads of one walk: all that the item has, or one.
    for (int32_t walk_end = tile.h_q_begin; walk_end < tile.h_q_end;) {
      const int32_t walk_begin = walk_end;
      walk_end = tile.flags & kItemHeadsInside ? tile.h_q_end : walk_begin + 1;
      const int32_t mask_idx = mask_index(args, tile.b_idx, walk_begin);
      bool needs_bounds =
          walk_begin == tile.h_q_begin || mask_idx != mask_index(args, tile.b_idx, walk_begin - 1);
      RowWalk walk(args, mask_idx, tile.k_tile_idx, tile.flags & kItemInOrder);
      int32_t h_q_idx = walk_end;
      for (;; ++h_q_idx) {
        if (h_q_idx == walk_end) {
          if (!walk.next(args)) break;
          h_q_idx = walk_begin;
        }
        const uint32_t visits_order = walk.visits_order();
        num_bounds += needs_bounds;
        const uint32_t bounds_slot = (num_bounds - 1) & 1;
        if constexpr (C::kSplitsColumns) {
          load_wide_step(args, smem, tile, walk, step_pos, mask_idx, h_q_idx, visits_order,
                         bounds_slot, needs_bounds);
        } else {
          load_step(args, smem, tile, walk, step_pos, mask_idx, h_q_idx, visits_order, bounds_slot,
                    needs_bounds);
        }
        __syncwarp();
        needs_bounds = false;
        if (needs_kv) {
          if constexpr (kServesRemote<C>) {
            if (tile.flags & kItemRemote && args.ready_rows != nullptr) {
              int32_t seen_rows = 0;
              sm90::wait_rows(args, args.shape.s_k, seen_rows, k_end_of(tile));
            }
          }
          // What V leaves is free first: the next K comes there, where the two change places.
          const bool swaps = KvPlaces<C>::kSwaps;
          ptx::mbar_wait(swaps ? &smem.v_empty : &smem.k_empty, (num_kv & 1) ^ 1);
          if (issues()) {
            ptx::mbar_arrive_expect_tx(&smem.k_full, Sizes<C>::kKBytes);
            load_panels<C::kBlockK, C::kDim>(ptx::smem_addr(smem.kv + KvPlaces<C>::k(num_kv)),
                                             &args.map_k, ptx::smem_addr(&smem.k_full),
                                             tile.k_begin, tile.h_kv_idx, tile.b_idx,
                                             ptx::kEvictFirst);
          }
          __syncwarp();
          ptx::mbar_wait(swaps ? &smem.k_empty : &smem.v_empty, (num_kv & 1) ^ 1);
          if (issues()) {
            ptx::mbar_arrive_expect_tx(&smem.v_full, Sizes<C>::kVBytes);
            load_panels<C::kBlockK, C::kDimV>(ptx::smem_addr(smem.kv + KvPlaces<C>::v(num_kv)),
                                              &args.map_v, ptx::smem_addr(&smem.v_full),
                                              tile.k_begin, tile.h_kv_idx, tile.b_idx,
                                              ptx::kEvictFirst);
          }
          __syncwarp();
          needs_kv = false;
          ++num_kv;
        }
        ++step_pos.count;
        // The next tile is claimed, and looked up in memory, a few steps before this one ends: no
        // sooner, so that the work that is left stays with whoever is free first.
        if (--steps_left == min(4, tile.num_steps - 1)) {
          RingPos<2> next_pos = tile_pos;
          ++next_pos.count;
          publish_tile(args, smem, next_pos);
          has_tile = true;
        }
      }
    }
  }
}

}  // namespace fm3::sm90_bwd
