// SPDX-License-Identifier: Apache-2.0
// Warp 1: adds each step's part of dQ to its sum; warps 2 and 3 are in dq_convert.cuh. See config.cuh for the idea.
//
// A step's dQ is staged in parts (one of all columns; at 256 two of 128 columns), a part in
// accumulator order: 8 units [unit blocks][32 lanes] of float4. Unit u, block, lane:
//     columns of the part: (u / 4) * half of them + 8 * block + 2 * (lane % 4) + {0, 1}
//     of row 16 * (u % 4) + lane / 4 (x y) and of the row 8 below (z w)
// so that consumers store without bank conflicts and the bulk copies see flat arrays. The ring holds
// one sum a part, in the same order. At d_qk 192, 192/128 too, half u / 4 has columns [64 (u / 4), + 64) in blocks
// 0 to 7 and [128 + 32 (u / 4), + 32) in the others.
//
// Claim:      every output row tile is written once, by the sum of all its parts, and the ring is
//             all zeros when head_done says that a head has left it (in a fixed order the first part is
//             stored, not added: there it may hold anything).
// Because:    a part is counted, with release, only after its reduction completed, so the one who counts
//             the last part sees all of them and lists the sum; a place in the list is one converter's,
//             who zeroes the sum before it counts the tile as done, and a new head's first reduction
//             waits for all the tiles of the head it follows.
// Breaks if:  visits disagrees with the loader's walk, or a key tile is claimed out of order (the
//             wait for the ring could then be for work nobody has).
// Tested by:  test/gpu/test_sm90_bwd.py (outputs start as NaN, the workspace as garbage); the ring's reuse
//             by test_ring_is_reused while its heads exceed ring_slots (161 at 2048 keys), and by the check
//             of tools/bench_attention.py at 8K (512 heads, 41 slots); the fixed order by
//             test_a_swap_of_two_addends_would_show
#pragma once

#include "config.cuh"

namespace fm3::sm90_bwd {

constexpr int32_t kWaveTries = 256;  // some 300 us, of a walk of 3 ms and more

__device__ __forceinline__ int32_t load_acquire(const int32_t* address) {
  int32_t value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}
__device__ __forceinline__ int32_t add_relaxed(int32_t* address, int32_t value) {
  int32_t old;
  asm volatile("atom.relaxed.gpu.global.add.s32 %0, [%1], %2;"
               : "=r"(old)
               : "l"(address), "r"(value)
               : "memory");
  return old;
}
__device__ __forceinline__ int32_t add_acq_rel(int32_t* address, int32_t value) {
  int32_t old;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;"
               : "=r"(old)
               : "l"(address), "r"(value)
               : "memory");
  return old;
}
__device__ __forceinline__ void add_release(int32_t* address, int32_t value) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}
__device__ __forceinline__ void store_release(int32_t* address, int32_t value) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}
// Between generic and async accesses to global memory.
__device__ __forceinline__ void fence_proxy_async_all() {
  asm volatile("fence.proxy.async;" ::: "memory");
}
// Waits until *address >= value, and returns it. Everything it waits for is done by work claimed earlier.
__device__ __forceinline__ int32_t wait_at_least(const int32_t* address, int32_t value) {
  const ptx::SpinLimit limit;
  for (;;) {
    const int32_t seen = load_acquire(address);
    if (seen >= value) return seen;
    limit.check();
    __nanosleep(40);
  }
}

// Part of a group that a query head belongs to, counted over the batch.
__device__ __forceinline__ int32_t head_part(const KernelArgs& args, int32_t b_idx,
                                             int32_t h_q_idx) {
  return (b_idx * args.shape.h_q + h_q_idx) / __ldg(&args.plan->part_heads);
}

// Stores one packed fragment row pair: `left` holds two columns of block 2 p, `right` of 2 p + 1.
// Lanes swap halves so that each stores 4 adjacent columns and a quad fills a 32-byte sector.
template <class T>
__device__ __forceinline__ void store_block_pair(T* row, int32_t block_pair, uint32_t left,
                                                 uint32_t right, bool is_row, int32_t d) {
  const int32_t quad_lane = threadIdx.x % 4;
  const bool is_odd = quad_lane & 1;
  const uint32_t given = is_odd ? left : right;
  const uint32_t taken = __shfl_xor_sync(0xFFFFFFFF, given, 1);
  const int32_t column = 16 * block_pair + (is_odd ? 8 : 0) + 2 * (quad_lane & 2);
  if (is_row && column < d) {
    // volatile: the stores stay in order, else their operands pile up in registers.
    asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(row + column), "r"(is_odd ? taken : left),
                 "r"(is_odd ? right : taken)
                 : "memory");
  }
}

