// SPDX-License-Identifier: Apache-2.0
// Warps 1-3: what becomes of each step's part of dQ. See config.cuh for the idea.
//
// A part [kBlockQ, d] and the ring's sums are stored in accumulator order, as float4 pieces:
//     piece (half, block, thread): columns half * d/2 + 8 * block + 2 * (thread % 4) + {0, 1} of
//     rows 16 * (thread / 32) + thread % 32 / 4 {+ 0: x y, + 8: z w}; thread < 128 is the consumer's.
// so that consumers store without bank conflicts and the bulk reduction sees one flat array.
//
// Claim:      every output row tile is written once, by the sum of all its parts, and the ring is
//             all zeros when head_done says that a head has left it.
// Because:    a part is counted (acq_rel) only after its reduction completed, so the one who counts
//             the last part sees all of them; it zeroes the sum before it counts the tile as done,
//             and a new head's first reduction waits for all the tiles of the head it follows.
// Breaks if:  visits disagrees with the loader's walk, or a key tile is claimed out of order (the
//             wait for the ring could then be for work nobody has).
// Tested by:  test/gpu/test_sm90_bwd.py (ring_heads forced small; NaN-filled outputs)
#pragma once

#include "config.cuh"

namespace fm3::sm90_bwd {

__device__ __forceinline__ int32_t load_acquire(const int32_t* address) {
  int32_t value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}
__device__ __forceinline__ int32_t add_acq_rel(int32_t* address, int32_t value) {
  int32_t old;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;"
               : "=r"(old)
               : "l"(address), "r"(value)
               : "memory");
  return old;
}
// Between generic and async accesses to global memory.
__device__ __forceinline__ void fence_proxy_async_all() {
  asm volatile("fence.proxy.async;" ::: "memory");
}
// Waits until *address >= value. Everything it waits for is done by work claimed earlier.
__device__ __forceinline__ void wait_at_least(const int32_t* address, int32_t value) {
#ifdef FM3_SPIN_LIMIT
  for (int spins = 0; load_acquire(address) < value; ++spins) {
    if (spins > FM3_SPIN_LIMIT) __trap();
    __nanosleep(40);
  }
#else
  while (load_acquire(address) < value) __nanosleep(40);
#endif
}

// Index of a row tile's sum and counter in the ring.
__device__ __forceinline__ int32_t ring_tile(const KernelArgs& args, int32_t head_idx,
                                             int32_t h_q_idx, int32_t q_tile_idx) {
  return (head_idx % args.ring_heads * args.group + h_q_idx % args.group) * args.num_q_tiles +
         q_tile_idx;
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
    asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(row + column),
                 "r"(is_odd ? taken : left), "r"(is_odd ? right : taken)
                 : "memory");
  }
}

// Converts a whole row tile from pieces at `source` (shared memory or the ring) to dq. One warp.
template <class C, bool kFromRing>
__device__ __forceinline__ void convert_row_tile(const KernelArgs& args, float4* source,
                                                 int32_t b_idx, int32_t h_q_idx,
                                                 int32_t q_tile_idx) {
  using T = typename C::T;
  constexpr int kPairs = C::kDim / 32;  // pairs of 8-column blocks in one half
  const int32_t lane = threadIdx.x % 32;
  T* const head = static_cast<T*>(args.dq) + b_idx * args.stride_dq.b + h_q_idx * args.stride_dq.h;
  const float scale = args.softmax_scale;
#pragma unroll 1
  for (int32_t group = 0; group < 8; ++group) {  // (half, consumer warp)
    const int32_t half = group / 4, warp = group % 4;
    const int32_t q_idx = q_tile_idx * kBlockQ + warp * 16 + lane / 4;
    float4* const pieces = source + half * (C::kDim / 16) * 128 + warp * 32 + lane;
    T* const row = head + q_idx * args.stride_dq.s + half * (C::kDim / 2);
    const int32_t d_left = args.shape.d_qk - half * (C::kDim / 2);
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      float4 left, right;
      if (kFromRing) {
        left = __ldcg(pieces + 2 * pair * 128);
        right = __ldcg(pieces + (2 * pair + 1) * 128);
      } else {
        left = pieces[2 * pair * 128];
        right = pieces[(2 * pair + 1) * 128];
      }
      store_block_pair<T>(row, pair, ptx::pack2<T>(left.x * scale, left.y * scale),
                          ptx::pack2<T>(right.x * scale, right.y * scale),
                          q_idx < args.shape.s_q, d_left);
      store_block_pair<T>(row + 8 * args.stride_dq.s, pair,
                          ptx::pack2<T>(left.z * scale, left.w * scale),
                          ptx::pack2<T>(right.z * scale, right.w * scale),
                          q_idx + 8 < args.shape.s_q, d_left);
    }
    if (kFromRing) {
#pragma unroll
      for (int block = 0; block < 2 * kPairs; ++block) {
        __stcg(pieces + block * 128, make_float4(0.f, 0.f, 0.f, 0.f));
      }
    }
  }
}

