// SPDX-License-Identifier: Apache-2.0
// Warpgroups 1 and 2 for head dims 192 and 256: both see all 64 keys of the tile; each computes half of
// the rows of S and dP (P and dS meet in shared memory) and half of the columns of dK, dV and dQ.
// Order of one step, at whose beginning P and dS are in registers:
//     meet | store P, dS | meet | issue dV, dQ, dK, the next S
//     stage dQ while dK and S run, at 256 one of two parts | the next P, dP, dS | stage the other part
// dV comes first for what waits for dO longest: at 256 its one stage is loaded while dQ, dK and S run.
#pragma once

#include "consumer.cuh"

namespace fm3::sm90_bwd {

// A [64, kColumns] accumulator of one warpgroup, its columns being half of a tile's: of the first two panels of 64 one,
// and half of the other one or two.
template <int kColumns>
struct HalfAccumulator {
  static_assert(kColumns == 96 || kColumns == 128);
  static constexpr int kSecond = kColumns - 64;  // columns behind the first two panels
  float x[kColumns / 2];

  static __device__ __forceinline__ int32_t first_begin(int32_t half) {  // column of the tile
    return half * 64;
  }
  static __device__ __forceinline__ int32_t second_begin(int32_t half) {
    return 128 + half * kSecond;
  }
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int idx = 0; idx < kColumns / 2; ++idx) x[idx] = 0.f;
  }
  // (+)= A[64, 64] B[64, this half's columns]; B's 64 rows lie in panels at smem_b.
  template <class T, bool kTransA>
  __device__ __forceinline__ void product(uint64_t desc_a, uint32_t a_bytes, uint32_t smem_b,
                                          int32_t half, bool accumulates) {
    const auto place = [](int32_t column) { return column / 64 * (64 * 128) + column % 64 * 2; };
    const int32_t begin = place(first_begin(half));
    const uint64_t desc_b = ptx::wgmma_desc_mn(smem_b + begin, place(second_begin(half)) - begin);
#pragma unroll
    for (int k_step = 0; k_step < 4; ++k_step) {
      ptx::Wgmma<kColumns, T, kTransA, true>::ss(x, ptx::advance(desc_a, k_step * a_bytes),
                                                 ptx::advance(desc_b, k_step * 2048),
                                                 k_step != 0 || accumulates);
    }
  }
};

// Stages a part of dQ, of two: columns [0, 128) or the others. Each warpgroup has a panel of both.
template <class C>
__device__ __forceinline__ void stage_part(const float (&acc_dq)[C::kDim / 4], int part,
                                           Smem<C>& smem, uint32_t count) {
  // The buffer is free once the part before this one was taken: the second of the step before, or the first of
  // this one. (A barrier each: one alone would be two phases behind.)
  ptx::mbar_wait(&smem.dq_empty[1 - part], (count + part + 1) & 1);
  float4* const piece =
      reinterpret_cast<float4*>(smem.dq + (threadIdx.x - 128) / 32 * Sizes<C>::kUnitFloats) +
      threadIdx.x % 32;
#pragma unroll
  for (int block = 0; block < 8; ++block) {
    const float* x = acc_dq + 32 * part + 4 * block;
    piece[block * 32] = make_float4(x[0], x[1], x[2], x[3]);
  }
}

template <class C, int kColumns>
__device__ __forceinline__ void store_half(const HalfAccumulator<kColumns>& acc, float scale,
                                           const volatile TileInfo& tile, int32_t half, void* base,
                                           const Strides& stride, int32_t d) {
  using Half = HalfAccumulator<kColumns>;
  float first[32], second[Half::kSecond / 2];
#pragma unroll
  for (int idx = 0; idx < 32; ++idx) first[idx] = acc.x[idx];
#pragma unroll
  for (int idx = 0; idx < Half::kSecond / 2; ++idx) second[idx] = acc.x[32 + idx];
  store_gradient<C, 64>(first, scale, tile, 0, base, stride, Half::first_begin(half), d);
  store_gradient<C, Half::kSecond>(second, scale, tile, 0, base, stride, Half::second_begin(half),
                                   d);
}