// Lane 0 of the writer warp. Values are read from shared memory where they are used: registers are
// few here.
template <class C>
class DqWriter {
 public:
  __device__ DqWriter(const KernelArgs& args, Smem<C>& smem) : args_(args), smem_(smem) {}

  __device__ __forceinline__ void run() {
    RingPos<2> tile_pos;
    RingPos<C::kDqBuffers> dq_pos;
    for (;; ++tile_pos.count) {
      ptx::mbar_wait(&smem_.tile_full[tile_pos.slot()], tile_pos.parity());
      const volatile TileInfo& tile = smem_.tile[tile_pos.slot()];
      if (tile.num_steps < 0) break;
      // Before the first part is there to be added: asking takes a while.
      if (tile.num_steps > 0) wait_for_ring(tile);
      wait_for_wave(tile);
      for (int32_t part = tile.num_steps * C::kDqParts; part > 0; --part, ++dq_pos.count) {
        // The turn is waited for while the products run, see add(). (The consumers had this step's Q, and hence its info,
        // before they handed over the dQ before it.)
        if (C::kDqParts == 1 && tile.flags & kItemInOrder && part < tile.num_steps) {
          wait_for_turn(tile, smem_.info[dq_pos.count % kNumInfo]);
        }
        ptx::mbar_wait(&smem_.dq_full[dq_pos.slot()], dq_pos.parity());
        part_idx_ = dq_pos.count % C::kDqParts;
        buffer_idx_ = dq_pos.slot();
        const StepInfo info =
            smem_.info[dq_pos.count / C::kDqParts % kNumInfo];  // one 16-byte load
        if ((info.visits_order & 0xFFFF) > 1) {
          add(tile, info);
        } else {  // the only part: a converter takes it from where it is, and frees `dq`
          drain();
          reserve(tile.b_idx, buffer_idx_, info, 1);
          publish();
          has_turn_ = false;
        }
      }
      ptx::mbar_arrive_as_warp(&smem_.tile_empty[tile_pos.slot()]);
      drain();  // no part of a finished tile may wait for what the next tile waits for
    }
    ptx::mbar_wait(&smem_.event_empty[reserved_.slot()], reserved_.write_parity());
    smem_.event[reserved_.slot()].num_visits = kNoMoreEvents;
    publish();
  }

 private:
  // The ring slot is free once every sum of the head that had it was converted.
  __device__ __forceinline__ void wait_for_ring(const volatile TileInfo& tile) {
    const int32_t before = tile.ring_before;
    if (before < 0) return;
    wait_at_least(args_.head_done + before, tile.ring_before_sums);
    fence_proxy_async_all();
  }

  // In order: see wave_start_parts. Else: until every item of the wave is claimed (a few steps before the end of what that
  // CTA has). The products stop for it after two steps. Not for ever: nothing depends on it, and a CTA that is not running
  // would claim none.
  __device__ __forceinline__ void wait_for_wave(const volatile TileInfo& tile) const {
    const auto num_claimed = static_cast<int32_t>(tile.flags >> kItemWaveShift);
    if (tile.flags & kItemInOrder) {
      if (num_claimed == 0) return;  // of parts, not of items. Walks over all rows go up
      const int32_t row_tile =
          larger(__ldg(&args_.plan->num_q_tiles) - kWaveTurns * static_cast<int32_t>(gridDim.x), 0);
      wait_at_least(args_.ring_counts + sum_index(tile, tile.h_q_begin, row_tile), num_claimed);
      return;
    }
#pragma unroll 1
    for (int32_t tries = num_claimed == 0 ? 0 : kWaveTries; tries > 0; --tries) {
      if (*static_cast<const volatile int32_t*>(args_.next_work) >= num_claimed) break;
      __nanosleep(500);
    }
  }

