// SPDX-License-Identifier: Apache-2.0
// Warpgroups 1 and 2: the products. Each owns 64 of the 128 keys of S, dP, dK and dV, and half of
// the columns of dQ, for which both halves of dS meet in shared memory once a step.
//
// Order of one step i, chosen so that the tensor cores always have a product queued while the
// softmax arithmetic runs (S of step i was computed during step i - 1):
//     issue dP_i | P_i = exp2(S_i ...) | issue dV | dS_i = P (dP - delta) | issue S_{i+1}
//     store dS_i, meet | issue dQ_i, dK | store dQ_i while dK runs
#pragma once

#include "config.cuh"
#include "dq.cuh"

namespace fm3::sm90_bwd {

// D[64, N] = A[64, kDepth] B[N, kDepth]^T, both with their depth contiguous in panels of 64.
template <int N, int kDepth, int kRowsA, int kRowsB, class T>
__device__ __forceinline__ void gemm_depth_major(float (&d)[N / 2], uint64_t desc_a,
                                                 uint64_t desc_b) {
#pragma unroll
  for (int k_step = 0; k_step < kDepth / 16; ++k_step) {
    const int panel = k_step / 4, inside = k_step % 4 * 32;
    ptx::Wgmma<N, T>::ss(d, ptx::advance(desc_a, panel * kRowsA * 128 + inside),
                         ptx::advance(desc_b, panel * kRowsB * 128 + inside), k_step != 0);
  }
}

// D[64, N] (+)= A[64, 64] B[64, N]; A is a packed accumulator, B's rows (the depth) are panel rows.
template <int N, class T>
__device__ __forceinline__ void gemm_from_registers(float (&d)[N / 2], const uint32_t (&a)[16],
                                                    uint64_t desc_b) {
#pragma unroll
  for (int k_step = 0; k_step < 4; ++k_step) {
    ptx::Wgmma<N, T, false, true>::rs(d, a[4 * k_step], a[4 * k_step + 1], a[4 * k_step + 2],
                                      a[4 * k_step + 3], ptx::advance(desc_b, k_step * 2048),
                                      1);
  }
}

// Scores that the bounds hide become -inf. x[4 j + 2 i + e]: key i of the thread's two, row
// q_first + 8 j + e.
__device__ __forceinline__ void hide(float (&x)[32], const int4* bounds, int32_t q_first) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int4 rows = bounds[8 * i];
    const int32_t lt_begin = rows.x - q_first, ut_begin = rows.z - q_first;
    const uint32_t lt_rows = rows.y - rows.x, ut_rows = rows.w - rows.z;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int32_t q = 8 * j + e;
        const bool is_hidden = static_cast<uint32_t>(q - lt_begin) < lt_rows ||
                               static_cast<uint32_t>(q - ut_begin) < ut_rows;
        if (is_hidden) x[4 * j + 2 * i + e] = -INFINITY;
      }
    }
  }
}

// Writes a warpgroup's [64, kDim] accumulator to its rows of dK or dV. `tile` is read here, from
// shared memory, so that no address of it is held in registers before.
template <class T, int kBlockK, int kDim>
__device__ __forceinline__ void store_gradient(const float (&acc)[kDim / 2], float scale,
                                               const volatile TileInfo& tile, void* base,
                                               const Strides& stride, int32_t s_k, int32_t d) {
  int32_t k_idx = tile.k_tile_idx * kBlockK + (threadIdx.x - 128) / 32 * 16 + threadIdx.x % 32 / 4;
  T* row = static_cast<T*>(base) + tile.b_idx * stride.b + tile.h_kv_idx * stride.h +
           k_idx * stride.s;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int pair = 0; pair < kDim / 16; ++pair) {
      const float* x = acc + 8 * pair + 2 * i;
      store_block_pair<T>(row, pair, ptx::pack2<T>(x[0] * scale, x[1] * scale),
                          ptx::pack2<T>(x[4] * scale, x[5] * scale), k_idx < s_k, d);
    }
    k_idx += 8;
    row += 8 * stride.s;
  }
}

