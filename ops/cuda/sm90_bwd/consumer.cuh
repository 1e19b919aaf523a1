// SPDX-License-Identifier: Apache-2.0
// Warpgroups 1 and 2, the products, for d <= 128. Each owns 64 of the 128 keys of S, dP, dK and dV, and half
// of the columns of dQ, for which both halves of dS meet in shared memory once a step.
//
// Order of one step i. Both warpgroups run in step: they meet once a step, twice more at a tile's end.
//     issue dP_i, dV_i (P from registers)
//     dS_i = P_i dP_i, store, meet                  while dV_i runs
//     issue S_{i+1}, dQ_i, dK_i (dS from registers)
//     P_{i+1} = exp2(S_{i+1} scale)                 while dQ_i and dK_i run
//     stage dQ_i and hand it over                   while dK_i runs
// S and dP begin at what lse and delta take from them (row_pieces.h), 16 columns of depth more.
// Nothing is in flight twice a step, behind dV and behind dK: ptxas keeps registers that a product reads until
// then, so P and dS share theirs. Without, it finds 240 too few and serializes every product.
// Floors of a step at d = 128, in cycles: 2690 of the tensor cores, 3020 of shared memory, 2000 for the reduction
// to read its 32 KB. results/sm90_bwd.md has what other orders took.
#pragma once

#include <type_traits>

#include "config.cuh"
#include "dq.cuh"
#include "hidden.cuh"
#include "kv_sum.cuh"
#include "sent.cuh"

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

// Writes a warpgroup's [64, N] accumulator to columns d_begin ... of its rows of dK or dV, the first
// being k_first of the key tile. `tile` is read here, from shared memory, so that no address of it is
// held in registers before.
template <class C, int N>
__device__ __forceinline__ void store_gradient(const float (&acc)[N / 2], float scale,
                                               const volatile TileInfo& tile, int32_t k_first,
                                               void* base, const Strides& stride, int32_t d_begin,
                                               int32_t d) {
  using T = typename C::T;
  const int32_t thread = read_thread();
  const int32_t k_end = k_end_of(tile);
  int32_t k_idx = tile.k_begin + k_first + thread % 128 / 32 * 16 + thread % 32 / 4;
  T* row = static_cast<T*>(base) + tile.b_idx * stride.b + tile.h_kv_idx * stride.h +
           k_idx * stride.s + d_begin;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int pair = 0; pair < N / 16; ++pair) {
      const float* x = acc + 8 * pair + 2 * i;
      store_block_pair<T>(row, pair, ptx::pack2<T>(x[0] * scale, x[1] * scale),
                          ptx::pack2<T>(x[4] * scale, x[5] * scale), k_idx < k_end, d - d_begin);
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
    const int32_t k_idx = tile.k_begin + group_idx * 64;
    ptx::tma_store_4d(map, left, 0, k_idx, tile.h_kv_idx, tile.b_idx);
    if constexpr (kDim > 64) ptx::tma_store_4d(map, right, 64, k_idx, tile.h_kv_idx, tile.b_idx);
    ptx::bulk_commit();
  }
}

// Zeros to the warpgroup's 64 rows of dK or dV of a tile that no row sees.
template <class T>
__device__ __forceinline__ void store_zeros(const volatile TileInfo& tile, int32_t k_first,
                                            void* base, const Strides& stride, int32_t d) {
  const int32_t k_begin = tile.k_begin + k_first, k_end = k_end_of(tile);
  T* const rows = static_cast<T*>(base) + tile.b_idx * stride.b + tile.h_kv_idx * stride.h;
#pragma unroll 1
  for (int32_t idx = threadIdx.x % 128; idx < 64 * (d / 8); idx += 128) {
    const int32_t k_idx = k_begin + idx / (d / 8);
    if (k_idx < k_end) {
      *reinterpret_cast<uint4*>(rows + k_idx * stride.s + idx % (d / 8) * 8) =
          make_uint4(0, 0, 0, 0);
    }
  }
}

