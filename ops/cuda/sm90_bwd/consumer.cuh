// SPDX-License-Identifier: Apache-2.0
// Warpgroups 1 and 2: the products. Each owns 64 of the 128 keys of S, dP, dK and dV, and half of
// the columns of dQ, for which both halves of dS meet in shared memory once a step.
//
// Order of one step i. Both warpgroups run in step: they meet once a step, twice more at a tile's end.
//     P_i = exp2(S_i scale - lse)                    while dQ_{i-1} and dK_{i-1} run
//     stage dQ_{i-1}, load delta, hand dQ_{i-1} over | issue dP_i (on top of -delta), dV_i
//     dS_i = P_i dP_i, store                         while dV_i runs
//     issue S_{i+1}, load lse | meet | issue dQ_i, dK_i
// Floors of a step at d = 128, in cycles: 2560 of the tensor cores, 3300 of shared memory, 2000 for
// the reduction to read its 32 KB. results/sm90_bwd.md has what other orders took.
#pragma once

#include <type_traits>

#include "config.cuh"
#include "dq.cuh"
#include "hidden.cuh"
#include "kv_sum.cuh"

namespace fm3::sm90_bwd {

// D[64, N] (+)= A[64, kDepth] B[N, kDepth]^T, both with their depth contiguous in panels of 64.
template <int N, int kDepth, int kRowsA, int kRowsB, class T>
__device__ __forceinline__ void gemm_depth_major(float (&d)[N / 2], uint64_t desc_a,
                                                 uint64_t desc_b, bool accumulates) {
#pragma unroll
  for (int k_step = 0; k_step < kDepth / 16; ++k_step) {
    const int panel = k_step / 4, inside = k_step % 4 * 32;
    ptx::Wgmma<N, T>::ss(d, ptx::advance(desc_a, panel * kRowsA * 128 + inside),
                         ptx::advance(desc_b, panel * kRowsB * 128 + inside),
                         k_step != 0 || accumulates);
  }
}

// D[64, N] (+)= A[64, 64] B[64, N]; A is a packed accumulator, B's rows (the depth) are panel rows.
template <int N, class T>
__device__ __forceinline__ void gemm_from_registers(float (&d)[N / 2], const uint32_t (&a)[16],
                                                    uint64_t desc_b) {
#pragma unroll
  for (int k_step = 0; k_step < 4; ++k_step) {
    ptx::Wgmma<N, T, false, true>::rs(d, a[4 * k_step], a[4 * k_step + 1], a[4 * k_step + 2],
                                      a[4 * k_step + 3], ptx::advance(desc_b, k_step * 2048), 1);
  }
}

// Scores that the bounds hide become -inf. x[4 j + 2 i + e]: key i of the thread's two, row
// q_first + 8 j + e.
template <int kBlocks>
__device__ __forceinline__ void hide(float (&x)[4 * kBlocks], const int4* bounds, int32_t q_first,
                                     int32_t s_q) {
  const int4 rows[2] = {bounds[0], bounds[8]};
  const bool is_simple = shows_one_interval(rows[0].y, rows[0].z, s_q) &&
                         shows_one_interval(rows[1].y, rows[1].z, s_q);
  if (__all_sync(kAllLanes, is_simple)) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int32_t begin = rows[i].w - q_first;
      const uint32_t size = max(rows[i].x - rows[i].w, 0);
#pragma unroll
      for (int j = 0; j < kBlocks; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if (static_cast<uint32_t>(8 * j + e - begin) >= size) x[4 * j + 2 * i + e] = -INFINITY;
        }
      }
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int32_t lt_begin = rows[i].x - q_first, ut_begin = rows[i].z - q_first;
    const uint32_t lt_rows = rows[i].y - rows[i].x, ut_rows = rows[i].w - rows[i].z;
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) {
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

// Writes a warpgroup's [64, N] accumulator to columns d_begin ... of its rows of dK or dV, the first
// being k_first of the key tile. `tile` is read here, from shared memory, so that no address of it is
// held in registers before.
template <class C, int N>
__device__ __forceinline__ void store_gradient(const float (&acc)[N / 2], float scale,
                                               const volatile TileInfo& tile, int32_t k_first,
                                               void* base, const Strides& stride, int32_t s_k,
                                               int32_t d_begin, int32_t d) {
  using T = typename C::T;
  const int32_t thread = read_thread();
  int32_t k_idx = tile.k_tile_idx * C::kBlockK + k_first + thread % 128 / 32 * 16 + thread % 32 / 4;
  T* row = static_cast<T*>(base) + tile.b_idx * stride.b + tile.h_kv_idx * stride.h +
           k_idx * stride.s + d_begin;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int pair = 0; pair < N / 16; ++pair) {
      const float* x = acc + 8 * pair + 2 * i;
      store_block_pair<T>(row, pair, ptx::pack2<T>(x[0] * scale, x[1] * scale),
                          ptx::pack2<T>(x[4] * scale, x[5] * scale), k_idx < s_k, d - d_begin);
    }
    k_idx += 8;
    row += 8 * stride.s;
  }
}

