// SPDX-License-Identifier: Apache-2.0
// Warpgroups 1 and 2 for head dims above 128: both see all 64 keys of the tile; each computes half of
// the rows of S and dP (P and dS meet in shared memory) and half of the columns of dK, dV and dQ.
#pragma once

#include "consumer.cuh"

namespace fm3::sm90_bwd {

// A [64, kColumns] accumulator of one warpgroup, its columns being one half of a tile's. A half that
// does not end on a panel of 64 columns is computed as a panel and a rest; the rest is inside the
// panel the halves share, so it is last in the first half and first in the second.
template <int kColumns>
struct HalfAccumulator {
  static constexpr int kRest = kColumns % 64;
  static constexpr int kMain = kColumns - kRest;
  static_assert(kMain > 0 && (kRest == 0 || kRest == 32));
  float main[kMain / 2];
  float rest[kRest > 0 ? kRest / 2 : 1];

  static __device__ __forceinline__ int32_t main_begin(int32_t half) {  // column of the tile
    return half * (kColumns + kRest);
  }
  static __device__ __forceinline__ int32_t rest_begin(int32_t half) {
    return half == 0 ? kMain : kColumns;
  }
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int idx = 0; idx < kMain / 2; ++idx) main[idx] = 0.f;
#pragma unroll
    for (int idx = 0; idx < kRest / 2; ++idx) rest[idx] = 0.f;
  }
  __device__ __forceinline__ void pin() {
    ptx::wgmma_pin(main);
    ptx::wgmma_pin(rest);
  }
  // (+)= A[64, 64] B[64, this half's columns]; B's 64 rows lie in panels of `b_rows` rows at smem_b.
  template <class T, bool kTransA>
  __device__ __forceinline__ void product(uint64_t desc_a, uint32_t a_bytes, uint32_t smem_b,
                                          int32_t half, bool accumulates) {
    const int32_t begin = main_begin(half);
    const uint64_t desc_main = ptx::wgmma_desc_mn(smem_b + begin / 64 * (64 * 128), 64 * 128);
#pragma unroll
    for (int k_step = 0; k_step < 4; ++k_step) {
      ptx::Wgmma<kMain, T, kTransA, true>::ss(main, ptx::advance(desc_a, k_step * a_bytes),
                                              ptx::advance(desc_main, k_step * 2048),
                                              k_step != 0 || accumulates);
    }
    if constexpr (kRest > 0) {
      const int32_t rest_column = rest_begin(half);
      const uint64_t desc_rest = ptx::wgmma_desc_mn(
          smem_b + rest_column / 64 * (64 * 128) + rest_column % 64 * 2, 64 * 128);
#pragma unroll
      for (int k_step = 0; k_step < 4; ++k_step) {
        ptx::Wgmma<kRest, T, kTransA, true>::ss(rest, ptx::advance(desc_a, k_step * a_bytes),
                                                ptx::advance(desc_rest, k_step * 2048),
                                                k_step != 0 || accumulates);
      }
    }
  }
};

// Stages this half of dQ in the order of dq.cuh.
template <class C, int kColumns>
__device__ __forceinline__ void stage_half(const HalfAccumulator<kColumns>& acc, float* staged,
                                           int32_t half) {
  constexpr int kUnitBlocks = Sizes<C>::kUnitBlocks;
  const int32_t warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
  float4* const pieces = reinterpret_cast<float4*>(staged) + lane;
  const auto store = [&](int32_t block, const float* x) {
    pieces[((block / kUnitBlocks * 4 + warp) * kUnitBlocks + block % kUnitBlocks) * 32] =
        make_float4(x[0], x[1], x[2], x[3]);
  };
  using Half = HalfAccumulator<kColumns>;
  const int32_t main_block = (Half::main_begin(half) - half * kColumns) / 8;
#pragma unroll
  for (int block = 0; block < Half::kMain / 8; ++block)
    store(main_block + block, acc.main + 4 * block);
  if constexpr (Half::kRest > 0) {
    const int32_t rest_block = (Half::rest_begin(half) - half * kColumns) / 8;
#pragma unroll
    for (int block = 0; block < Half::kRest / 8; ++block) {
      store(rest_block + block, acc.rest + 4 * block);
    }
  }
}

template <class C, int kColumns>
__device__ __forceinline__ void store_half(const HalfAccumulator<kColumns>& acc, float scale,
                                           const volatile TileInfo& tile, int32_t half, void* base,
                                           const Strides& stride, int32_t s_k, int32_t d) {
  using Half = HalfAccumulator<kColumns>;
  store_gradient<C, Half::kMain>(acc.main, scale, tile, 0, base, stride, s_k,
                                 Half::main_begin(half), d);
  if constexpr (Half::kRest > 0) {
    store_gradient<C, Half::kRest>(acc.rest, scale, tile, 0, base, stride, s_k,
                                   Half::rest_begin(half), d);
  }
}