// To both, of a tile that no row sees.
template <class C>
__device__ __forceinline__ void store_zero_gradients(const KernelArgs& args, const TileInfo& tile,
                                                     int32_t group_idx) {
  using T = typename C::T;
  store_zeros<T>(tile, group_idx * 64, args.dv, args.stride_dv, args.shape.d_v);
  store_zeros<T>(tile, group_idx * 64, args.dk, args.stride_dk, args.shape.d_qk);
}

// D[64, rows] = 64 times the row of what the RowPieces of the query rows add up to; `ones` picks the three.
template <int kCount>
__device__ __forceinline__ void start_from(float (&d)[kCount], const uint32_t (&ones)[4],
                                           uint64_t desc_rows16) {
  ptx::Wgmma<2 * kCount, __nv_bfloat16>::rs(d, ones[0], ones[1], ones[2], ones[3], desc_rows16, 0);
}

template <class C>
__device__ __forceinline__ void wait_for_dout(Smem<C>& smem, uint32_t count) {
  ptx::mbar_wait(&smem.dout_full[count % C::kDoutStages], count / C::kDoutStages & 1);
}

// What the bounds hide of the thread's scores of partial step `count`.
struct HiddenParts {
  uint32_t scores;  // hidden_scores of the thread's two keys, 16 bits each
  bool has_row;     // a row of the step sees no key at all; the same in every consumer warp
};
template <class C>
__device__ __forceinline__ HiddenParts hidden_of_step(Smem<C>& smem, uint32_t count,
                                                      uint32_t flags) {
  wait_for_dout<C>(smem, count);  // the bounds come with dO
  const int32_t lane = threadIdx.x % 32;
  const int32_t key = (threadIdx.x - 128) / 32 * 16 + lane / 4;
  const int4* const bounds = smem.bounds[flags & kStepBoundsSlot ? 1 : 0] + key;
  const int4 rows[2] = {bounds[0], bounds[8]};
  const int32_t q_first = smem.info[count % kNumInfo].q_begin + 2 * (lane % 4);
  const RowPieces* const lse = smem.lse[count % C::kLseStages] + lane;
  const bool is_hidden = is_hidden_row(lse[0]) | is_hidden_row(lse[32]);
  uint32_t scores = 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    scores |= hidden_scores({rows[i].x, rows[i].y, rows[i].z, rows[i].w}, q_first) << 16 * i;
  }
  return {scores, __any_sync(kAllLanes, is_hidden) != 0};
}

// The thread's scores of step `count`, less lse already, turn into P = exp2(S * scale), log2 throughout.
template <class C>
__device__ __forceinline__ void scores_to_p(float (&x)[32], Smem<C>& smem, uint32_t count,
                                            uint32_t flags, const HiddenParts& hidden,
                                            float scale_log2) {
#pragma unroll
  for (int idx = 0; idx < 32; ++idx) x[idx] = ptx::exp2_approx(x[idx] * scale_log2);
  if (!(flags & kStepPartial)) return;
  // After the exponentials: these then stay ahead of the wait for dQ, where ptxas would put them behind it.
#pragma unroll
  for (int idx = 0; idx < 32; ++idx) {
    if (hidden.scores & 1u << (idx / 2 % 2 * 16 + idx % 2 * 8 + idx / 4)) x[idx] = 0.f;
  }
  if (hidden.has_row) {
    clear_hidden_rows<C>(smem, count);
    ptx::fence_proxy_async();
    ptx::named_barrier_sync(kStepBarrier, 256);
  }
}