__device__ __forceinline__ void group_sync() {
  ptx::named_barrier_sync(kGroupBarrier - 1 + read_thread() / 128, 128);
}

// Writes a warpgroup's [64, kDim] accumulator as two-byte elements to its rows of dK or dV: by way
// of shared memory (panels of 64 columns, swizzled; `left` and `right` [64, 64] each) and TMA, which
// drops what lies outside. The caller sees to it that both are free; TMA reads them until the bulk
// groups of the warpgroup's first thread are done.
template <class C, int kDim>
__device__ __forceinline__ void store_gradient_tma(const float (&acc)[kDim / 2], float scale,
                                                   typename C::T* left, typename C::T* right,
                                                   const CUtensorMap* map,
                                                   const volatile TileInfo& tile,
                                                   int32_t group_idx) {
  using T = typename C::T;
  static_assert(kDim <= 128);
  const uint32_t thread = read_thread();
  const uint32_t lane = thread % 32;
  const uint32_t row_bytes = (thread % 128 / 32 * 16 + lane % 16) * 128;
  const uint32_t swizzled = ((lane >> 4) ^ (lane & 7)) * 16;
#pragma unroll
  for (int pair = 0; pair < kDim / 16; ++pair) {
    uint32_t r[4];
#pragma unroll
    for (int idx = 0; idx < 4; ++idx) {
      r[idx] = ptx::pack2<T>(acc[8 * pair + 2 * idx] * scale, acc[8 * pair + 2 * idx + 1] * scale);
    }
    ptx::stmatrix_x4(
        ptx::smem_addr(pair < 4 ? left : right) + row_bytes + (swizzled ^ (pair % 4 * 32)), r);
  }
  ptx::fence_proxy_async();
  group_sync();
  if (thread % 128 == 0) {
    const int32_t k_idx = tile.k_tile_idx * C::kBlockK + group_idx * 64;
    ptx::tma_store_4d(map, left, 0, k_idx, tile.h_kv_idx, tile.b_idx);
    if constexpr (kDim > 64) ptx::tma_store_4d(map, right, 64, k_idx, tile.h_kv_idx, tile.b_idx);
    ptx::bulk_commit();
  }
}

// Zeros to the warpgroup's 64 rows of dK or dV of a tile that no row sees.
template <class T>
__device__ __forceinline__ void store_zeros(const volatile TileInfo& tile, int32_t k_begin,
                                            void* base, const Strides& stride, int32_t s_k,
                                            int32_t d) {
  T* const rows = static_cast<T*>(base) + tile.b_idx * stride.b + tile.h_kv_idx * stride.h;
#pragma unroll 1
  for (int32_t idx = threadIdx.x % 128; idx < 64 * (d / 8); idx += 128) {
    const int32_t k_idx = k_begin + idx / (d / 8);
    if (k_idx < s_k) {
      *reinterpret_cast<uint4*>(rows + k_idx * stride.s + idx % (d / 8) * 8) =
          make_uint4(0, 0, 0, 0);
    }
  }
}

