// SPDX-License-Identifier: Apache-2.0
// dK and dV of a key tile whose group of query heads is cut into parts: every part adds to fp32 sums, warp by
// warp; who counts last reads the sum back, leaves zeros and writes it out. In the deterministic mode parts
// add in their order. (Where the parts of a head run at the same time, waiting for turns costs much: 291
// against 512 TFLOP/s at 8K causal, 32/4 heads in four parts.)
//
// Claim:      one part ends with the sum of all of them, and a wait ends.
// Because:    a part is counted once its additions are complete, and the room of a key tile is counted once
//             more when it has been read. The room is that of the tile's place in the order of work: a part
//             before this one, and the parts of the head that had the room before, stand earlier in the list
//             of work, so a running CTA has claimed them.
// Breaks if:  parts of one head are not listed in ascending order at each place, or the consumers of a
//             CTA that is waited for wait themselves for something claimed later.
// Tested by:  test/gpu/test_sm90_bwd.py (test_parts_of_a_group, test_rooms_of_parts_are_reused),
//             test/unit/test_sm90_bwd_plan.py (order)
#pragma once

#include "dq.cuh"

namespace fm3::sm90_bwd {

__device__ __forceinline__ void add_four(float4* address, const float* x) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address),
               "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
               : "memory");
}

// threadIdx.x, read where it is used: what is derived from it would be kept in registers that are few.
__device__ __forceinline__ uint32_t read_thread() {
  uint32_t thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// A thread's accumulators and its share of a sum: [blocks of 4][256 consumer threads] of float4.
template <int kCount>
__device__ __forceinline__ void add_to_sum(const float (&acc)[kCount], float4* sum) {
#pragma unroll
  for (int idx = 0; idx < kCount / 4; ++idx) add_four(sum + idx * 256, acc + 4 * idx);
}
template <int kCount>
__device__ __forceinline__ void take_sum(float (&acc)[kCount], float4* sum) {
#pragma unroll
  for (int idx = 0; idx < kCount / 4; ++idx) {
    const float4 x = __ldcg(sum + idx * 256);
    acc[4 * idx] = x.x, acc[4 * idx + 1] = x.y, acc[4 * idx + 2] = x.z, acc[4 * idx + 3] = x.w;
    __stcg(sum + idx * 256, make_float4(0.f, 0.f, 0.f, 0.f));
  }
}

// Adds this warp's 16 rows of dK and dV to the sum of the group's parts. True in the warp that completed it:
// its accumulators hold the sum, to be written out.
template <class C>
__device__ __forceinline__ bool sum_parts(const KernelArgs& args, const volatile TileInfo& tile,
                                          float (&acc_dk)[C::kDim / 2],
                                          float (&acc_dv)[C::kDimV / 2]) {
  const int32_t sum_idx = tile.kv_sum_idx, thread = read_thread() - 128;
  const bool is_leader = thread % 32 == 0;
  int32_t* const count = args.kv_counts + sum_idx * kNumConsumerWarps + thread / 32;
  const int32_t part_heads = tile.h_q_end - tile.h_q_begin;
  // Of what came before: the head that had the room; in a fixed order, the parts before this one, too.
  const int32_t head_idx = tile.b_idx * args.shape.h_kv + tile.h_kv_idx;
  const int32_t num_before = head_idx / args.kv_sum_heads * (args.group / part_heads + 1);
  if (is_leader) {
    const int32_t part = args.is_deterministic ? tile.h_q_begin % args.group / part_heads : 0;
    wait_at_least(count, num_before + part);
  }
  __syncwarp();
  float4* const sum_dk = reinterpret_cast<float4*>(args.kv_sums) +
                         static_cast<int64_t>(sum_idx) * (C::kBlockK * (C::kDim + C::kDimV) / 4) +
                         thread;
  float4* const sum_dv = sum_dk + C::kDim / 8 * 256;
  add_to_sum(acc_dk, sum_dk);
  add_to_sum(acc_dv, sum_dv);
  __threadfence();
  __syncwarp();
  int32_t num_added = 0;
  if (is_leader) num_added = add_acq_rel(count, 1) - num_before + 1;
  if (__shfl_sync(kAllLanes, num_added, 0) * part_heads < args.group) return false;
  take_sum(acc_dk, sum_dk);
  take_sum(acc_dv, sum_dv);
  __threadfence();
  __syncwarp();
  if (is_leader) add_acq_rel(count, 1);
  return true;
}

}  // namespace fm3::sm90_bwd