// Stores this warpgroup's half of the dQ of step `count` where the writer takes it from.
template <class C>
__device__ __forceinline__ void stage_dq(const float (&acc_dq)[C::kDim / 4], Smem<C>& smem,
                                         uint32_t count) {
  // Unit (half, warp) is that of the consumer warp, counted over both warpgroups.
  RingPos<C::kDqBuffers> dq_pos;
  dq_pos.count = count;
  float4* const piece =
      reinterpret_cast<float4*>(smem.dq + dq_pos.slot() * Sizes<C>::kPartFloats +
                                (threadIdx.x - 128) / 32 * Sizes<C>::kUnitFloats) +
      threadIdx.x % 32;
  ptx::mbar_wait(&smem.dq_empty[dq_pos.slot()], dq_pos.write_parity());
#pragma unroll
  for (int block = 0; block < C::kDim / 16; ++block) {
    piece[block * 32] = make_float4(acc_dq[4 * block], acc_dq[4 * block + 1], acc_dq[4 * block + 2],
                                    acc_dq[4 * block + 3]);
  }
}
template <class C>
__device__ __forceinline__ void hand_over_dq(Smem<C>& smem, uint32_t count = 0) {
  ptx::fence_proxy_async();
  __syncwarp();
  if (ptx::arrives(threadIdx.x % 32 == 0)) ptx::mbar_arrive(&smem.dq_full[count % C::kDqBuffers]);
}

// At a tile's end: stores gradients that TMA does not, those of a short tile, and sums over parts, if this is the last
// one; says that the tile's are written.
template <class C>
__device__ __forceinline__ void finish_gradients(const KernelArgs& args, const TileInfo& tile,
                                                 float (&acc_dk)[C::kDim / 2],
                                                 float (&acc_dv)[C::kDimV / 2],
                                                 const int32_t group_idx, const bool is_leader) {
  if (tile.kv_sum_idx >= 0 &&
      (tile.kv_sum_idx == kShortTile || sum_parts<C>(args, tile, acc_dk, acc_dv))) {
    store_gradient<C, C::kDimV>(acc_dv, 1.f, tile, group_idx * 64, args.dv, args.stride_dv, 0,
                                args.shape.d_v);
    store_gradient<C, C::kDim>(acc_dk, args.softmax_scale, tile, group_idx * 64, args.dk,
                               args.stride_dk, 0, args.shape.d_qk);
    if (is_sent(args, tile)) count_sent_warp(args, is_leader);
  }
  // The writes take no longer than the next tile's K and V.
  if (tile.kv_sum_idx < 0 && is_sent(args, tile) && threadIdx.x % 128 == 0) {
    count_sent_group(args);
  }
}