template <class C>
__device__ __forceinline__ void run_consumer(const KernelArgs& args, Smem<C>& smem,
                                             const int32_t group_idx) {
  using T = typename C::T;
  constexpr int kDqN = C::kDim / 2;  // columns of dQ of one warpgroup
  const int32_t thread = threadIdx.x % 128;
  const int32_t warp = thread / 32, lane = thread % 32;
  const bool is_leader = lane == 0;
  const float scale_log2 = args.softmax_scale * kLog2E;

  // Operands. Rows of K and V: this warpgroup's 64 keys for S and dP; all 128 for dQ.
  const uint32_t smem_k = ptx::smem_addr(smem.k), smem_v = ptx::smem_addr(smem.v);
  const uint64_t desc_k = ptx::wgmma_desc(smem_k + group_idx * 64 * 128);
  const uint64_t desc_v = ptx::wgmma_desc(smem_v + group_idx * 64 * 128);
  // Columns of dQ: panel-wise at d = 128, half a panel at d = 64.
  const uint32_t column_bytes = kDqN * 2 * group_idx;
  const uint64_t desc_k_dq = ptx::wgmma_desc_mn(
      smem_k + column_bytes / 128 * (C::kBlockK * 128) + column_bytes % 128, C::kBlockK * 128);
  const uint64_t desc_q = ptx::wgmma_desc(ptx::smem_addr(smem.q[0]));
  const uint64_t desc_dout = ptx::wgmma_desc(ptx::smem_addr(smem.dout[0]));
  const uint64_t desc_q_mn = ptx::wgmma_desc_mn(ptx::smem_addr(smem.q[0]), kBlockQ * 128);
  const uint64_t desc_dout_mn = ptx::wgmma_desc_mn(ptx::smem_addr(smem.dout[0]), kBlockQ * 128);
  const uint64_t desc_ds = ptx::wgmma_desc_mn(ptx::smem_addr(smem.ds[0]), C::kBlockK * 128);
  const uint64_t desc_ds_own =
      ptx::wgmma_desc(ptx::smem_addr(smem.ds[0]) + group_idx * 64 * kBlockQ * 2);
  constexpr uint32_t kDsBytes = C::kBlockK * kBlockQ * 2;

  // Where this lane's row of each 8x8 matrix of dS^T goes: 16-byte chunk (lane >> 4) of a key's
  // 128-byte row, swizzled. Chunk 2 k + c of it is at this address ^ 32 k.
  const int32_t ds_key = group_idx * 64 + warp * 16 + lane % 16;
  const uint32_t ds_address =
      ptx::smem_addr(smem.ds[0]) + ds_key * 128 + ((lane >> 4) ^ (lane & 7)) * 16;
  float4* const dq_piece =
      reinterpret_cast<float4*>(smem.dq) + group_idx * (C::kDim / 16) * 128 + thread;

  RingPos<2> tile_pos;
  RingPos<kNumStages> step_pos;
  uint32_t num_kv = 0;
  float acc_dk[C::kDim / 2], acc_dv[C::kDimV / 2];

  for (;; ++tile_pos.count) {
    ptx::mbar_wait(&smem.tile_full[tile_pos.slot()], tile_pos.parity());
    const int32_t num_steps = smem.tile[tile_pos.slot()].num_steps;
    if (num_steps < 0) return;

    // A tile that no row sees keeps these zeros, and nothing is loaded for it.
#pragma unroll
    for (int idx = 0; idx < C::kDim / 2; ++idx) acc_dk[idx] = 0.f;
#pragma unroll
    for (int idx = 0; idx < C::kDimV / 2; ++idx) acc_dv[idx] = 0.f;
    if (num_steps > 0) {
      float acc_s[32], acc_dp[32], acc_dq[kDqN / 2];
      uint32_t reg_p[16];
      ptx::mbar_wait(&smem.q_full[step_pos.slot()], step_pos.parity());
      ptx::mbar_wait(&smem.k_full, num_kv & 1);
      ptx::wgmma_fence();
      gemm_depth_major<kBlockQ, C::kDim, C::kBlockK, kBlockQ, T>(
          acc_s, desc_k, ptx::advance(desc_q, step_pos.slot() * C::kQBytes));
      ptx::wgmma_commit();
      ptx::mbar_wait(&smem.v_full, num_kv & 1);
      ptx::wgmma_wait<0>();
      ptx::wgmma_pin(acc_s);

#pragma unroll 1
      for (int32_t step = 0; step < num_steps; ++step) {
        const uint32_t slot = step_pos.slot();
        const bool is_last = step + 1 == num_steps;
        // In flight here: dK of the previous step.
        ptx::mbar_wait(&smem.dout_full[slot], step_pos.parity());
        ptx::wgmma_fence();
        gemm_depth_major<kBlockQ, C::kDimV, C::kBlockK, kBlockQ, T>(
            acc_dp, desc_v, ptx::advance(desc_dout, slot * C::kDoutBytes));
        ptx::wgmma_commit();

        // P = exp2(S * scale - lse), log2 throughout. A hidden row has lse = +inf, hence P = 0.
        const StepInfo& info = smem.info[step_pos.count % kNumInfo];
        const float* lse = smem.lse_log2[slot] + 2 * (lane % 4);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const float2 row = *reinterpret_cast<const float2*>(lse + 8 * j);
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            acc_s[4 * j + 2 * i] = fmaf(acc_s[4 * j + 2 * i], scale_log2, -row.x);
            acc_s[4 * j + 2 * i + 1] = fmaf(acc_s[4 * j + 2 * i + 1], scale_log2, -row.y);
          }
        }
        const uint32_t flags = info.flags;
        if (flags & kStepPartial) {
          hide(acc_s,
               smem.bounds[flags & kStepBoundsSlot ? 1 : 0] + group_idx * 64 + warp * 16 + lane / 4,
               info.q_tile_idx * kBlockQ + 2 * (lane % 4));
        }
#pragma unroll
        for (int idx = 0; idx < 32; ++idx) acc_s[idx] = ptx::exp2_approx(acc_s[idx]);
        ptx::wgmma_wait<1>();  // dK of the previous step
        if (step > 0 && is_leader) ptx::mbar_arrive(&smem.q_empty[slot ^ 1]);
#pragma unroll
        for (int idx = 0; idx < 16; ++idx) {
          reg_p[idx] = ptx::pack2<T>(acc_s[2 * idx], acc_s[2 * idx + 1]);
        }
        ptx::wgmma_fence();
        gemm_from_registers<C::kDimV, T>(acc_dv, reg_p,
                                         ptx::advance(desc_dout_mn, slot * C::kDoutBytes));
        ptx::wgmma_commit();
        ptx::wgmma_wait<1>();  // dP
        ptx::wgmma_pin(acc_dp);
        if (is_last && is_leader) ptx::mbar_arrive(&smem.v_empty);

        // dS^T goes to shared memory 16 rows at a time and stays in no register: dK reads it there too,
        // which costs 4 % more shared-memory reads a step and saves the 16 registers that would
        // otherwise force dV to finish first (ptxas serializes every product at 240 with them).
        // Two buffers make one meeting a step enough: whoever stores step i + 1 has met its partner
        // at step i, after the partner's dQ and dK of step i - 1 were complete.
        const uint32_t ds_buffer = step_pos.count & 1;
        const float* delta = smem.delta[slot] + 2 * (lane % 4);
#pragma unroll
        for (int k_step = 0; k_step < 4; ++k_step) {
          uint32_t reg_ds[4];
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const float2 row = *reinterpret_cast<const float2*>(delta + 16 * k_step + 8 * j);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              const int idx = 8 * k_step + 4 * j + 2 * i;
              reg_ds[2 * j + i] = ptx::pack2<T>(acc_s[idx] * (acc_dp[idx] - row.x),
                                                acc_s[idx + 1] * (acc_dp[idx + 1] - row.y));
            }
          }
          asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                           (ds_address ^ (k_step * 32)) + ds_buffer * kDsBytes),
                       "r"(reg_ds[0]), "r"(reg_ds[1]), "r"(reg_ds[2]), "r"(reg_ds[3])
                       : "memory");
        }
        ptx::fence_proxy_async();
        if (!is_last) {
          RingPos<kNumStages> next_pos = step_pos;
          ++next_pos.count;
          ptx::mbar_wait(&smem.q_full[next_pos.slot()], next_pos.parity());
          ptx::wgmma_fence();
          gemm_depth_major<kBlockQ, C::kDim, C::kBlockK, kBlockQ, T>(
              acc_s, desc_k, ptx::advance(desc_q, next_pos.slot() * C::kQBytes));
        }
        ptx::wgmma_commit();
        ptx::named_barrier_sync(kStepBarrier, 256);

        ptx::wgmma_fence();