  __device__ __forceinline__ int32_t sum_index(const volatile TileInfo& tile, int32_t h_q_idx,
                                               int32_t q_tile_idx) const {
    return ((tile.ring_row + h_q_idx) * args_.num_q_tiles + q_tile_idx) * C::kDqParts + part_idx_;
  }
  __device__ __forceinline__ int32_t sum_index(const volatile TileInfo& tile,
                                               const StepInfo& info) const {
    return sum_index(tile, info.h_q_idx, info.q_tile_idx());
  }
  // Until the parts before this one are in its sum. With acquire every time: they are in memory when they are counted
  // (bulk_wait), in both proxies, and this one's reduction must come after them. A look at the next part's count while
  // this part completes, to save that wait, made the fixed order 0.5 to 4 % slower (relaxed), or 6 to 13 % (acquire).
  __device__ __forceinline__ void wait_for_turn(const volatile TileInfo& tile,
                                                const StepInfo& info) {
    const int32_t turn = info.visits_order >> 16;
    if (turn > 0) wait_at_least(args_.ring_counts + sum_index(tile, info), turn);
    has_turn_ = true;
  }

  __device__ __forceinline__ void add(const volatile TileInfo& tile, const StepInfo& info) {
    const int32_t b_idx = tile.b_idx;
    const int32_t sum_idx = sum_index(tile, info);
    const bool is_in_order = tile.flags & kItemInOrder;
    if (is_in_order && !has_turn_) wait_for_turn(tile, info);
    has_turn_ = false;
    float* const sum = args_.dq_ring + static_cast<int64_t>(sum_idx) * Sizes<C>::kPartFloats;
    const float* const staged = smem_.dq + buffer_idx_ * Sizes<C>::kPartFloats;
    constexpr uint32_t kBytes = Sizes<C>::kPartFloats * 4;
    // Evicted last: the ring should stay in L2 while Q, dO, K and V stream through.
    if (is_in_order && info.visits_order >> 16 == 0) {  // the sum's first part needs no zeros
      ptx::bulk_store(sum, staged, kBytes, ptx::kEvictLast);
    } else {
      ptx::bulk_reduce_add_f32(sum, staged, kBytes, ptx::kEvictLast);
    }
    ptx::bulk_commit();
    if (is_in_order) {
      // Complete it at once: the next in turn waits for its count, whatever it is that we do next. What can be done before
      // is done before, and the counter counts before all else (0.5 to 1.5 % of the fixed order's time).
      const int32_t turn = info.visits_order >> 16, num_visits = info.visits_order & 0xFFFF;
      reserve(b_idx, sum_idx, info, turn + 1 == num_visits ? kLastInOrder : kInOrder);
      ptx::bulk_wait_read<0>();
      ptx::mbar_arrive_as_warp(&smem_.dq_empty[part_idx_ + buffer_idx_]);
      ptx::bulk_wait<0>();
      publish();
      return;
    }
    ptx::bulk_wait_read<0>();
    ptx::mbar_arrive_as_warp(&smem_.dq_empty[part_idx_ + buffer_idx_]);
    reserve(b_idx, sum_idx, info, info.visits_order & 0xFFFF);
    // The part before this one has had a whole step to complete. (A completed bulk operation is
    // visible to the thread that waited for it: no proxy fence, which would cost 900 cycles here.)
    if (has_unpublished_) {
      ptx::bulk_wait<1>();
      publish();
    }
    has_unpublished_ = true;
  }

  __device__ __forceinline__ void drain() {
    if (!has_unpublished_) return;
    ptx::bulk_wait<0>();
    publish();
    has_unpublished_ = false;
  }
  __device__ __forceinline__ void reserve(int32_t b_idx, int32_t ring_sum_idx, const StepInfo& info,
                                          int32_t num_visits) {
    ptx::mbar_wait(&smem_.event_empty[reserved_.slot()], reserved_.write_parity());
    volatile DqEvent& event = smem_.event[reserved_.slot()];
    event.b_idx = b_idx;
    event.h_q_idx = info.h_q_idx;
    event.q_tile_idx = info.q_tile_idx();
    event.num_visits = num_visits;
    event.ring_sum_idx = ring_sum_idx;
    event.part_idx = part_idx_;
    ++reserved_.count;
  }
  __device__ __forceinline__ void publish() {
    ptx::mbar_arrive(&smem_.event_full[published_.slot()]);
    ++published_.count;
  }

  const KernelArgs& args_;
  Smem<C>& smem_;
  RingPos<kNumEvents> reserved_, published_;
  int32_t part_idx_ = 0, buffer_idx_ = 0;  // one of them: no kernel has both
  bool has_turn_ = false;                  // the next part need not wait for those before it
  bool has_unpublished_ = false;  // one reduction is in flight and its event not yet announced
};

}  // namespace fm3::sm90_bwd