// Of a step's 64 rows the 16 values that belong to the thread's scores.
__device__ __forceinline__ void load_rows(float2 (&values)[8], const float* rows) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    values[j] = *reinterpret_cast<const float2*>(rows + 8 * j + 2 * (threadIdx.x % 4));
  }
}
// The thread's scores of step `count` turn into P = exp2(S * scale - lse), log2 throughout. A hidden
// row has lse = +inf, hence P = 0.
template <class C>
__device__ __forceinline__ void scores_to_p(float (&x)[32], const float2 (&lse)[8], Smem<C>& smem,
                                            uint32_t count, float scale_log2, int32_t s_q) {
  const int32_t lane = threadIdx.x % 32;
  const StepInfo& info = smem.info[count % kNumInfo];
#pragma unroll
  for (int j = 0; j < 8; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      x[4 * j + 2 * i] = fmaf(x[4 * j + 2 * i], scale_log2, -lse[j].x);
      x[4 * j + 2 * i + 1] = fmaf(x[4 * j + 2 * i + 1], scale_log2, -lse[j].y);
    }
  }
  const uint32_t flags = info.flags;
  if (flags & kStepPartial) {
    const int32_t key = (threadIdx.x - 128) / 32 * 16 + lane / 4;
    hide<8>(x, smem.bounds[flags & kStepBoundsSlot ? 1 : 0] + key,
            info.q_tile_idx * kBlockQ + 2 * (lane % 4), s_q);
    bool has_hidden_row = false;
#pragma unroll
    for (int j = 0; j < 8; ++j) has_hidden_row |= lse[j].x == INFINITY || lse[j].y == INFINITY;
    if (__any_sync(kAllLanes, has_hidden_row)) {  // the same answer in every consumer warp
      clear_hidden_rows<C>(smem, count);
      ptx::fence_proxy_async();
      ptx::named_barrier_sync(kStepBarrier, 256);
    }
  }
#pragma unroll
  for (int idx = 0; idx < 32; ++idx) x[idx] = ptx::exp2_approx(x[idx]);
}

// Stores this warpgroup's half of the dQ of step `count` where the writer takes it from.
template <class C>
__device__ __forceinline__ void stage_dq(const float (&acc_dq)[C::kDim / 4], Smem<C>& smem,
                                         uint32_t count) {
  // Unit (half, warp) is that of the consumer warp, counted over both warpgroups.
  float4* const piece =
      reinterpret_cast<float4*>(smem.dq + (threadIdx.x - 128) / 32 * Sizes<C>::kUnitFloats) +
      threadIdx.x % 32;
  RingPos<1> dq_pos;
  dq_pos.count = count;
  ptx::mbar_wait(&smem.dq_empty[0], dq_pos.write_parity());
#pragma unroll
  for (int block = 0; block < C::kDim / 16; ++block) {
    piece[block * 32] = make_float4(acc_dq[4 * block], acc_dq[4 * block + 1], acc_dq[4 * block + 2],
                                    acc_dq[4 * block + 3]);
  }
}
template <class C>
__device__ __forceinline__ void hand_over_dq(Smem<C>& smem) {
  ptx::fence_proxy_async();
  __syncwarp();
  if (ptx::arrives(threadIdx.x % 32 == 0)) ptx::mbar_arrive(&smem.dq_full);
}