#pragma unroll
        for (int k_step = 0; k_step < C::kBlockK / 16; ++k_step) {
          ptx::Wgmma<kDqN, T, true, true>::ss(
              acc_dq, ptx::advance(desc_ds, ds_buffer * kDsBytes + k_step * 2048),
              ptx::advance(desc_k_dq, k_step * 2048), k_step != 0);
        }
        ptx::wgmma_commit();
#pragma unroll
        for (int k_step = 0; k_step < kBlockQ / 16; ++k_step) {
          ptx::Wgmma<C::kDim, T, false, true>::ss(
              acc_dk, ptx::advance(desc_ds_own, ds_buffer * kDsBytes + k_step * 32),
              ptx::advance(desc_q_mn, slot * C::kQBytes + k_step * 2048), 1);
        }
        ptx::wgmma_commit();
        // In flight: dV, next S, dQ, dK.
        ptx::wgmma_wait<3>();
        if (is_leader) ptx::mbar_arrive(&smem.dout_empty[slot]);
        ptx::wgmma_wait<1>();  // next S and dQ
        ptx::wgmma_pin(acc_s);
        ptx::wgmma_pin(acc_dq);
        if (is_last && is_leader) ptx::mbar_arrive(&smem.k_empty);

        RingPos<1> dq_pos;
        dq_pos.count = step_pos.count;
        ptx::mbar_wait(&smem.dq_empty, dq_pos.write_parity());
