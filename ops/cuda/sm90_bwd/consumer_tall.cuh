// SPDX-License-Identifier: Apache-2.0
// Warpgroups 1 and 2 for head dims 192/128: as in consumer.cuh each owns 64 of 128 keys of S, dP, dK and dV,
// and half of the columns of dQ. dK and dV take 160 registers a thread: dP comes in two halves of the rows, and
// the next S is issued when dQ has left its registers. Order of one step:
//     P = exp2(S scale), less lse already          while half of dK of the step before runs
//     issue dP of 32 rows | dS of them | issue dP of the others, dV | dS of these | issue the rest of dV | meet
//     issue dQ, half of dK | stage dQ, hand it over | issue the next S, the rest of dK
// Floors of a step, in cycles: 3,392 of the tensor cores, 4,220 of shared memory; it takes 4,630.
#pragma once

#include "consumer.cuh"

namespace fm3::sm90_bwd {

template <class C>
__device__ __forceinline__ void run_tall_consumer(const KernelArgs& args, Smem<C>& smem) {
  using T = typename C::T;
  constexpr int kDqN = C::kDim / 2;  // columns of dQ of one warpgroup
  constexpr uint32_t kPanelBytes = C::kBlockK * 128;
  // What depends on the thread is computed where it is used (read_thread): held over the loop, it is what
  // ptxas spills.
  const auto group = []() __attribute__((always_inline)) {
    return static_cast<int32_t>(read_thread() / 128) - 1;
  };
  const auto arrives = []() __attribute__((always_inline)) {
    return ptx::arrives(read_thread() % 32 == 0);
  };
  const float scale_log2 = exponent_scale(args.softmax_scale);
  // Row pieces are columns 0, 1 and 2 of a k step; a lane's columns are 2 (lane % 4) + {0, 1, 8, 9}.
  const auto start_rows = [](auto& acc, uint64_t desc_rows16) __attribute__((always_inline)) {
    const uint32_t quad_lane = read_thread() % 4;
    const uint32_t ones = quad_lane == 0 ? 0x3F803F80 : quad_lane == 1 ? 0x3F80 : 0;
    start_from(acc, {ones, ones, 0, 0}, desc_rows16);
  };
  const uint64_t desc_lse = ptx::wgmma_desc_rows16(ptx::smem_addr(smem.lse[0]));
  const uint64_t desc_delta = ptx::wgmma_desc_rows16(ptx::smem_addr(smem.minus_delta[0]));

  const uint32_t smem_k = ptx::smem_addr(smem.kv);
  const uint32_t smem_v = smem_k + KvPlaces<C>::kSecond * 2;
  // Columns of dQ: panel 0 or 1 and a half of panel 2.
  const auto desc_columns = [&](int32_t group_idx) __attribute__((always_inline)) {
    return ptx::wgmma_desc_mn(smem_k + group_idx * kPanelBytes,
                              2 * kPanelBytes - group_idx * (kPanelBytes - 64));
  };
  const uint64_t desc_q = ptx::wgmma_desc(ptx::smem_addr(smem.q[0]));
  const uint64_t desc_dout = ptx::wgmma_desc(ptx::smem_addr(smem.dout[0]));
  // The same tiles with rows as depth: only the field of the panels' distance differs.
  constexpr uint32_t kRowsAreDepth = ((kBlockQ * 128 >> 4) - 1) << 20;
  const uint64_t desc_ds = ptx::wgmma_desc_mn(ptx::smem_addr(smem.ds[0]), kPanelBytes);

  RingPos<2> tile_pos;
  RingPos<C::kQStages> step_pos;
  uint32_t num_kv = 0;
  float acc_dk[C::kDim / 2], acc_dv[C::kDimV / 2];

  for (;; ++tile_pos.count) {
    ptx::mbar_wait(&smem.tile_full[tile_pos.slot()], tile_pos.parity());
    const int32_t num_steps = smem.tile[tile_pos.slot()].num_steps;
    if (num_steps < 0) break;

    const TileInfo& tile = smem.tile[tile_pos.slot()];
    if (num_steps == 0 && tile.kv_sum_idx < 0) {
      store_zero_gradients<C>(args, tile, group());
      __syncwarp();
      if (arrives()) ptx::mbar_arrive(&smem.tile_empty[tile_pos.slot()]);
      continue;
    }
#pragma unroll
    for (int idx = 0; idx < C::kDim / 2; ++idx) acc_dk[idx] = 0.f;
#pragma unroll
    for (int idx = 0; idx < C::kDimV / 2; ++idx) acc_dv[idx] = 0.f;
    if (num_steps > 0) {
      float acc_s[32], acc_dp[16], acc_dq[kDqN / 2];
      // dP - delta of half the step's rows, which fit into the registers beside S.
      const auto issue_dp = [&](uint32_t dout_slot, int half) __attribute__((always_inline)) {
        ptx::wgmma_fence();
        start_rows(acc_dp,
                   ptx::advance(desc_delta, (dout_slot * kBlockQ + half * 32) * sizeof(RowPieces)));
        gemm_depth_major<32, C::kDimV, C::kBlockK, kBlockQ, T>(
            acc_dp, ptx::wgmma_desc(smem_v + group() * 64 * 128),
            ptx::advance(desc_dout, dout_slot * Sizes<C>::kDoutBytes + half * 32 * 128), true);
        ptx::wgmma_commit();
      };
      const auto issue_dk = [&](uint32_t slot, int half) __attribute__((always_inline)) {
        const uint64_t desc_ds_own =
            ptx::wgmma_desc(ptx::smem_addr(smem.ds[0]) + group() * 64 * kBlockQ * 2);
#pragma unroll
        for (int k_step = 2 * half; k_step < 2 * half + 2; ++k_step) {
          ptx::Wgmma<C::kDim, T, false, true>::ss(
              acc_dk, ptx::advance(desc_ds_own, k_step * 32),
              ptx::advance(desc_q, kRowsAreDepth + slot * Sizes<C>::kQBytes + k_step * 2048), 1);
        }
        ptx::wgmma_commit();
      };
      const auto wait_q = [&](const RingPos<C::kQStages>& pos) __attribute__((always_inline)) {
        ptx::mbar_wait(&smem.q_full[pos.slot()], pos.parity());
      };
      const auto issue_s = [&](const RingPos<C::kQStages>& pos) __attribute__((always_inline)) {
        ptx::wgmma_fence();
        start_rows(acc_s, ptx::advance(desc_lse, pos.slot() * kBlockQ * sizeof(RowPieces)));
        gemm_depth_major<kBlockQ, C::kDim, C::kBlockK, kBlockQ, T>(
            acc_s, ptx::wgmma_desc(smem_k + group() * 64 * 128),
            ptx::advance(desc_q, pos.slot() * Sizes<C>::kQBytes), true);
        ptx::wgmma_commit();
      };
      const auto wait_dout = [&](uint32_t count) __attribute__((always_inline)) {
        ptx::mbar_wait(&smem.dout_full[count % C::kDoutStages], count / C::kDoutStages & 1);
      };
      ptx::mbar_wait(&smem.k_full, num_kv & 1);
      wait_q(step_pos);
      issue_s(step_pos);
      ptx::mbar_wait(&smem.v_full, num_kv & 1);
      ptx::wgmma_wait<0>();
      ptx::wgmma_pin(acc_s);
      ++num_kv;

      const auto run_step = [&](bool is_first,
                                auto is_last_constant) __attribute__((always_inline)) {
        constexpr bool is_last = decltype(is_last_constant)::value;
        const uint32_t slot = step_pos.slot();
        const uint32_t dout_slot = step_pos.count % C::kDoutStages;

        // S - lse / scale is in acc_s. In flight: half of dK of the step before.
#pragma unroll
        for (int idx = 0; idx < 32; ++idx) acc_s[idx] = ptx::exp2_approx(acc_s[idx] * scale_log2);
        wait_dout(step_pos.count);
        issue_dp(dout_slot, 0);
        const uint32_t flags = smem.info[step_pos.count % kNumInfo].flags;
        uint32_t hidden = 0;
        if (flags & kStepPartial) {
          const int4* const bounds = smem.bounds[flags & kStepBoundsSlot ? 1 : 0];
          const uint32_t thread = read_thread();
          hidden = hidden_of_keys(bounds + (thread - 128) / 32 * 16 + thread % 32 / 4,
                                  smem.info[step_pos.count % kNumInfo].q_begin + 2 * (thread % 4));
          if (is_first) {
            clear_hidden_keys<C>(args, smem.kv, smem.kv + KvPlaces<C>::kSecond, bounds);
            ptx::fence_proxy_async();
          }
          const RowPieces* const lse = smem.lse[slot] + thread % 32;
          if (__any_sync(kAllLanes, is_hidden_row(lse[0]) || is_hidden_row(lse[32]))) {
            // The same answer in every consumer warp.
            clear_hidden_rows<C>(smem, step_pos.count);
            ptx::fence_proxy_async();
            ptx::named_barrier_sync(kStepBarrier, 256);
          }
        }
        ptx::wgmma_wait<0>();
        ptx::wgmma_pin(acc_dp);
        if (!is_first && arrives()) ptx::mbar_arrive(&smem.q_empty[slot ^ 1]);

        uint32_t reg_p[2][8];
        const auto convert_half = [&](int half) __attribute__((always_inline)) {
          uint32_t reg_ds[8];
#pragma unroll
          for (int idx = 0; idx < 8; ++idx) {
            const float x = acc_s[16 * half + 2 * idx], y = acc_s[16 * half + 2 * idx + 1];
            reg_p[half][idx] = ptx::pack2<T>(x, y);
            reg_ds[idx] = ptx::pack2<T>(x * acc_dp[2 * idx], y * acc_dp[2 * idx + 1]);
          }
          if (flags & kStepPartial) hide_packed(reg_p[half], reg_ds, hidden, half * 32);
          // Chunk 2 k + c of this lane's key row of dS^T is at this address ^ 32 k.
          const uint32_t thread = read_thread();
          const uint32_t ds_address = ptx::smem_addr(smem.ds[0]) +
                                      ((thread - 128) / 32 * 16 + thread % 16) * 128 +
                                      ((thread % 32 >> 4) ^ (thread & 7)) * 16;
#pragma unroll
          for (int idx = 0; idx < 2; ++idx) {
            const uint32_t r[4] = {reg_ds[4 * idx], reg_ds[4 * idx + 1], reg_ds[4 * idx + 2],
                                   reg_ds[4 * idx + 3]};
            ptx::stmatrix_x4(ds_address ^ ((2 * half + idx) * 32), r);
          }
        };
        const auto issue_dv = [&](int half) __attribute__((always_inline)) {
          ptx::wgmma_fence();
#pragma unroll
          for (int idx = 0; idx < 2; ++idx) {
            const uint32_t* a = reg_p[half] + 4 * idx;
            ptx::Wgmma<C::kDimV, T, false, true>::rs(
                acc_dv, a[0], a[1], a[2], a[3],
                ptx::advance(desc_dout, kRowsAreDepth + dout_slot * Sizes<C>::kDoutBytes +
                                            (2 * half + idx) * 2048),
                1);
          }
          ptx::wgmma_commit();
        };
        // The other warpgroup's dQ of the step before has read dS.
        if (step_pos.count > 0) ptx::named_barrier_sync(kDsFreeBarrier + 1 - group(), 256);
        convert_half(0);
        issue_dp(dout_slot, 1);
        issue_dv(0);
        ptx::wgmma_wait<1>();
        ptx::wgmma_pin(acc_dp);
        if (is_last && arrives()) ptx::mbar_arrive(&smem.v_empty);
        convert_half(1);
        issue_dv(1);
        ptx::fence_proxy_async();
        ptx::named_barrier_sync(kStepBarrier, 256);
        ptx::wgmma_wait<0>();  // dV
        if (arrives()) ptx::mbar_arrive(&smem.dout_empty[dout_slot]);

        const uint64_t desc_k_columns = desc_columns(group());
        ptx::wgmma_fence();
#pragma unroll
        for (int k_step = 0; k_step < C::kBlockK / 16; ++k_step) {
          ptx::Wgmma<kDqN, T, true, true>::ss(acc_dq, ptx::advance(desc_ds, k_step * 2048),
                                              ptx::advance(desc_k_columns, k_step * 2048),
                                              k_step != 0);
        }
        ptx::wgmma_commit();
        issue_dk(slot, 0);
        ptx::wgmma_wait<1>();  // dQ
        ptx::wgmma_pin(acc_dq);
        ptx::named_barrier_arrive(kDsFreeBarrier + group(), 256);
        if (is_last && arrives()) ptx::mbar_arrive(&smem.k_empty);
        stage_dq<C>(acc_dq, smem, step_pos.count);
        ++step_pos.count;
        // Before this dQ is handed over: the writer then looks up the turn of the next one (see dq.cuh).
        if constexpr (!is_last) wait_q(step_pos);
        hand_over_dq(smem);
        if constexpr (!is_last) {
          issue_s(step_pos);
          issue_dk(slot, 1);
          ptx::wgmma_wait<1>();  // S
          ptx::wgmma_pin(acc_s);
        } else {
          ptx::wgmma_fence();
          issue_dk(slot, 1);
          ptx::wgmma_wait<0>();
          if (arrives()) ptx::mbar_arrive(&smem.q_empty[slot]);
        }
      };
      // The last step is a copy of its own: a conditional S would make ptxas serialize the products.
#pragma unroll 1
      for (int32_t step = 0; step + 1 < num_steps; ++step) run_step(step == 0, std::false_type{});
      run_step(num_steps == 1, std::true_type{});
    }
    ptx::wgmma_pin(acc_dk);
    ptx::wgmma_pin(acc_dv);
    if (tile.kv_sum_idx < 0 || tile.kv_sum_idx == kShortTile ||
        sum_parts<C>(args, tile, acc_dk, acc_dv)) {
      store_gradient<C, C::kDimV>(acc_dv, 1.f, tile, group() * 64, args.dv, args.stride_dv, 0,
                                  args.shape.d_v);
      store_gradient<C, C::kDim>(acc_dk, args.softmax_scale, tile, group() * 64, args.dk,
                                 args.stride_dk, 0, args.shape.d_qk);
    }
    __syncwarp();
    if (arrives()) ptx::mbar_arrive(&smem.tile_empty[tile_pos.slot()]);
  }
  if (step_pos.count > 0) ptx::named_barrier_sync(kDsFreeBarrier + 1 - group(), 256);
}

}  // namespace fm3::sm90_bwd