template <class C>
__device__ __forceinline__ void run_wide_consumer(const KernelArgs& args, Smem<C>& smem,
                                                  const int32_t half) {
  using T = typename C::T;
  constexpr int kRows = kBlockQ / 2;  // of S and dP, for one warpgroup
  const int32_t warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
  const bool arrives = ptx::arrives(lane == 0);
  const float scale_log2 = args.softmax_scale * kLog2E;

  const uint32_t smem_k = ptx::smem_addr(smem.kv);
  const uint64_t desc_k = ptx::wgmma_desc(smem_k);
  const uint64_t desc_v = ptx::wgmma_desc(ptx::smem_addr(smem.kv + KvPlaces<C>::kSecond));
  const uint32_t half_rows_bytes = half * kRows * 128;
  const uint64_t desc_p = ptx::wgmma_desc(ptx::smem_addr(smem.p));
  const uint64_t desc_ds = ptx::wgmma_desc(ptx::smem_addr(smem.ds[0]));
  const uint64_t desc_ds_mn = ptx::wgmma_desc_mn(ptx::smem_addr(smem.ds[0]), C::kBlockK * 128);
  // Chunk 2 k + c of this lane's key row, counted from this half's rows, is at this offset ^ 32 k.
  const uint32_t chunk_offset =
      (warp * 16 + lane % 16) * 128 + ((half * 4 + (lane >> 4)) ^ (lane & 7)) * 16;
  const uint32_t p_address = ptx::smem_addr(smem.p) + chunk_offset;
  const uint32_t ds_address = ptx::smem_addr(smem.ds[0]) + chunk_offset;

  RingPos<2> tile_pos;
  RingPos<C::kQStages> step_pos;
  uint32_t num_kv = 0;
  HalfAccumulator<C::kDim / 2> acc_dk;
  HalfAccumulator<C::kDimV / 2> acc_dv;

  for (;; ++tile_pos.count) {
    ptx::mbar_wait(&smem.tile_full[tile_pos.slot()], tile_pos.parity());
    const int32_t num_steps = smem.tile[tile_pos.slot()].num_steps;
    if (num_steps < 0) return;
    acc_dk.clear();
    acc_dv.clear();
    if (num_steps > 0) {
      ptx::mbar_wait(&smem.k_full, num_kv & 1);
      ptx::mbar_wait(&smem.v_full, num_kv & 1);
      ++num_kv;
    }
#pragma unroll 1
    for (int32_t step = 0; step < num_steps; ++step) {
      const uint32_t slot = step_pos.slot();
      RingPos<C::kDoutStages> dout_pos;
      dout_pos.count = step_pos.count;
      const uint32_t dout_slot = dout_pos.slot();
      float acc_s[kRows / 2], acc_dp[kRows / 2];
      ptx::mbar_wait(&smem.q_full[slot], step_pos.parity());
      ptx::wgmma_fence();
      gemm_depth_major<kRows, C::kDim, C::kBlockK, kBlockQ, T>(
          acc_s, desc_k, ptx::wgmma_desc(ptx::smem_addr(smem.q[slot]) + half_rows_bytes), false);
      ptx::wgmma_commit();
      ptx::mbar_wait(&smem.dout_full[dout_slot], dout_pos.parity());
      gemm_depth_major<kRows, C::kDimV, C::kBlockK, kBlockQ, T>(
          acc_dp, desc_v, ptx::wgmma_desc(ptx::smem_addr(smem.dout[dout_slot]) + half_rows_bytes),
          false);
      ptx::wgmma_commit();
      ptx::wgmma_wait<1>();
      ptx::wgmma_pin(acc_s);

      const StepInfo& info = smem.info[step_pos.count % kNumInfo];
      const int32_t row_first = half * kRows + 2 * (lane % 4);
#pragma unroll
      for (int j = 0; j < kRows / 8; ++j) {
        const float2 row = *reinterpret_cast<const float2*>(smem.lse[slot] + row_first + 8 * j);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          acc_s[4 * j + 2 * i] = fmaf(acc_s[4 * j + 2 * i], scale_log2, -row.x);
          acc_s[4 * j + 2 * i + 1] = fmaf(acc_s[4 * j + 2 * i + 1], scale_log2, -row.y);
        }
      }
      if (info.flags & kStepPartial) {
        hide<kRows / 8>(acc_s,
                        smem.bounds[info.flags & kStepBoundsSlot ? 1 : 0] + warp * 16 + lane / 4,
                        info.q_tile_idx * kBlockQ + row_first, args.shape.s_q);
        clear_hidden_rows<C>(smem, step_pos.count);
        if (step == 0) {
          clear_hidden_keys<C>(args, smem.kv, smem.kv + KvPlaces<C>::kSecond,
                               smem.bounds[info.flags & kStepBoundsSlot ? 1 : 0]);
        }
      }
#pragma unroll
      for (int idx = 0; idx < kRows / 2; ++idx) acc_s[idx] = ptx::exp2_approx(acc_s[idx]);
      ptx::wgmma_wait<0>();
      ptx::wgmma_pin(acc_dp);
      if (info.flags & kStepPartial) {
#pragma unroll
        for (int j = 0; j < kRows / 8; ++j) {
          const float2 row =
              *reinterpret_cast<const float2*>(smem.minus_delta[dout_slot] + row_first + 8 * j);
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            // So that dP - delta is 0.
            if (acc_s[4 * j + 2 * i] == 0.f) acc_dp[4 * j + 2 * i] = -row.x;
            if (acc_s[4 * j + 2 * i + 1] == 0.f) acc_dp[4 * j + 2 * i + 1] = -row.y;
          }
        }
      }
      // Both warpgroups are past the products that read the previous P and dS.
      ptx::named_barrier_sync(kStepBarrier, 256);
#pragma unroll
      for (int k_step = 0; k_step < kRows / 16; ++k_step) {
        uint32_t reg_p[4], reg_ds[4];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const float2 row = *reinterpret_cast<const float2*>(smem.minus_delta[dout_slot] +
                                                              row_first + 16 * k_step + 8 * j);
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int idx = 8 * k_step + 4 * j + 2 * i;
            reg_p[2 * j + i] = ptx::pack2<T>(acc_s[idx], acc_s[idx + 1]);
            reg_ds[2 * j + i] = ptx::pack2<T>(acc_s[idx] * (acc_dp[idx] + row.x),
                                              acc_s[idx + 1] * (acc_dp[idx + 1] + row.y));
          }
        }
        ptx::stmatrix_x4(p_address ^ (k_step * 32), reg_p);
        ptx::stmatrix_x4(ds_address ^ (k_step * 32), reg_ds);
      }
      ptx::fence_proxy_async();
      ptx::named_barrier_sync(kStepBarrier, 256);

      HalfAccumulator<C::kDim / 2> acc_dq;
      ptx::wgmma_fence();
      acc_dq.template product<T, true>(desc_ds_mn, 2048, smem_k, half, false);
      ptx::wgmma_commit();
      acc_dv.template product<T, false>(desc_p, 32, ptx::smem_addr(smem.dout[dout_slot]), half,
                                        true);
      ptx::wgmma_commit();
      acc_dk.template product<T, false>(desc_ds, 32, ptx::smem_addr(smem.q[slot]), half, true);
      ptx::wgmma_commit();
      ptx::wgmma_wait<2>();  // dQ
      acc_dq.pin();
      // The buffer is free once the part before this one was taken: the first half's of this step, or
      // the second's of the step before. (A barrier each: one alone would be two phases behind.)
      ptx::mbar_wait(&smem.dq_empty[1 - half], (step_pos.count + half + 1) & 1);
      stage_half<C>(acc_dq, smem.dq, half);
      ptx::fence_proxy_async();
      __syncwarp();
      if (arrives) ptx::mbar_arrive(&smem.dq_full);
      ptx::wgmma_wait<1>();  // dV
      if (arrives) ptx::mbar_arrive(&smem.dout_empty[dout_slot]);
      ptx::wgmma_wait<0>();  // dK
      if (arrives) ptx::mbar_arrive(&smem.q_empty[slot]);
      ++step_pos.count;
    }
    acc_dk.pin();
    acc_dv.pin();
    if (num_steps > 0 && arrives) {
      ptx::mbar_arrive(&smem.k_empty);
      ptx::mbar_arrive(&smem.v_empty);
    }

    const TileInfo& tile = smem.tile[tile_pos.slot()];
    store_half<C>(acc_dv, 1.f, tile, half, args.dv, args.stride_dv, args.shape.s_k, args.shape.d_v);
    store_half<C>(acc_dk, args.softmax_scale, tile, half, args.dk, args.stride_dk, args.shape.s_k,
                  args.shape.d_qk);
    __syncwarp();
    if (arrives) ptx::mbar_arrive(&smem.tile_empty[tile_pos.slot()]);
  }
}

}  // namespace fm3::sm90_bwd