template <class C>
__device__ __forceinline__ void run_wide_consumer(const KernelArgs& args, Smem<C>& smem) {
  using T = typename C::T;
  constexpr int kRows = kBlockQ / 2;  // of S and dP, for one warpgroup
  // What depends on the thread is computed where it is used (read_thread): held over the loop, it is what
  // ptxas spills.
  const auto get_half = []() __attribute__((always_inline)) {
    return static_cast<int32_t>(read_thread() / 128) - 1;
  };
  const auto arrives = []() __attribute__((always_inline)) {
    return ptx::arrives(read_thread() % 32 == 0);
  };
  // The first of the thread's rows in a step.
  const auto get_row = [&]() __attribute__((always_inline)) {
    return get_half() * kRows + 2 * static_cast<int32_t>(read_thread() % 4);
  };
  const float scale_log2 = args.softmax_scale * kLog2E;

  const uint32_t smem_k = ptx::smem_addr(smem.kv);
  const uint64_t desc_k = ptx::wgmma_desc(smem_k);
  const uint64_t desc_v = ptx::wgmma_desc(ptx::smem_addr(smem.kv + KvPlaces<C>::kSecond));
  const uint64_t desc_p = ptx::wgmma_desc(ptx::smem_addr(smem.p));
  const uint64_t desc_ds = ptx::wgmma_desc(ptx::smem_addr(smem.ds[0]));
  const uint64_t desc_ds_mn = ptx::wgmma_desc_mn(ptx::smem_addr(smem.ds[0]), C::kBlockK * 128);

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
      float acc_s[kRows / 2], acc_dp[kRows / 2];
      uint32_t reg_p[kRows / 4], reg_ds[kRows / 4];
      const auto issue_s = [&](uint32_t count) __attribute__((always_inline)) {
        const uint32_t slot = count % C::kQStages;
        ptx::mbar_wait(&smem.q_full[slot], count / C::kQStages & 1);
        ptx::wgmma_fence();
        gemm_depth_major<kRows, C::kDim, C::kBlockK, kBlockQ, T>(
            acc_s, desc_k,
            ptx::wgmma_desc(ptx::smem_addr(smem.q[slot]) + get_half() * (kRows * 128)), false);
        ptx::wgmma_commit();
      };
      // dP - delta.
      const auto issue_dp = [&](uint32_t count) __attribute__((always_inline)) {
        const uint32_t slot = count % C::kDoutStages;
        ptx::mbar_wait(&smem.dout_full[slot], count / C::kDoutStages & 1);
        const float* minus_delta = smem.minus_delta[slot] + get_row();
#pragma unroll
        for (int j = 0; j < kRows / 8; ++j) {
          const float2 row = *reinterpret_cast<const float2*>(minus_delta + 8 * j);
          acc_dp[4 * j] = acc_dp[4 * j + 2] = row.x;
          acc_dp[4 * j + 1] = acc_dp[4 * j + 3] = row.y;
        }
        ptx::wgmma_fence();
        gemm_depth_major<kRows, C::kDimV, C::kBlockK, kBlockQ, T>(
            acc_dp, desc_v,
            ptx::wgmma_desc(ptx::smem_addr(smem.dout[slot]) + get_half() * (kRows * 128)), true);
        ptx::wgmma_commit();
      };
      // P = exp2(S scale - lse) of all pairs, hidden ones too.
      const auto scores_to_p = [&](uint32_t count) __attribute__((always_inline)) {
        const uint32_t slot = count % C::kQStages;
        ptx::wgmma_pin(acc_s);
        const float* lse = smem.lse[slot] + get_row();
#pragma unroll
        for (int j = 0; j < kRows / 8; ++j) {
          const float2 row = *reinterpret_cast<const float2*>(lse + 8 * j);
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float* x = acc_s + 4 * j + 2 * i;
            x[0] = ptx::exp2_approx(fmaf(x[0], scale_log2, -row.x));
            x[1] = ptx::exp2_approx(fmaf(x[1], scale_log2, -row.y));
          }
        }
        // Never taken: it keeps the exponentials here, where dO may still be under way. ptxas would move them to
        // where they are used, behind dP.
        if (count == ~0u) {
#pragma unroll
          for (int idx = 0; idx < kRows / 2; ++idx) smem.dq[idx] = acc_s[idx];
        }
      };
      const auto make_ds = [&](uint32_t count, bool is_first) __attribute__((always_inline)) {
        ptx::wgmma_pin(acc_dp);
#pragma unroll
        for (int idx = 0; idx < kRows / 4; ++idx) {
          const float x = acc_s[2 * idx], y = acc_s[2 * idx + 1];
          reg_p[idx] = ptx::pack2<T>(x, y);
          reg_ds[idx] = ptx::pack2<T>(x * acc_dp[2 * idx], y * acc_dp[2 * idx + 1]);
        }
        const StepInfo& info = smem.info[count % kNumInfo];
        if (const uint32_t flags = info.flags; flags & kStepPartial) {
          const int4* bounds = smem.bounds[flags & kStepBoundsSlot ? 1 : 0];
          const uint32_t thread = read_thread();
          hide_packed(reg_p, reg_ds,
                      hidden_of_keys(bounds + thread % 128 / 32 * 16 + thread % 32 / 4,
                                     info.q_begin + get_row()),
                      0);
          clear_hidden_rows<C>(smem, count);
          if (is_first) {
            clear_hidden_keys<C>(args, smem.kv, smem.kv + KvPlaces<C>::kSecond, bounds);
            ptx::fence_proxy_async();
          }
        }
      };
      ptx::mbar_wait(&smem.k_full, num_kv & 1);
      issue_s(step_pos.count);
      ptx::mbar_wait(&smem.v_full, num_kv & 1);
      ++num_kv;
      issue_dp(step_pos.count);
      ptx::wgmma_wait<0>();
      scores_to_p(step_pos.count);
      make_ds(step_pos.count, true);

      const auto run_step = [&](auto is_last_constant) __attribute__((always_inline)) {
        constexpr bool is_last = decltype(is_last_constant)::value;
        const uint32_t slot = step_pos.slot(), dout_slot = step_pos.count % C::kDoutStages;

        if (is_last && arrives()) ptx::mbar_arrive(&smem.v_empty);
        // Both warpgroups are past the products that read the previous P and dS.
        ptx::named_barrier_sync(kStepBarrier, 256);
        // Chunk 2 k + c of this lane's key row, counted from this half's rows, is at this offset ^ 32 k.
        const uint32_t thread = read_thread();
        const uint32_t chunk = (thread / 128 - 1) * 4 + (thread % 32 >> 4);
        const uint32_t chunk_offset =
            (thread % 128 / 32 * 16 + thread % 16) * 128 + (chunk ^ (thread & 7)) * 16;
        const uint32_t p_address = ptx::smem_addr(smem.p) + chunk_offset;
        const uint32_t ds_address = ptx::smem_addr(smem.ds[0]) + chunk_offset;
#pragma unroll
        for (int k_step = 0; k_step < kRows / 16; ++k_step) {
          const uint32_t* p = reg_p + 4 * k_step;
          const uint32_t* ds = reg_ds + 4 * k_step;
          ptx::stmatrix_x4(p_address ^ (k_step * 32), {p[0], p[1], p[2], p[3]});
          ptx::stmatrix_x4(ds_address ^ (k_step * 32), {ds[0], ds[1], ds[2], ds[3]});
        }
        ptx::fence_proxy_async();
        ptx::named_barrier_sync(kStepBarrier, 256);

        HalfAccumulator<C::kDim / 2> acc_dq;
        const int32_t half = get_half();
        ptx::wgmma_fence();
        acc_dv.template product<T, false>(desc_p, 32, ptx::smem_addr(smem.dout[dout_slot]), half,
                                          true);
        ptx::wgmma_commit();
        acc_dq.template product<T, true>(desc_ds_mn, 2048, smem_k, half, false);
        ptx::wgmma_commit();
        acc_dk.template product<T, false>(desc_ds, 32, ptx::smem_addr(smem.q[slot]), half, true);
        ptx::wgmma_commit();
        const uint32_t next = step_pos.count + 1;
        if constexpr (!is_last) issue_s(next);
        ptx::wgmma_wait<is_last ? 2 : 3>();  // dV
        if (arrives()) ptx::mbar_arrive(&smem.dout_empty[dout_slot]);
        ptx::wgmma_wait<is_last ? 1 : 2>();  // dQ
        ptx::wgmma_pin(acc_dq.x);
        if (is_last && arrives()) ptx::mbar_arrive(&smem.k_empty);
        if constexpr (C::kDqParts == 1) {
          stage_dq<C>(acc_dq.x, smem, step_pos.count);
        } else {
          stage_part<C>(acc_dq.x, 0, smem, step_pos.count);
        }
        hand_over_dq(smem);
        ptx::wgmma_wait<0>();  // dK, S
        if (arrives()) ptx::mbar_arrive(&smem.q_empty[slot]);
        if constexpr (!is_last) {
          scores_to_p(next);
          issue_dp(next);
          ptx::wgmma_wait<0>();
          make_ds(next, false);
        }
        if constexpr (C::kDqParts == 2) {
          stage_part<C>(acc_dq.x, 1, smem, step_pos.count);
          hand_over_dq(smem);
        }
        ++step_pos.count;
      };
      // The last step is a copy of its own: a conditional S would make ptxas serialize the products.
#pragma unroll 1
      for (int32_t left = num_steps - 1; left > 0; --left) run_step(std::false_type{});
      run_step(std::true_type{});
    }
    ptx::wgmma_pin(acc_dk.x);
    ptx::wgmma_pin(acc_dv.x);
    const TileInfo& tile = smem.tile[tile_pos.slot()];
    store_half<C>(acc_dv, 1.f, tile, get_half(), args.dv, args.stride_dv, args.shape.d_v);
    store_half<C>(acc_dk, args.softmax_scale, tile, get_half(), args.dk, args.stride_dk,
                  args.shape.d_qk);
    __syncwarp();
    if (arrives()) ptx::mbar_arrive(&smem.tile_empty[tile_pos.slot()]);
  }
}

}  // namespace fm3::sm90_bwd