template <class C>
__device__ __forceinline__ void run_dq_writer(const KernelArgs& args, Smem<C>& smem) {
  const bool is_leader = threadIdx.x % 32 == 0;
  RingPos<2> tile_pos;
  RingPos<1> dq_pos;
  RingPos<kNumEvents> event_pos;
  for (;; ++tile_pos.count) {
    ptx::mbar_wait(&smem.tile_full[tile_pos.slot()], tile_pos.parity());
    const TileInfo tile = smem.tile[tile_pos.slot()];
    __syncwarp();
    if (is_leader) ptx::mbar_arrive(&smem.tile_empty[tile_pos.slot()]);
    if (tile.num_steps < 0) break;
    const int32_t head_idx = tile.b_idx * args.shape.h_kv + tile.h_kv_idx;
    bool is_ring_ours = head_idx < args.ring_heads;

    for (int32_t step = 0; step < tile.num_steps; ++step, ++dq_pos.count) {
      ptx::mbar_wait(&smem.dq_full, dq_pos.parity());
      const StepInfo info = smem.info[dq_pos.count % kNumInfo];
      const int32_t num_visits = info.visits_order & 0xFFFF;
      if (num_visits == 1) {
        convert_row_tile<C, false>(args, reinterpret_cast<float4*>(smem.dq), tile.b_idx,
                                   info.h_q_idx, info.q_tile_idx);
        __syncwarp();
        if (is_leader) ptx::mbar_arrive(&smem.dq_empty);
        continue;
      }
      if (is_leader) {
        if (!is_ring_ours) {
          const int32_t before = head_idx - args.ring_heads;
          int32_t shared_rows = 0;
          for (int32_t g_idx = 0; g_idx < args.group; ++g_idx) {
            shared_rows += args.shared_rows[mask_index(
                args, before / args.shape.h_kv, before % args.shape.h_kv * args.group + g_idx)];
          }
          wait_at_least(args.head_done + before, shared_rows);
        }
        const int32_t tile_idx = ring_tile(args, head_idx, info.h_q_idx, info.q_tile_idx);
        if (args.is_deterministic) {
          wait_at_least(args.ring_counts + tile_idx, info.visits_order >> 16);
        }
        fence_proxy_async_all();
        ptx::bulk_reduce_add_f32(args.dq_ring + static_cast<int64_t>(tile_idx) * C::kDqFloats,
                                 smem.dq, C::kDqBytes);
        ptx::bulk_commit();
        ptx::bulk_wait_read<0>();
        ptx::mbar_arrive(&smem.dq_empty);
        ptx::bulk_wait<0>();
        fence_proxy_async_all();
        bool is_event = true;
        if (args.is_deterministic) {  // the next in turn waits for this count, so it comes first
          is_event = add_acq_rel(args.ring_counts + tile_idx, 1) == num_visits - 1;
        }
        if (is_event) {
          ptx::mbar_wait(&smem.event_empty[event_pos.slot()], event_pos.write_parity());
          smem.event[event_pos.slot()] = {tile.b_idx, info.h_q_idx, info.q_tile_idx,
                                          num_visits, tile_idx,     head_idx};
          ptx::mbar_arrive(&smem.event_full[event_pos.slot()]);
          ++event_pos.count;
        }
      }
      is_ring_ours = true;
      __syncwarp();
    }
  }
  if (is_leader) {  // one end for each converter warp: they take events in turn
    for (int32_t end = 0; end < 2; ++end, ++event_pos.count) {
      ptx::mbar_wait(&smem.event_empty[event_pos.slot()], event_pos.write_parity());
      smem.event[event_pos.slot()].num_visits = 0;
      ptx::mbar_arrive(&smem.event_full[event_pos.slot()]);
    }
  }
}

// Converter warps 0 and 1 take every other event.
template <class C>
__device__ __forceinline__ void run_dq_converter(const KernelArgs& args, Smem<C>& smem,
                                                 int32_t converter_idx) {
  const bool is_leader = threadIdx.x % 32 == 0;
  RingPos<kNumEvents> event_pos;
  for (event_pos.count = converter_idx;; event_pos.count += 2) {
    ptx::mbar_wait(&smem.event_full[event_pos.slot()], event_pos.parity());
    const DqEvent event = smem.event[event_pos.slot()];
    __syncwarp();
    if (is_leader) ptx::mbar_arrive(&smem.event_empty[event_pos.slot()]);
    if (event.num_visits == 0) return;
    int32_t* const count = args.ring_counts + event.ring_tile_idx;
    bool is_last = true;
    if (!args.is_deterministic) {
      int32_t old = 0;
      if (is_leader) old = add_acq_rel(count, 1);
      is_last = __shfl_sync(0xFFFFFFFF, old, 0) == event.num_visits - 1;
    }
    if (!is_last) continue;
    __threadfence();  // all lanes after the count
    convert_row_tile<C, true>(
        args,
        reinterpret_cast<float4*>(args.dq_ring +
                                  static_cast<int64_t>(event.ring_tile_idx) * C::kDqFloats),
        event.b_idx, event.h_q_idx, event.q_tile_idx);
    if (is_leader) *count = 0;
    fence_proxy_async_all();
    __threadfence();
    __syncwarp();
    if (is_leader) add_acq_rel(args.head_done + event.head_idx, 1);
  }
}

}  // namespace fm3::sm90_bwd