template <class C>
__device__ __forceinline__ void run_consumer(const KernelArgs& args, Smem<C>& smem,
                                             const int32_t group_idx) {
  using T = typename C::T;
  constexpr int kDqN = C::kDim / 2;  // columns of dQ of one warpgroup
  const int32_t warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
  const bool is_leader = lane == 0;
  const float scale_log2 = exponent_scale(args.softmax_scale);
  // Row pieces are columns 0, 1 and 2 of a k step; a lane's columns are 2 (lane % 4) + {0, 1, 8, 9}.
  const uint32_t ones_low = lane % 4 == 0 ? 0x3F803F80 : lane % 4 == 1 ? 0x3F80 : 0;
  const uint32_t ones[4] = {ones_low, ones_low, 0, 0};
  const uint64_t desc_lse = ptx::wgmma_desc_rows16(ptx::smem_addr(smem.lse[0]));
  const uint64_t desc_delta = ptx::wgmma_desc_rows16(ptx::smem_addr(smem.minus_delta[0]));
  constexpr uint32_t kPiecesBytes = kBlockQ * sizeof(RowPieces);

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
      store_zero_gradients<C>(args, tile, group_idx);
      if (is_sent(args, tile)) count_sent_warp(args, is_leader);
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
      uint32_t reg_p[16];
      ptx::mbar_wait(&smem.q_full[step_pos.slot()], step_pos.parity());
      ptx::mbar_wait(&smem.k_full, num_kv & 1);
      ptx::wgmma_fence();
      start_from(acc_s, ones,
                 ptx::advance(desc_lse, step_pos.count % C::kLseStages * kPiecesBytes));
      gemm_depth_major<kBlockQ, C::kDim, C::kBlockK, kBlockQ, T>(
          acc_s, desc_k, ptx::advance(desc_q, step_pos.slot() * Sizes<C>::kQBytes), true);
      ptx::wgmma_commit();
      clear_sums();
      ptx::mbar_wait(&smem.v_full, num_kv & 1);
      const uint32_t flags = smem.info[step_pos.count % kNumInfo].flags;
      HiddenParts hidden = {};
      if (flags & kStepPartial) hidden = hidden_of_step<C>(smem, step_pos.count, flags);
      ptx::wgmma_wait<0>();
      ptx::wgmma_pin(acc_s);
      scores_to_p<C>(acc_s, smem, step_pos.count, flags, hidden, scale_log2);
      if (flags & kStepPartial) {
        clear_hidden_keys<C>(args, smem.kv + KvPlaces<C>::k(num_kv),
                             smem.kv + KvPlaces<C>::v(num_kv),
                             smem.bounds[flags & kStepBoundsSlot ? 1 : 0]);
        ptx::fence_proxy_async();
      }
      // The gradients of the tile before have left what they were staged in.
      if (num_kv > 0 && warp == 0 && is_leader) ptx::bulk_wait_read<0>();
      group_sync();  // also: dP reads cleared rows of V, and all have read the first lse
      if (num_kv > 0) release_staged();

      wait_for_dout<C>(smem, step_pos.count);

      const auto run_step = [&](auto is_last_constant) __attribute__((always_inline)) {
        constexpr bool is_last = decltype(is_last_constant)::value;
        const uint32_t slot = step_pos.slot(), dout_slot = step_pos.count % C::kDoutStages;
        // P is in acc_s, dO has come, and nothing is in flight.
        ptx::wgmma_fence();
        start_from(acc_dp, ones, ptx::advance(desc_delta, dout_slot * kPiecesBytes));
        gemm_depth_major<kBlockQ, C::kDimV, C::kBlockK, kBlockQ, T>(
            acc_dp, desc_v, ptx::advance(desc_dout, dout_slot * Sizes<C>::kDoutBytes), true);
        ptx::wgmma_commit();
#pragma unroll
        for (int idx = 0; idx < 16; ++idx) {
          reg_p[idx] = ptx::pack2<T>(acc_s[2 * idx], acc_s[2 * idx + 1]);
        }
        ptx::wgmma_fence();
        gemm_from_registers<C::kDimV, T>(
            acc_dv, reg_p,
            ptx::advance(desc_dout, kRowsAreDepth + dout_slot * Sizes<C>::kDoutBytes));
        ptx::wgmma_commit();
        if constexpr (!is_last) {
          RingPos<C::kQStages> next_pos = step_pos;
          ++next_pos.count;
          ptx::mbar_wait(&smem.q_full[next_pos.slot()], next_pos.parity());
        }
        ptx::wgmma_wait<1>();  // dP - delta
        ptx::wgmma_pin(acc_dp);
        if (is_last && ptx::arrives(is_leader)) ptx::mbar_arrive(&smem.v_empty);
        // dS^T goes to shared memory for dQ. Two buffers make one meeting a step enough: whoever stores step
        // i + 1 has met its partner at step i, after the partner's dQ of step i - 1 was complete.
        const uint32_t ds_buffer = step_pos.count & 1;
#pragma unroll
        for (int idx = 0; idx < 32; ++idx) acc_dp[idx] *= acc_s[idx];
        ptx::wgmma_pin(acc_dp);
#pragma unroll
        for (int k_step = 0; k_step < 4; ++k_step) {
          uint32_t chunk[4];
#pragma unroll
          for (int idx = 0; idx < 4; ++idx) {
            const int at = 8 * k_step + 2 * idx;
            chunk[idx] = ptx::pack2<T>(acc_dp[at], acc_dp[at + 1]);
          }
          ptx::stmatrix_x4((ds_address ^ (k_step * 32)) + ds_buffer * kDsBytes, chunk);
        }
        ptx::wgmma_pin(acc_dp);
        ptx::fence_proxy_async();
        ptx::named_barrier_sync(kStepBarrier, 256);
        ptx::wgmma_wait<0>();  // dV
        ptx::wgmma_pin(acc_dv);
        if (!is_last && ptx::arrives(is_leader)) ptx::mbar_arrive(&smem.dout_empty[dout_slot]);
        if constexpr (!is_last) {
          RingPos<C::kQStages> next_pos = step_pos;
          ++next_pos.count;
          ptx::wgmma_fence();
          start_from(acc_s, ones,
                     ptx::advance(desc_lse, next_pos.count % C::kLseStages * kPiecesBytes));
          gemm_depth_major<kBlockQ, C::kDim, C::kBlockK, kBlockQ, T>(
              acc_s, desc_k, ptx::advance(desc_q, next_pos.slot() * Sizes<C>::kQBytes), true);
          ptx::wgmma_commit();
        }
        // Packed once more, not kept: the registers of P are free only now.
        uint32_t reg_ds[16];
#pragma unroll
        for (int idx = 0; idx < 16; ++idx) {
          reg_ds[idx] = ptx::pack2<T>(acc_dp[2 * idx], acc_dp[2 * idx + 1]);
        }
        const uint32_t next_flags = is_last ? 0 : smem.info[(step_pos.count + 1) % kNumInfo].flags;
        ptx::wgmma_fence();
#pragma unroll
        for (int k_step = 0; k_step < C::kBlockK / 16; ++k_step) {
          ptx::Wgmma<kDqN, T, true, true>::ss(
              acc_dq, ptx::advance(desc_ds, ds_buffer * kDsBytes + k_step * 2048),
              ptx::advance(desc_k_dq, k_step * 2048), k_step != 0);
        }
        ptx::wgmma_commit();
        gemm_from_registers<C::kDim, T>(
            acc_dk, reg_ds, ptx::advance(desc_q, kRowsAreDepth + slot * Sizes<C>::kQBytes));
        ptx::wgmma_commit();
        HiddenParts next_hidden = {};  // worked out while S runs
        if (!is_last && next_flags & kStepPartial) {
          next_hidden = hidden_of_step<C>(smem, step_pos.count + 1, next_flags);
        }
        ptx::wgmma_wait<2>();  // the next S; dQ and dK stay in flight
        ptx::wgmma_pin(acc_s);
        if constexpr (is_last) {
          // Both warpgroups are through with dO, and with dS of the step before.
          ptx::named_barrier_sync(kStepBarrier, 256);
          if (tile.kv_sum_idx < 0) {
            store_gradient_tma<C, C::kDimV>(acc_dv, 1.f, smem.ds[ds_buffer ^ 1] + group_idx * 4096,
                                            smem.dout[dout_slot] + group_idx * 4096, &args.map_dv,
                                            tile, group_idx);
          }
          if (ptx::arrives(is_leader) && warp != 0) ptx::mbar_arrive(&smem.dout_empty[dout_slot]);
        } else {
          scores_to_p<C>(acc_s, smem, step_pos.count + 1, next_flags, next_hidden, scale_log2);
        }
        ptx::wgmma_wait<1>();  // dQ
        ptx::wgmma_pin(acc_dq);
        if (is_last && ptx::arrives(is_leader)) ptx::mbar_arrive(&smem.k_empty);
        stage_dq<C>(acc_dq, smem, step_pos.count);
        ++step_pos.count;
        if constexpr (!is_last) {
          // The sooner the better: the reduction reads the buffer for 1800 to 2000 cycles of a step.
          hand_over_dq(smem);
          wait_for_dout<C>(smem, step_pos.count);
          ptx::wgmma_wait<0>();  // dK
          ptx::wgmma_pin(acc_dk);
          if (ptx::arrives(is_leader)) ptx::mbar_arrive(&smem.q_empty[slot]);
        }
      };
      // The last step is a copy of its own: a conditional S would make ptxas serialize the products.
#pragma unroll 1
      for (int32_t step = 0; step + 1 < num_steps; ++step) run_step(std::false_type{});
      run_step(std::true_type{});
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
    finish_gradients<C>(args, tile, acc_dk, acc_dv, group_idx, is_leader);
    // Not yet read: the thread that stored still needs `tile`, but it has passed its read.
    __syncwarp();
    if (ptx::arrives(is_leader)) ptx::mbar_arrive(&smem.tile_empty[tile_pos.slot()]);
  }
  if (threadIdx.x % 128 == 0) ptx::bulk_wait<0>();
}

}  // namespace fm3::sm90_bwd