#pragma unroll
        for (int block = 0; block < C::kDim / 16; ++block) {
          dq_piece[block * 128] = make_float4(acc_dq[4 * block], acc_dq[4 * block + 1],
                                              acc_dq[4 * block + 2], acc_dq[4 * block + 3]);
        }
        ptx::fence_proxy_async();
        __syncwarp();
        if (is_leader) ptx::mbar_arrive(&smem.dq_full);
        ++step_pos.count;
      }
      ptx::wgmma_wait<0>();
      ptx::wgmma_pin(acc_dk);
      ptx::wgmma_pin(acc_dv);
      if (is_leader) ptx::mbar_arrive(&smem.q_empty[step_pos.slot() ^ 1]);
      ++num_kv;
    }

    const TileInfo& tile = smem.tile[tile_pos.slot()];
    store_gradient<T, C::kBlockK, C::kDimV>(acc_dv, 1.f, tile, args.dv, args.stride_dv, args.shape.s_k,
                                  args.shape.d_v);
    store_gradient<T, C::kBlockK, C::kDim>(acc_dk, args.softmax_scale, tile, args.dk, args.stride_dk,
                                  args.shape.s_k, args.shape.d_qk);
    __syncwarp();
    if (is_leader) ptx::mbar_arrive(&smem.tile_empty[tile_pos.slot()]);
  }
}

}  // namespace fm3::sm90_bwd