template <class C>
__device__ __forceinline__ void run_consumer(const KernelArgs& args, Smem<C>& smem,
                                             const int32_t group_idx) {
  using T = typename C::T;
  constexpr int kDqN = C::kDim / 2;  // columns of dQ of one warpgroup
  const int32_t warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
  const bool is_leader = lane == 0;
  const float scale_log2 = args.softmax_scale * kLog2E;

  // Operands. Rows of K and V: this warpgroup's 64 keys for S and dP; all 128 for dQ.
  const uint32_t smem_kv = ptx::smem_addr(smem.kv);
  const uint64_t desc_rows = ptx::wgmma_desc(smem_kv + group_idx * 64 * 128);
  // Columns of dQ: panel-wise at d = 128, half a panel at d = 64.
  const uint32_t column_bytes = kDqN * 2 * group_idx;
  const uint64_t desc_columns = ptx::wgmma_desc_mn(
      smem_kv + column_bytes / 128 * (C::kBlockK * 128) + column_bytes % 128, C::kBlockK * 128);
  const uint64_t desc_q = ptx::wgmma_desc(ptx::smem_addr(smem.q[0]));
  const uint64_t desc_dout = ptx::wgmma_desc(ptx::smem_addr(smem.dout[0]));
  // The same tiles with rows as depth: only the field of the panels' distance differs.
  constexpr uint32_t kRowsAreDepth = ((kBlockQ * 128 >> 4) - 1) << 20;
  const uint64_t desc_ds = ptx::wgmma_desc_mn(ptx::smem_addr(smem.ds[0]), C::kBlockK * 128);
  const uint64_t desc_ds_own =
      ptx::wgmma_desc(ptx::smem_addr(smem.ds[0]) + group_idx * 64 * kBlockQ * 2);
  constexpr uint32_t kDsBytes = Sizes<C>::kDsBytes;

  // Where this lane's row of each 8x8 matrix of dS^T goes: 16-byte chunk (lane >> 4) of a key's
  // 128-byte row, swizzled. Chunk 2 k + c of it is at this address ^ 32 k.
  const int32_t ds_key = group_idx * 64 + warp * 16 + lane % 16;
  const uint32_t ds_address =
      ptx::smem_addr(smem.ds[0]) + ds_key * 128 + ((lane >> 4) ^ (lane & 7)) * 16;

  RingPos<2> tile_pos;
  RingPos<C::kQStages> step_pos;  // of Q; dO and dS take turns with count % 2
  uint32_t num_kv = 0;
  float acc_dk[C::kDim / 2], acc_dv[C::kDimV / 2];

  // A tile's dV and dK leave by way of what its last steps need no more: half of each goes to a buffer of dS,
  // the other halves where the last dO and Q were. These are released here, in the next tile, once TMA has
  // read them: at a tile's end nothing waits for it.
  const auto release_staged = [&]() __attribute__((always_inline)) {
    if (warp != 0) return;
    if (is_leader) ptx::bulk_wait_read<0>();
    __syncwarp();
    if (ptx::arrives(is_leader)) {
      const uint32_t last = step_pos.count - 1;
      ptx::mbar_arrive(&smem.dout_empty[last % C::kDoutStages]);
      ptx::mbar_arrive(&smem.q_empty[last % C::kQStages]);
    }
  };
  for (;; ++tile_pos.count) {
    ptx::mbar_wait(&smem.tile_full[tile_pos.slot()], tile_pos.parity());
    const int32_t num_steps = smem.tile[tile_pos.slot()].num_steps;
    if (num_steps < 0) break;

    const TileInfo& tile = smem.tile[tile_pos.slot()];
    if (num_steps == 0 && tile.kv_sum_idx < 0) {
      const int32_t k_begin = tile.k_tile_idx * C::kBlockK + group_idx * 64;
      store_zeros<T>(tile, k_begin, args.dv, args.stride_dv, args.shape.s_k, args.shape.d_v);
      store_zeros<T>(tile, k_begin, args.dk, args.stride_dk, args.shape.s_k, args.shape.d_qk);
      __syncwarp();
      if (ptx::arrives(is_leader)) ptx::mbar_arrive(&smem.tile_empty[tile_pos.slot()]);
      continue;
    }
    const auto clear_sums = [&]() __attribute__((always_inline)) {
#pragma unroll
      for (int idx = 0; idx < C::kDim / 2; ++idx) acc_dk[idx] = 0.f;
#pragma unroll
      for (int idx = 0; idx < C::kDimV / 2; ++idx) acc_dv[idx] = 0.f;
    };
    if (num_steps > 0) {
      const uint32_t k_bytes = KvPlaces<C>::k(num_kv) * 2, v_bytes = KvPlaces<C>::v(num_kv) * 2;
      const uint64_t desc_k = ptx::advance(desc_rows, k_bytes);
      const uint64_t desc_v = ptx::advance(desc_rows, v_bytes);
      const uint64_t desc_k_dq = ptx::advance(desc_columns, k_bytes);
      float acc_s[32], acc_dp[32], acc_dq[kDqN / 2];
      // Of the rows of the step to come, read well before use: loads are slow while products run.
      float2 lse[8];
      uint32_t reg_p[16];
      ptx::mbar_wait(&smem.q_full[step_pos.slot()], step_pos.parity());
      ptx::mbar_wait(&smem.k_full, num_kv & 1);
      ptx::wgmma_fence();
      gemm_depth_major<kBlockQ, C::kDim, C::kBlockK, kBlockQ, T>(
          acc_s, desc_k, ptx::advance(desc_q, step_pos.slot() * Sizes<C>::kQBytes), false);
      ptx::wgmma_commit();
      clear_sums();
      ptx::mbar_wait(&smem.v_full, num_kv & 1);
      ptx::wgmma_wait<0>();
      ptx::wgmma_pin(acc_s);
      ptx::mbar_wait(&smem.dout_full[step_pos.count % C::kDoutStages],
                     step_pos.count / C::kDoutStages & 1);  // the bounds come with dO
      load_rows(lse, smem.lse_log2[step_pos.slot()]);
      scores_to_p<C>(acc_s, lse, smem, step_pos.count, scale_log2, args.shape.s_q);
      if (const uint32_t flags = smem.info[step_pos.count % kNumInfo].flags; flags & kStepPartial) {
        clear_hidden_keys<C>(args, smem.kv + KvPlaces<C>::k(num_kv),
                             smem.kv + KvPlaces<C>::v(num_kv),
                             smem.bounds[flags & kStepBoundsSlot ? 1 : 0]);
        ptx::fence_proxy_async();
      }
      // The gradients of the tile before have left what they were staged in.
      if (num_kv > 0) release_staged();
      group_sync();  // also: dP reads cleared rows of V

      const auto run_step = [&](bool is_first,
                                auto is_last_constant) __attribute__((always_inline)) {
        constexpr bool is_last = decltype(is_last_constant)::value;
        const uint32_t slot = step_pos.slot();
        RingPos<C::kDoutStages> dout_pos;
        dout_pos.count = step_pos.count;
        const uint32_t dout_slot = dout_pos.slot();

        // P is in acc_s. In flight: dK of the previous step.
        const float* minus_delta = smem.minus_delta[dout_slot] + 2 * (lane % 4);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const float2 row = *reinterpret_cast<const float2*>(minus_delta + 8 * j);
          acc_dp[4 * j] = acc_dp[4 * j + 2] = row.x;
          acc_dp[4 * j + 1] = acc_dp[4 * j + 3] = row.y;
        }
        // The sooner the better: the reduction reads the buffer for 1800 to 2000 cycles of a step.
        if (!is_first) hand_over_dq(smem);
        ptx::wgmma_fence();
        gemm_depth_major<kBlockQ, C::kDimV, C::kBlockK, kBlockQ, T>(
            acc_dp, desc_v, ptx::advance(desc_dout, dout_slot * Sizes<C>::kDoutBytes), true);
        ptx::wgmma_commit();
#pragma unroll
        for (int idx = 0; idx < 16; ++idx) {
          reg_p[idx] = ptx::pack2<T>(acc_s[2 * idx], acc_s[2 * idx + 1]);
        }
        ptx::wgmma_wait<1>();  // dK of the previous step
        if (!is_first && ptx::arrives(is_leader)) {
          ptx::mbar_arrive(&smem.q_empty[slot == 0 ? C::kQStages - 1 : slot - 1]);
        }
        ptx::wgmma_fence();
        gemm_from_registers<C::kDimV, T>(
            acc_dv, reg_p,
            ptx::advance(desc_dout, kRowsAreDepth + dout_slot * Sizes<C>::kDoutBytes));
        ptx::wgmma_commit();
        ptx::wgmma_wait<1>();  // dP - delta
        ptx::wgmma_pin(acc_dp);
        if (is_last && ptx::arrives(is_leader)) ptx::mbar_arrive(&smem.v_empty);

        // dS^T goes to shared memory 16 rows at a time and stays in no register: dK reads it there too,
        // which costs 4 % more shared-memory reads a step and saves the 16 registers that would
        // otherwise force dV to finish first (ptxas serializes every product at 240 with them).
        // Two buffers make one meeting a step enough: whoever stores step i + 1 has met its partner
        // at step i, after the partner's dQ and dK of step i - 1 were complete.
        const uint32_t ds_buffer = step_pos.count & 1;
#pragma unroll
        for (int k_step = 0; k_step < 4; ++k_step) {
          uint32_t reg_ds[4];
#pragma unroll
          for (int idx = 0; idx < 4; ++idx) {
            const int at = 8 * k_step + 2 * idx;
            reg_ds[idx] = ptx::pack2<T>(acc_s[at] * acc_dp[at], acc_s[at + 1] * acc_dp[at + 1]);
          }
          ptx::stmatrix_x4((ds_address ^ (k_step * 32)) + ds_buffer * kDsBytes, reg_ds);
        }
        if constexpr (!is_last) {
          RingPos<C::kQStages> next_pos = step_pos;
          ++next_pos.count;
          ptx::mbar_wait(&smem.q_full[next_pos.slot()], next_pos.parity());
          ptx::wgmma_fence();
          gemm_depth_major<kBlockQ, C::kDim, C::kBlockK, kBlockQ, T>(
              acc_s, desc_k, ptx::advance(desc_q, next_pos.slot() * Sizes<C>::kQBytes), false);
          ptx::wgmma_commit();
        }
        ptx::fence_proxy_async();
        if constexpr (!is_last) load_rows(lse, smem.lse_log2[(step_pos.count + 1) % C::kQStages]);
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
              ptx::advance(desc_q, kRowsAreDepth + slot * Sizes<C>::kQBytes + k_step * 2048), 1);
        }
        ptx::wgmma_commit();
        ptx::wgmma_wait<2>();  // dV and the next S; dQ and dK stay in flight
        ptx::wgmma_pin(acc_s);
        if constexpr (is_last) {
          // Both warpgroups are through with dO, and with dS of the step before.
          ptx::wgmma_pin(acc_dv);
          ptx::named_barrier_sync(kStepBarrier, 256);
          if (tile.kv_sum_idx < 0) {
            store_gradient_tma<C, C::kDimV>(acc_dv, 1.f, smem.ds[ds_buffer ^ 1] + group_idx * 4096,
                                            smem.dout[dout_slot] + group_idx * 4096, &args.map_dv,
                                            tile, group_idx);
          }
          if (ptx::arrives(is_leader) && warp != 0) ptx::mbar_arrive(&smem.dout_empty[dout_slot]);
        } else {
          if (ptx::arrives(is_leader)) ptx::mbar_arrive(&smem.dout_empty[dout_slot]);
          const uint32_t next = step_pos.count + 1;
          ptx::mbar_wait(&smem.dout_full[next % C::kDoutStages], next / C::kDoutStages & 1);
          scores_to_p<C>(acc_s, lse, smem, next, scale_log2, args.shape.s_q);
        }
        ptx::wgmma_wait<1>();  // dQ
        ptx::wgmma_pin(acc_dq);
        if (is_last && ptx::arrives(is_leader)) ptx::mbar_arrive(&smem.k_empty);
        stage_dq<C>(acc_dq, smem, step_pos.count);
        ++step_pos.count;
      };
      // The last step is a copy of its own: a conditional S would make ptxas serialize the products.
