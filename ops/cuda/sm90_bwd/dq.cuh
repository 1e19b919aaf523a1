// SPDX-License-Identifier: Apache-2.0
// Warps 1-3: what becomes of each step's part of dQ. See config.cuh for the idea.
//
// A step's dQ is staged in parts (one of all columns, or one a consumer warpgroup), a part in
// accumulator order: 8 units [unit blocks][32 lanes] of float4. Unit u, block, lane:
//     columns of the part: (u / 4) * half of them + 8 * block + 2 * (lane % 4) + {0, 1}
//     of row 16 * (u % 4) + lane / 4 (x y) and of the row 8 below (z w)
// so that consumers store without bank conflicts and the bulk copies see flat arrays. The ring holds
// one sum a part, in the same order.
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

__device__ __forceinline__ int32_t load_acquire(const int32_t* address) {
  int32_t value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}
__device__ __forceinline__ int32_t load_relaxed(const int32_t* address) {
  int32_t value;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
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
// Waits until *address >= value. Everything it waits for is done by work claimed earlier.
__device__ __forceinline__ void wait_at_least(const int32_t* address, int32_t value) {
  const ptx::SpinLimit limit;
  while (load_acquire(address) < value) {
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

// Converts one piece (`kPiecePairs` block pairs of a unit) of a staged part at `source` in shared
// memory to dq. One warp.
template <class C>
__device__ __forceinline__ void convert_piece(const KernelArgs& args, const float* source,
                                              int32_t piece_idx, const DqEvent& event) {
  using T = typename C::T;
  constexpr int kPairs = Sizes<C>::kPiecePairs;
  const int32_t lane = threadIdx.x % 32;
  const int32_t unit_idx = piece_idx / Sizes<C>::kUnitPieces;
  const int32_t d_begin = (event.part_idx * 2 + unit_idx / 4) * Sizes<C>::kUnitBlocks * 8 +
                          piece_idx % Sizes<C>::kUnitPieces * (kPairs * 16);
  const int32_t q_idx = event.q_tile_idx * kBlockQ + unit_idx % 4 * 16 + lane / 4;
  T* const row = static_cast<T*>(args.dq) + event.b_idx * args.stride_dq.b +
                 event.h_q_idx * args.stride_dq.h + q_idx * args.stride_dq.s + d_begin;
  const float scale = args.softmax_scale;
#pragma unroll
  for (int pair = 0; pair < kPairs; ++pair) {
    const float4 left = reinterpret_cast<const float4*>(source)[2 * pair * 32 + lane];
    const float4 right = reinterpret_cast<const float4*>(source)[(2 * pair + 1) * 32 + lane];
    store_block_pair<T>(row, pair, ptx::pack2<T>(left.x * scale, left.y * scale),
                        ptx::pack2<T>(right.x * scale, right.y * scale), q_idx < args.shape.s_q,
                        args.shape.d_qk - d_begin);
    store_block_pair<T>(row + 8 * args.stride_dq.s, pair,
                        ptx::pack2<T>(left.z * scale, left.w * scale),
                        ptx::pack2<T>(right.z * scale, right.w * scale), q_idx + 8 < args.shape.s_q,
                        args.shape.d_qk - d_begin);
  }
}

// Adds to the ring; its lines should stay in L2 while Q, dO, K and V stream through.
__device__ __forceinline__ void reduce_to_ring(float* gmem_dst, const float* smem_src,
                                               uint32_t bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.L2::cache_hint.add.f32 [%0], [%1], %2, "
      "%3;" ::"l"(gmem_dst),
      "r"(ptx::smem_addr(smem_src)), "r"(bytes), "l"(ptx::kEvictLast)
      : "memory");
}

// The same without adding: the first part of a sum where parts come in turns, which needs no zeros.
__device__ __forceinline__ void store_to_ring(float* gmem_dst, const float* smem_src,
                                              uint32_t bytes) {
  asm volatile(
      "cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, %3;" ::"l"(
          gmem_dst),
      "r"(ptx::smem_addr(smem_src)), "r"(bytes), "l"(ptx::kEvictLast)
      : "memory");
}

// Lane 0 of the writer warp. Values are read from shared memory where they are used: registers are
// few here.
template <class C>
class DqWriter {
 public:
  __device__ DqWriter(const KernelArgs& args, Smem<C>& smem) : args_(args), smem_(smem) {}

  __device__ __forceinline__ void run() {
    RingPos<2> tile_pos;
    RingPos<1> dq_pos;
    for (;; ++tile_pos.count) {
      ptx::mbar_wait(&smem_.tile_full[tile_pos.slot()], tile_pos.parity());
      const volatile TileInfo& tile = smem_.tile[tile_pos.slot()];
      if (tile.num_steps < 0) break;
      // Before the first part is there to be added: asking takes a while.
      if (tile.num_steps > 0) wait_for_ring(tile);
      for (int32_t part = tile.num_steps * C::kDqParts; part > 0; --part, ++dq_pos.count) {
        // The turn is waited for while the products run, see add().
        if (C::kDqParts == 1 && args_.is_deterministic && part < tile.num_steps) {
          wait_for_turn(tile, smem_.info[dq_pos.count % kNumInfo]);
        }
        ptx::mbar_wait(&smem_.dq_full, dq_pos.parity());
        part_idx_ = dq_pos.count % C::kDqParts;
        const StepInfo info =
            smem_.info[dq_pos.count / C::kDqParts % kNumInfo];  // one 16-byte load
        if ((info.visits_order & 0xFFFF) > 1) {
          add(tile, info, dq_pos.count, part);
        } else {  // the only part: a converter takes it from where it is, and frees `dq`
          drain();
          reserve(tile.b_idx, 0, info, 1);
          publish();
          num_turns_seen_ = 0;
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

  __device__ __forceinline__ int32_t sum_index(const volatile TileInfo& tile,
                                               const StepInfo& info) const {
    return ((tile.ring_row + info.h_q_idx) * args_.num_q_tiles + info.q_tile_idx) * C::kDqParts +
           part_idx_;
  }
  __device__ __forceinline__ void wait_for_turn(const volatile TileInfo& tile,
                                                const StepInfo& info) {
    const int32_t turn = info.visits_order >> 16;
    if (num_turns_seen_ >= turn) return;
    wait_at_least(args_.ring_counts + sum_index(tile, info), turn);
    num_turns_seen_ = turn;
  }

  __device__ __forceinline__ void add(const volatile TileInfo& tile, const StepInfo& info,
                                      uint32_t dq_count, int32_t parts_left) {
    const int32_t b_idx = tile.b_idx;
    const int32_t sum_idx = sum_index(tile, info);
    const bool is_in_order = args_.is_deterministic;
    if (is_in_order) wait_for_turn(tile, info);
    float* const sum = args_.dq_ring + static_cast<int64_t>(sum_idx) * Sizes<C>::kPartFloats;
    if (is_in_order && info.visits_order >> 16 == 0) {
      store_to_ring(sum, smem_.dq, Sizes<C>::kPartFloats * 4);
    } else {
      reduce_to_ring(sum, smem_.dq, Sizes<C>::kPartFloats * 4);
    }
    ptx::bulk_commit();
    if (is_in_order) {
      ptx::bulk_wait_read<0>();
      ptx::mbar_arrive_as_warp(&smem_.dq_empty[part_idx_]);
      // The count that the next part has to wait for, on its way while this one completes. (The consumers
      // had that step's Q, and hence its info, before they handed over this dQ.)
      num_turns_seen_ = 0;
      if (C::kDqParts == 1 && parts_left > 1) {
        num_turns_seen_ = load_relaxed(args_.ring_counts +
                                       sum_index(tile, smem_.info[(dq_count + 1) % kNumInfo]));
      }
      // Complete it at once: the next in turn waits for its count, whatever it is that we do next.
      const int32_t turn = info.visits_order >> 16, num_visits = info.visits_order & 0xFFFF;
      reserve(b_idx, sum_idx, info, turn + 1 == num_visits ? kLastInOrder : kInOrder);
      ptx::bulk_wait<0>();
      publish();
      return;
    }
    ptx::bulk_wait_read<0>();
    ptx::mbar_arrive_as_warp(&smem_.dq_empty[part_idx_]);
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
    event.q_tile_idx = info.q_tile_idx;
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
  int32_t part_idx_ = 0;
  int32_t num_turns_seen_ = 0;    // of the next part's sum, at least
  bool has_unpublished_ = false;  // one reduction is in flight and its event not yet announced
};

// Warp 2. Counts each part once its reduction is complete, and lists the sums that are.
template <class C>
__device__ __forceinline__ void run_dq_counter(const KernelArgs& args, Smem<C>& smem) {
  const bool is_leader = threadIdx.x % 32 == 0;
  RingPos<kNumEvents> event_pos;
  for (;; ++event_pos.count) {
    ptx::mbar_wait(&smem.event_full[event_pos.slot()], event_pos.parity());
    const DqEvent event = smem.event[event_pos.slot()];
    __syncwarp();
    if (ptx::arrives(is_leader)) ptx::mbar_arrive(&smem.event_empty[event_pos.slot()]);
    if (event.num_visits == kNoMoreEvents) return;
    if (event.num_visits == 1) {  // never in the ring: from where it is, and frees `dq`
#pragma unroll 1
      for (int32_t piece = 0; piece < Sizes<C>::kPieces; ++piece) {
        convert_piece<C>(args, smem.dq + piece * Sizes<C>::kPieceFloats, piece, event);
      }
      __syncwarp();
      if (ptx::arrives(is_leader)) ptx::mbar_arrive(&smem.dq_empty[event.part_idx]);
      continue;
    }
    // With release: a completed reduction is visible to the thread that waited for it, not yet to others. After
    // a relaxed count some 600 of 8.4 million parts changed places (32K causal, 32/4 heads, in a fixed order). The
    // writer has no time for the release (8K causal in a fixed order: 20 % more cycles), this warp has.
    bool is_last = event.num_visits == kLastInOrder;
    if (is_leader) {
      int32_t* const count = args.ring_counts + event.ring_sum_idx;
      if (event.num_visits < 0) {
        add_release(count, 1);
      } else {
        is_last = add_acq_rel(count, 1) == event.num_visits - 1;
      }
    }
    if (is_leader && is_last) {
      __threadfence();
      const int32_t row = (event.b_idx * args.shape.h_q + event.h_q_idx) * args.num_q_tiles;
      store_release(args.finished + add_relaxed(args.next_finished, 1),
                    (row + event.q_tile_idx) * C::kDqParts + event.part_idx + 1);
    }
    __syncwarp();
  }
}

// Warp 3. Converts finished sums in the order in which they were listed, whichever CTA's they are: who
// is last at a row is often last at the next ones too, and would be held up by converting them all.
template <class C>
__device__ __forceinline__ void run_dq_converter(const KernelArgs& args, Smem<C>& smem) {
  constexpr int kPieces = Sizes<C>::kPieces, kPieceFloats = Sizes<C>::kPieceFloats;
  const int32_t lane = threadIdx.x % 32;
  const bool is_leader = lane == 0;
  int32_t num_sums = 0;
  for (int32_t idx = lane; idx < args.mask.b * args.mask.h_mask; idx += 32) {
    num_sums += args.shared_rows[idx];
  }
  num_sums =
      __reduce_add_sync(kAllLanes, num_sums) * (args.shape.h_q / args.mask.h_mask) * C::kDqParts;
  RingPos<kBackBuffers> back_pos;
  for (;;) {
    int32_t place = 0, sum = 0;
    if (is_leader) {
      place = add_relaxed(args.next_conversion, 1);
      if (place < num_sums) {
        wait_at_least(args.finished + place, 1);
        sum = load_acquire(args.finished + place);
      }
    }
    sum = __shfl_sync(kAllLanes, sum, 0) - 1;
    if (sum < 0) return;
    DqEvent event;
    event.part_idx = sum % C::kDqParts;
    event.q_tile_idx = sum / C::kDqParts % args.num_q_tiles;
    const int32_t head = sum / C::kDqParts / args.num_q_tiles;
    event.b_idx = head / args.shape.h_q;
    event.h_q_idx = head % args.shape.h_q;
    const int32_t part_heads = __ldg(&args.plan->part_heads);
    const int32_t ring_row =
        head / part_heads % __ldg(&args.plan->ring_slots) * part_heads + event.h_q_idx % part_heads;
    event.ring_sum_idx =
        (ring_row * args.num_q_tiles + event.q_tile_idx) * C::kDqParts + event.part_idx;
    __threadfence();  // after the count
    fence_proxy_async_all();
    float* const gmem_sum =
        args.dq_ring + static_cast<int64_t>(event.ring_sum_idx) * Sizes<C>::kPartFloats;
    const auto fetch = [&](int32_t piece) {  // into the buffer of back_pos + the pieces in flight
      if (!is_leader) return;
      const uint32_t buffer = (back_pos.count + min(piece, kBackBuffers - 1)) % kBackBuffers;
      Barrier* const back_full = &smem.dq_back_full[buffer];
      ptx::mbar_arrive_expect_tx(back_full, kPieceFloats * 4);
      ptx::bulk_load(smem.dq_back[buffer], gmem_sum + piece * kPieceFloats, kPieceFloats * 4,
                     back_full);
    };
    for (int32_t piece = 0; piece < kBackBuffers - 1; ++piece) fetch(piece);
#pragma unroll 1
    for (int32_t piece = 0; piece < kPieces; ++piece) {
      if (piece + kBackBuffers - 1 < kPieces) fetch(piece + kBackBuffers - 1);
      ptx::mbar_wait(&smem.dq_back_full[back_pos.slot()], back_pos.parity());
      convert_piece<C>(args, smem.dq_back[back_pos.slot()], piece, event);
      if (!args.is_deterministic) {
#pragma unroll
        for (int block = 0; block < 2 * Sizes<C>::kPiecePairs; ++block) {
          __stcg(reinterpret_cast<float4*>(gmem_sum + piece * kPieceFloats) + block * 32 + lane,
                 make_float4(0.f, 0.f, 0.f, 0.f));
        }
      }
      __syncwarp();  // before the next load into this buffer
      ++back_pos.count;
    }
    if (is_leader) args.ring_counts[event.ring_sum_idx] = 0;
    fence_proxy_async_all();
    __threadfence();
    __syncwarp();
    if (is_leader) {
      add_acq_rel(args.head_done + head_part(args, event.b_idx, event.h_q_idx), 1);
    }
  }
}

}  // namespace fm3::sm90_bwd
