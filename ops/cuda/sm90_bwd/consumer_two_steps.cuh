// SPDX-License-Identifier: Apache-2.0
// Warpgroups 1 and 2, the products, for d = 64, where one step's products are too short to hide what else a step takes. An
// iteration takes two steps of a walk, a and b: any two row tiles, of any heads of the group. Each warpgroup owns 64 of the
// 128 keys of S, dP, dK and dV, and all of dQ of one step: warpgroup 1 that of a, warpgroup 2 that of b.
//
//     issue dP_a, dV_a (P from registers)
//     dS_a = P_a dP_a, store                     while dV_a runs
//     issue S_b, dK_a (dS from registers)
//     P_b = exp2(S_b scale)                      while dK_a runs
//     issue dP_b, dV_b
//     dS_b = P_b dP_b, store                     while dV_b runs
//     issue S of the next a, dQ of a or b, dK_b
//     P of the next a                            while dQ and dK_b run
//     stage dQ and hand it over                  while dK_b runs
// An odd number of steps ends with one alone. S and dP have K and V in registers: half of what they read of shared memory.
//
// A warp that issues products stands still while three of its own are queued, so little of the above overlaps within a
// warpgroup; what does is the other warpgroup. So these do not meet.
//
// Claim:      whoever computes dQ of a step reads both halves of its dS, and no half is overwritten before it was read.
// Because:    warpgroup 2 signals its dS_a, warpgroup 1 its dS_b, and each waits for the other's before its dQ. A buffer is
//             stored to two iterations later. Warpgroup 1 has then seen dS_a of the iteration between, which warpgroup 2 stored
//             when its dQ before that was complete, and the other way round. No signal is missed, because none comes twice
//             before it is seen: warpgroup 1 signals after it has seen the other's of the same iteration, warpgroup 2's next
//             one comes after it has seen that.
// Breaks if:  warpgroup 1 signals before it waits, or dS has fewer than four buffers.
// Tested by:  test/unit/test_sm90_bwd_signals.py (every order of a model of both), test/gpu/test_sm90_bwd.py at d = 64
#pragma once

#include <type_traits>

#include "consumer.cuh"