#pragma unroll 1
      for (int32_t step = 0; step + 1 < num_steps; ++step) run_step(step == 0, std::false_type{});
      run_step(num_steps == 1, std::true_type{});
      ptx::wgmma_wait<0>();
      ptx::wgmma_pin(acc_dk);
      // Both warpgroups are through with Q and dS. The reduction of dQ comes after the stores: these
      // must have left shared memory before the next tile's second step, dQ before its first is staged.
      ptx::named_barrier_sync(kStepBarrier, 256);
      const uint32_t last = step_pos.count - 1;
      T* const q = smem.q[last % C::kQStages];
      if (tile.kv_sum_idx < 0) {
        store_gradient_tma<C, C::kDim>(acc_dk, args.softmax_scale,
                                       smem.ds[last & 1] + group_idx * 4096, q + group_idx * 4096,
                                       &args.map_dk, tile, group_idx);
      }
      if (ptx::arrives(is_leader) && warp != 0) ptx::mbar_arrive(&smem.q_empty[last % C::kQStages]);
      hand_over_dq(smem);
      ++num_kv;
    } else {
      clear_sums();  // a part without steps: others may have some
    }
    if (tile.kv_sum_idx >= 0 && sum_parts<C>(args, tile, acc_dk, acc_dv)) {
      store_gradient<C, C::kDimV>(acc_dv, 1.f, tile, group_idx * 64, args.dv, args.stride_dv,
                                  args.shape.s_k, 0, args.shape.d_v);
      store_gradient<C, C::kDim>(acc_dk, args.softmax_scale, tile, group_idx * 64, args.dk,
                                 args.stride_dk, args.shape.s_k, 0, args.shape.d_qk);
    }
    // Not yet read: the thread that stored still needs `tile`, but it has passed its read.
    __syncwarp();
    if (ptx::arrives(is_leader)) ptx::mbar_arrive(&smem.tile_empty[tile_pos.slot()]);
  }
  if (threadIdx.x % 128 == 0) ptx::bulk_wait<0>();
}

}  // namespace fm3::sm90_bwd