namespace fm3::sm90_bwd {

// Stores [64 rows, 64 columns] of dQ, all of step `count`, where the writer takes it from.
template <class C>
__device__ __forceinline__ void stage_whole_dq(const float (&acc_dq)[C::kDim / 2], Smem<C>& smem,
                                               uint32_t count) {
  constexpr int kBlocks = Sizes<C>::kUnitBlocks, kUnit = Sizes<C>::kUnitFloats;
  RingPos<C::kDqBuffers> dq_pos;
  dq_pos.count = count;
  float* const units = smem.dq + dq_pos.slot() * Sizes<C>::kPartFloats;
  float4* const piece =
      reinterpret_cast<float4*>(units + threadIdx.x % 128 / 32 * kUnit) + threadIdx.x % 32;
  ptx::mbar_wait(&smem.dq_empty[dq_pos.slot()], dq_pos.write_parity());
#pragma unroll
  for (int block = 0; block < 2 * kBlocks; ++block) {
    const float* const x = acc_dq + 4 * block;
    piece[block / kBlocks * kUnit + block % kBlocks * 32] = make_float4(x[0], x[1], x[2], x[3]);
  }
}
// Each warp arrives for one of the other warpgroup, too.
template <class C>
__device__ __forceinline__ void hand_over_whole_dq(Smem<C>& smem, uint32_t count) {
  Barrier* const full = &smem.dq_full[count % C::kDqBuffers];
  ptx::fence_proxy_async();
  __syncwarp();
  ptx::mbar_arrive_if(ptx::arrives(threadIdx.x % 32 == 0), full);
  ptx::mbar_arrive_if(ptx::arrives(threadIdx.x % 32 == 0), full);
}

// dS^T = P^T dP^T of this warpgroup's keys: to shared memory for dQ, and packed for dK.
template <class T>
__device__ __forceinline__ void store_ds(const float (&p)[32], const float (&dp)[32],
                                         uint32_t address, uint32_t (&packed)[16]) {
#pragma unroll
  for (int k_step = 0; k_step < 4; ++k_step) {
    uint32_t chunk[4];
#pragma unroll
    for (int idx = 0; idx < 4; ++idx) {
      const int at = 8 * k_step + 2 * idx;
      chunk[idx] = packed[at / 2] = ptx::pack2<T>(dp[at] * p[at], dp[at + 1] * p[at + 1]);
    }
    ptx::stmatrix_x4(address ^ (k_step * 32), chunk);
  }
}

// [64 keys, 64] as operand A of a product, 16 keys a warp; `address` as for store_ds.
__device__ __forceinline__ void load_keys(uint32_t address, uint32_t (&keys)[16]) {
#pragma unroll
  for (int k_step = 0; k_step < 4; ++k_step) {
    uint32_t chunk[4];
    ptx::ldmatrix_x4(address ^ (k_step * 32), chunk);
#pragma unroll
    for (int idx = 0; idx < 4; ++idx) keys[4 * k_step + idx] = chunk[idx];
  }
}

// D[64 keys, 64 rows] = what the RowPieces of the rows add up to + keys rows^T.
template <class T>
__device__ __forceinline__ void issue_keys_by_rows(float (&d)[32], const uint32_t (&ones)[4],
                                                   uint64_t desc_pieces, const uint32_t (&keys)[16],
                                                   uint64_t desc_rows) {
  start_from(d, ones, desc_pieces);
#pragma unroll
  for (int k_step = 0; k_step < 4; ++k_step) {
    const uint32_t* const a = keys + 4 * k_step;
    ptx::Wgmma<64, T>::rs(d, a[0], a[1], a[2], a[3], ptx::advance(desc_rows, k_step * 32), 1);
  }
  ptx::wgmma_commit();
}

template <class C>
__device__ __forceinline__ void run_two_step_consumer(const KernelArgs& args, Smem<C>& smem,
                                                      const int32_t group_idx) {
  using T = typename C::T;
  static_assert(C::kDim == 64 && C::kDimV == 64, "registers are counted for these");
  constexpr uint32_t kTileBytes = Sizes<C>::kQBytes, kDsBytes = Sizes<C>::kDsBytes;
  constexpr uint32_t kPiecesBytes = kBlockQ * sizeof(RowPieces);
  const int32_t warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
  const bool is_leader = lane == 0, arrives = ptx::arrives(is_leader);
  const float scale_log2 = exponent_scale(args.softmax_scale);
  // As in consumer.cuh.
  const uint32_t ones_low = lane % 4 == 0 ? 0x3F803F80 : lane % 4 == 1 ? 0x3F80 : 0;
  const uint32_t ones[4] = {ones_low, ones_low, 0, 0};
  const uint64_t desc_lse = ptx::wgmma_desc_rows16(ptx::smem_addr(smem.lse[0]));
  const uint64_t desc_delta = ptx::wgmma_desc_rows16(ptx::smem_addr(smem.minus_delta[0]));
  const uint64_t desc_q = ptx::wgmma_desc(ptx::smem_addr(smem.q[0]));
  const uint64_t desc_dout = ptx::wgmma_desc(ptx::smem_addr(smem.dout[0]));
  constexpr uint32_t kRowsAreDepth = ((kBlockQ * 128 >> 4) - 1) << 20;
  const uint64_t desc_ds = ptx::wgmma_desc_mn(ptx::smem_addr(smem.ds[0]), C::kBlockK * 128);
  const uint32_t smem_kv = ptx::smem_addr(smem.kv);
  const uint64_t desc_columns = ptx::wgmma_desc_mn(smem_kv, C::kBlockK * 128);  // of K, for dQ

  // Where this lane's row of each 8x8 matrix of K, V or dS^T is: 16-byte chunk (lane >> 4) of a key's 128-byte
  // row, swizzled. Chunk 2 k + c of it is at this address ^ 32 k.
  const uint32_t key_bytes = (group_idx * 64 + warp * 16 + lane % 16) * 128;
  const uint32_t key_offset = key_bytes + ((lane >> 4) ^ (lane & 7)) * 16;
  const uint32_t ds_address = ptx::smem_addr(smem.ds[0]) + key_offset;

  RingPos<2> tile_pos;
  uint32_t count = 0;    // of steps
  uint32_t ds_pair = 0;  // of iterations, which take two buffers of dS in turns
  uint32_t num_kv = 0;
  float acc_dk[32], acc_dv[32];

  // Signals without branches: where one may diverge, ptxas has no uniform registers and serializes the products.
  const auto wait_for_q = [&](uint32_t step) __attribute__((always_inline)) {
    ptx::mbar_wait(&smem.q_full[step % C::kQStages], step / C::kQStages & 1);
  };
  const auto release_q = [&](uint32_t step) __attribute__((always_inline)) {
    ptx::mbar_arrive_if(arrives, &smem.q_empty[step % C::kQStages]);
  };
  const auto release_dout = [&](uint32_t step) __attribute__((always_inline)) {
    ptx::mbar_arrive_if(arrives, &smem.dout_empty[step % C::kDoutStages]);
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
      ptx::mbar_arrive_if(arrives, &smem.tile_empty[tile_pos.slot()]);
      continue;
    }
    const auto clear_sums = [&]() __attribute__((always_inline)) {
#pragma unroll
      for (int idx = 0; idx < 32; ++idx) acc_dk[idx] = acc_dv[idx] = 0.f;
    };
    if (num_steps > 0) {
      const uint32_t k_bytes = KvPlaces<C>::k(num_kv) * 2, v_bytes = KvPlaces<C>::v(num_kv) * 2;
      const uint64_t desc_k_dq = ptx::advance(desc_columns, k_bytes);
      float acc_s[32], acc_dp[32];  // scores, then P; dP - delta
      uint32_t reg_k[16], reg_v[16], reg_p[16];

      const auto issue_scores = [&](uint32_t step) __attribute__((always_inline)) {
        const uint32_t slot = step % C::kQStages;
        issue_keys_by_rows<T>(acc_s, ones, ptx::advance(desc_lse, slot * kPiecesBytes), reg_k,
                              ptx::advance(desc_q, slot * kTileBytes));
      };
      const auto add_dk = [&](const uint32_t (&ds)[16],
                              uint32_t step) __attribute__((always_inline)) {
        ptx::wgmma_fence();
        gemm_from_registers<C::kDim, T>(
            acc_dk, ds, ptx::advance(desc_q, kRowsAreDepth + step % C::kQStages * kTileBytes));
        ptx::wgmma_commit();
      };

      wait_for_q(count);
      ptx::mbar_wait(&smem.k_full, num_kv & 1);
      load_keys(smem_kv + k_bytes + key_offset, reg_k);
      ptx::wgmma_fence();
      issue_scores(count);
      clear_sums();
      ptx::mbar_wait(&smem.v_full, num_kv & 1);
      const uint32_t flags = smem.info[count % kNumInfo].flags;
      HiddenParts hidden = {};
      if (flags & kStepPartial) hidden = hidden_of_step<C>(smem, count, flags);
      ptx::wgmma_wait<0>();
      ptx::wgmma_pin(acc_s);
      scores_to_p<C>(acc_s, smem, count, flags, hidden, scale_log2);
      if (flags & kStepPartial) {
        __syncwarp();  // all lanes have loaded K; V is loaded cleared, and dQ reads K after a signal
        clear_hidden_keys<C>(args, smem.kv + KvPlaces<C>::k(num_kv),
                             smem.kv + KvPlaces<C>::v(num_kv),
                             smem.bounds[flags & kStepBoundsSlot ? 1 : 0]);
        ptx::fence_proxy_async();
        __syncwarp();
      }
      load_keys(smem_kv + v_bytes + key_offset, reg_v);
      __syncwarp();
      ptx::mbar_arrive_if(arrives, &smem.v_empty);
      // The gradients of the tile before have left the buffers that this tile's first dS goes to.
      if (num_kv > 0 && warp == 0 && is_leader) ptx::bulk_wait_read<0>();
      group_sync();
      wait_for_dout<C>(smem, count);

      // Steps a = count and, with has_b, a + 1.
      const auto run_steps = [&](auto has_b_constant,
                                 auto is_last_constant) __attribute__((always_inline)) {
        constexpr bool has_b = decltype(has_b_constant)::value;
        constexpr bool is_last = decltype(is_last_constant)::value;
        static_assert(has_b || is_last);
        const uint32_t a = count, next = has_b ? a + 2 : a + 1;
        const uint32_t ds_offset = (ds_pair & 1) * 2 * kDsBytes;
        uint32_t reg_ds[16];
        // P is in acc_s, dO has come, and nothing is in flight. Then dV is.
        const auto run_dp_and_ds = [&](uint32_t step,
                                       uint32_t offset) __attribute__((always_inline)) {
          const uint32_t slot = step % C::kDoutStages;
          const uint64_t desc = ptx::advance(desc_dout, slot * kTileBytes);
          ptx::wgmma_fence();
          issue_keys_by_rows<T>(acc_dp, ones, ptx::advance(desc_delta, slot * kPiecesBytes), reg_v,
                                desc);
#pragma unroll
          for (int idx = 0; idx < 16; ++idx) {
            reg_p[idx] = ptx::pack2<T>(acc_s[2 * idx], acc_s[2 * idx + 1]);
          }
          ptx::wgmma_fence();
          gemm_from_registers<C::kDimV, T>(acc_dv, reg_p, ptx::advance(desc, kRowsAreDepth));
          ptx::wgmma_commit();
          if (step + 1 != next || !is_last) wait_for_q(step + 1);
          ptx::wgmma_wait<1>();
          ptx::wgmma_pin(acc_dp);
          store_ds<T>(acc_s, acc_dp, ds_address + offset, reg_ds);
          ptx::fence_proxy_async();
        };
        const auto finish_dv = [&](uint32_t step) __attribute__((always_inline)) {
          ptx::wgmma_wait<0>();
          ptx::wgmma_pin(acc_dv);
          release_dout(step);
          ptx::wgmma_fence();
        };
        // S of `step` is in flight, and kPending products behind it.
        const auto turn_to_p = [&](uint32_t step,
                                   auto pending_constant) __attribute__((always_inline)) {
          const uint32_t step_flags = smem.info[step % kNumInfo].flags;
          HiddenParts step_hidden = {};
          if (step_flags & kStepPartial) step_hidden = hidden_of_step<C>(smem, step, step_flags);
          ptx::wgmma_wait<decltype(pending_constant)::value>();
          ptx::wgmma_pin(acc_s);
          scores_to_p<C>(acc_s, smem, step, step_flags, step_hidden, scale_log2);
        };

        run_dp_and_ds(a, ds_offset);
        __syncwarp();
        ptx::mbar_arrive_if(arrives && group_idx == 1, &smem.ds_full[0]);
        finish_dv(a);
        if constexpr (has_b) {
          issue_scores(a + 1);
          add_dk(reg_ds, a);
          turn_to_p(a + 1, std::integral_constant<int, 1>{});
          wait_for_dout<C>(smem, a + 1);
          ptx::wgmma_wait<0>();
          ptx::wgmma_pin(acc_dk);
          release_q(a);
          run_dp_and_ds(a + 1, ds_offset + kDsBytes);
        }
        ptx::mbar_wait(&smem.ds_full[group_idx], ds_pair & 1);
        __syncwarp();
        ptx::mbar_arrive_if(arrives && group_idx == 0, &smem.ds_full[1]);
        if constexpr (has_b) finish_dv(a + 1);

        if constexpr (!is_last) issue_scores(next);
        // Of a step alone, each warpgroup does half of the columns.
        constexpr int kDqN = has_b ? C::kDim : C::kDim / 2;
        const uint32_t ds_of_dq = ds_offset + (has_b ? group_idx * kDsBytes : 0);
        const uint32_t columns_of_dq = has_b ? 0 : group_idx * kDqN * 2;
        float acc_dq[kDqN / 2];
        if constexpr (!has_b) ptx::wgmma_fence();
#pragma unroll
        for (int k_step = 0; k_step < C::kBlockK / 16; ++k_step) {
          ptx::Wgmma<kDqN, T, true, true>::ss(
              acc_dq, ptx::advance(desc_ds, ds_of_dq + k_step * 2048),
              ptx::advance(desc_k_dq, columns_of_dq + k_step * 2048), k_step != 0);
        }
        ptx::wgmma_commit();
        add_dk(reg_ds, next - 1);
        if constexpr (!is_last) {
          turn_to_p(next, std::integral_constant<int, 2>{});
        } else if (tile.kv_sum_idx < 0) {
          // By way of a buffer of dS that the iteration before had: its dQ are complete, see above. dK takes the other.
          store_gradient_tma<C, C::kDimV>(acc_dv, 1.f,
                                          smem.ds[2 * (~ds_pair & 1)] + group_idx * 4096, nullptr,
                                          &args.map_dv, tile, group_idx);
        }
        ptx::wgmma_wait<1>();  // dQ
        ptx::wgmma_pin(acc_dq);
        if constexpr (is_last) ptx::mbar_arrive_if(arrives, &smem.k_empty);
        if constexpr (has_b) {
          stage_whole_dq<C>(acc_dq, smem, a + group_idx);
        } else {
          stage_dq<C>(acc_dq, smem, a);
        }
        if constexpr (!is_last) {
          hand_over_whole_dq(smem, a + group_idx);
          wait_for_dout<C>(smem, next);
        }
        ptx::wgmma_wait<0>();  // dK
        ptx::wgmma_pin(acc_dk);
        release_q(next - 1);
        count = next;
        if constexpr (!is_last) ++ds_pair;
      };
      int32_t steps_left = num_steps;
#pragma unroll 1
      for (; steps_left > 2; steps_left -= 2) run_steps(std::true_type{}, std::false_type{});
      if (steps_left == 2) {
        run_steps(std::true_type{}, std::true_type{});
      } else {
        run_steps(std::false_type{}, std::true_type{});
      }
      // The reduction of dQ comes after the stores, see consumer.cuh.
      if (tile.kv_sum_idx < 0) {
        store_gradient_tma<C, C::kDim>(acc_dk, args.softmax_scale,
                                       smem.ds[2 * (~ds_pair & 1) + 1] + group_idx * 4096, nullptr,
                                       &args.map_dk, tile, group_idx);
      }
      if (steps_left == 2) {
        hand_over_whole_dq(smem, count - 2 + group_idx);
      } else {
        hand_over_dq<C>(smem, count - 1);
      }
      ++ds_pair;
      ++num_kv;
    } else {
      clear_sums();  // a part without steps: others may have some
    }
    finish_gradients<C>(args, tile, acc_dk, acc_dv, group_idx, is_leader);
    // Not yet read: the thread that stored still needs `tile`, but it has passed its read.
    __syncwarp();
    ptx::mbar_arrive_if(arrives, &smem.tile_empty[tile_pos.slot()]);
  }
  if (threadIdx.x % 128 == 0) ptx::bulk_wait<0>();
}

}  // namespace fm3::sm90_bwd
