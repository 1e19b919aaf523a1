// SPDX-License-Identifier: Apache-2.0
// Warps 2 and 3: a part of dQ is counted once it has been added; a sum with all its parts is converted to dq.
// dq.cuh has the layout of sums and why this is right.
#pragma once

#include "dq.cuh"

namespace fm3::sm90_bwd {

// Converts one piece (`kPiecePairs` block pairs of a unit, 32 columns) of a staged part at `source` in shared
// memory to dq. One warp.
template <class C>
__device__ __forceinline__ void convert_piece(const KernelArgs& args, const float* source,
                                              int32_t piece_idx, const DqEvent& event,
                                              const TilePair& rows) {
  using T = typename C::T;
  constexpr int kPairs = Sizes<C>::kPiecePairs;
  const int32_t lane = threadIdx.x % 32;
  const int32_t unit_idx = piece_idx / Sizes<C>::kUnitPieces;
  const int32_t piece = piece_idx % Sizes<C>::kUnitPieces;
  const int32_t d_begin =
      Sizes<C>::kSharesPanel
          ? (piece < 2 ? unit_idx / 4 * 64 + piece * 32 : 128 + unit_idx / 4 * 32)
          : (event.part_idx * 2 + unit_idx / 4) * Sizes<C>::kUnitBlocks * 8 + piece * (kPairs * 16);
  const int32_t q_idx = rows.first + unit_idx % 4 * 16 + lane / 4;
  T* const row = static_cast<T*>(args.dq) + event.b_idx * args.stride_dq.b +
                 event.h_q_idx * args.stride_dq.h + q_idx * args.stride_dq.s + d_begin;
  const float scale = args.softmax_scale;
#pragma unroll
  for (int pair = 0; pair < kPairs; ++pair) {
    const float4 left = reinterpret_cast<const float4*>(source)[2 * pair * 32 + lane];
    const float4 right = reinterpret_cast<const float4*>(source)[(2 * pair + 1) * 32 + lane];
    store_block_pair<T>(row, pair, ptx::pack2<T>(left.x * scale, left.y * scale),
                        ptx::pack2<T>(right.x * scale, right.y * scale), q_idx < rows.last,
                        args.shape.d_qk - d_begin);
    store_block_pair<T>(row + 8 * args.stride_dq.s, pair,
                        ptx::pack2<T>(left.z * scale, left.w * scale),
                        ptx::pack2<T>(right.z * scale, right.w * scale), q_idx + 8 < rows.last,
                        args.shape.d_qk - d_begin);
  }
}

// [16 rows, 64 columns] of a staged part, as two halves of 32 columns at `left` and `right`, to `out` as TMA
// takes it. One warp.
template <class C>
__device__ __forceinline__ void pack_tile(const float* left, const float* right, typename C::T* out,
                                          float scale) {
  using T = typename C::T;
  const uint32_t lane = threadIdx.x % 32, row = lane % 16;
  const uint32_t address = ptx::smem_addr(out) + row * 128 + ((lane / 16) ^ (row & 7)) * 16;
#pragma unroll
  for (int pair = 0; pair < 4; ++pair) {
    const float4* const own =
        reinterpret_cast<const float4*>(pair < 2 ? left : right) + pair % 2 * 64 + lane;
    const float4 x = own[0], y = own[32];
    const uint32_t r[4] = {
        ptx::pack2<T>(x.x * scale, x.y * scale), ptx::pack2<T>(x.z * scale, x.w * scale),
        ptx::pack2<T>(y.x * scale, y.y * scale), ptx::pack2<T>(y.z * scale, y.w * scale)};
    ptx::stmatrix_x4(address ^ (pair * 32), r);
  }
}

// Writes the first `num_rows` rows of a tile that pack_tile packed to dq, where TMA would write the others, too, which are the
// next row tile's. One warp.
template <class C>
__device__ __forceinline__ void store_rows(const KernelArgs& args, const typename C::T* packed,
                                           int32_t num_rows, int32_t q_begin, int32_t d_begin,
                                           const DqEvent& event) {
  using T = typename C::T;
  const int32_t lane = threadIdx.x % 32, d_idx = d_begin + lane % 8 * 8;
  T* const dq = static_cast<T*>(args.dq) + event.b_idx * args.stride_dq.b +
                event.h_q_idx * args.stride_dq.h + d_idx;
#pragma unroll 1
  for (int32_t row = lane / 8; row < num_rows && d_idx < args.shape.d_qk; row += 4) {
    *reinterpret_cast<uint4*>(dq + (q_begin + row) * args.stride_dq.s) =
        *reinterpret_cast<const uint4*>(packed + row * 64 + (lane % 8 ^ row % 8) * 8);
  }
}

// Warp 2. Counts each part once its reduction is complete, and lists the sums that are.
template <class C>
__device__ __forceinline__ void run_dq_counter(const KernelArgs& args, Smem<C>& smem) {
  const bool is_leader = threadIdx.x % 32 == 0;
  RingPos<kNumEvents> event_pos;
  for (;; ++event_pos.count) {
    ptx::mbar_wait(&smem.event_full[event_pos.slot()], event_pos.parity());
    const DqEvent event = smem.event[event_pos.slot()];
    int32_t* const count = args.ring_counts + event.ring_sum_idx;
    const bool is_in_order = event.num_visits < 0;
    // With release: a completed reduction is visible to the thread that waited for it, not yet to others. After
    // a relaxed count some 600 of 8.4 million parts changed places (32K causal, 32/4 heads, in a fixed order). The
    // writer has no time for the release (8K causal in a fixed order: 20 % more cycles), this warp has.
    if (is_leader && is_in_order) add_release(count, 1);  // first: the next in turn waits for it
    __syncwarp();
    if (ptx::arrives(is_leader)) ptx::mbar_arrive(&smem.event_empty[event_pos.slot()]);
    if (event.num_visits == kNoMoreEvents) return;
    if (event.num_visits == 1) {  // never in the ring: from where it is, and frees `dq`
      const int32_t buffer_idx = C::kDqBuffers > 1 ? event.ring_sum_idx : 0;
      const float* const staged = smem.dq + buffer_idx * Sizes<C>::kPartFloats;
      const TilePair rows = rows_of_tile(args, event.b_idx, event.q_tile_idx);
#pragma unroll 1
      for (int32_t piece = 0; piece < Sizes<C>::kPieces; ++piece) {
        convert_piece<C>(args, staged + piece * Sizes<C>::kPieceFloats, piece, event, rows);
      }
      __syncwarp();
      if (ptx::arrives(is_leader)) ptx::mbar_arrive(&smem.dq_empty[event.part_idx + buffer_idx]);
      continue;
    }
    bool is_last = event.num_visits == kLastInOrder;
    if (is_leader && !is_in_order) is_last = add_acq_rel(count, 1) == event.num_visits - 1;
    if (is_leader && is_last) {
      __threadfence();
      const int32_t row = (event.b_idx * args.shape.h_q + event.h_q_idx) * args.num_q_tiles;
      store_release(args.finished + add_relaxed(args.next_finished, 1),
                    (row + event.q_tile_idx) * C::kDqParts + event.part_idx + 1);
    }
    __syncwarp();
  }
}

// Zeros where blocks of a sum were, for the next head. The lane's own 16 bytes of each.
template <int kBlocks>
__device__ __forceinline__ void clear_blocks(float* gmem_blocks) {
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
    __stcg(reinterpret_cast<float4*>(gmem_blocks) + block * 32 + threadIdx.x % 32,
           make_float4(0.f, 0.f, 0.f, 0.f));
  }
}

// Converts a sum to dq, [16 rows, 64 columns] at a time: four buffers of dq_back hold two such tiles on their
// way here, the last one the result on its way to dq. Every instruction of this warp takes some ten
// cycles beside the products, so what counts is how few there are: 18,000 cycles a sum, where pieces of half the
// size that left by shuffles and 8-byte stores took 25,000 and held up windows.
template <class C>
__device__ __forceinline__ void convert_tiles(const KernelArgs& args, Smem<C>& smem,
                                              float* gmem_sum, const DqEvent& event,
                                              bool needs_zeros) {
  using T = typename C::T;
  using S = Sizes<C>;
  constexpr int kTileBytes = 16 * 64 * 4, kTiles = S::kPartFloats * 4 / kTileBytes;
  constexpr int kPartBytes = kTileBytes / S::kTileUnits;
  static_assert(kTiles % 4 == 0 && kBackBuffers == 5 && S::kPieceFloats * 8 == kTileBytes);
  static_assert(offsetof(Smem<C>, dq_back) % 1024 == 0, "TMA's swizzle goes by addresses");
  const bool is_leader = threadIdx.x % 32 == 0;
  const auto unit = [&](int32_t tile, int part) {  // of the tile's columns
    if constexpr (S::kSharesPanel) {
      return tile < 8 ? gmem_sum + tile * S::kUnitFloats + part * (kPartBytes / 4)
                      : gmem_sum + (tile - 8 + 4 * part) * S::kUnitFloats + 8 * 128;
    }
    return gmem_sum + (tile + 4 * part) * S::kUnitFloats;
  };
  const auto fetch = [&](int32_t tile) {
    Barrier* const full = &smem.dq_back_full[tile & 1];
    ptx::mbar_arrive_expect_tx(full, kTileBytes);
#pragma unroll
    for (int part = 0; part < S::kTileUnits; ++part) {
      ptx::bulk_load(smem.dq_back[2 * (tile & 1) + part], unit(tile, part), kPartBytes, full);
    }
  };
  if (is_leader) fetch(0), fetch(1);
  const TilePair rows = rows_of_tile(args, event.b_idx, event.q_tile_idx);
  // A copy of its own for short tiles: the others pay for nothing in the loop.
  const auto convert = [&](auto is_short_constant) __attribute__((always_inline)) {
    constexpr bool is_short = decltype(is_short_constant)::value;
#pragma unroll 1
    for (int32_t tile = 0; tile < kTiles; ++tile) {
      if (is_leader) ptx::bulk_wait_read<0>();  // the last result
      ptx::mbar_wait(&smem.dq_back_full[tile & 1], tile >> 1 & 1);
      __syncwarp();
      T* const out = reinterpret_cast<T*>(smem.dq_back[4]);
      pack_tile<C>(smem.dq_back[2 * (tile & 1)], smem.dq_back[2 * (tile & 1) + 1], out,
                   args.softmax_scale);
      ptx::fence_proxy_async();
      __syncwarp();
      const int32_t q_begin = rows.first + tile % 4 * 16;
      const int32_t d_begin = (event.part_idx * 2 + tile / 4) * 64;
      const bool by_tma = !is_short || q_begin + 16 <= rows.last;
      if (is_leader) {
        if (tile + 2 < kTiles) fetch(tile + 2);
        if (by_tma) {
          ptx::tma_store_4d(&args.map_dq, out, d_begin, q_begin, event.h_q_idx, event.b_idx);
          ptx::bulk_commit();
        }
      }
      if (!by_tma) store_rows<C>(args, out, rows.last - q_begin, q_begin, d_begin, event);
      if (needs_zeros) {
#pragma unroll
        for (int part = 0; part < S::kTileUnits; ++part) {
          clear_blocks<kPartBytes / 512>(unit(tile, part));
        }
      }
    }
  };
  // TMA drops what lies behind s_q, not what lies behind a short tile.
  if (rows.first + kBlockQ <= rows.last || rows.last == args.shape.s_q) {
    convert(std::false_type{});
  } else {
    convert(std::true_type{});
  }
}

// Warp 3. Converts finished sums in the order in which they were listed, whichever CTA's they are: who
// is last at a row is often last at the next ones too, and would be held up by converting them all.
template <class C>
__device__ __forceinline__ void run_dq_converter(const KernelArgs& args, Smem<C>& smem) {
  const int32_t lane = threadIdx.x % 32;
  const bool is_leader = lane == 0;
  int32_t num_sums = 0;
  for (int32_t idx = lane; idx < args.mask.b * args.mask.h_mask; idx += 32) {
    num_sums += args.lists.shared_rows[idx];
  }
  num_sums =
      __reduce_add_sync(kAllLanes, num_sums) * (args.shape.h_q / args.mask.h_mask) * C::kDqParts;
  const auto claim = [&]() { return is_leader ? add_relaxed(args.next_conversion, 1) : 0; };
  for (int32_t place = claim();;) {
    int32_t sum = 0;
    if (is_leader && place < num_sums) sum = wait_at_least(args.finished + place, 1);
    sum = __shfl_sync(kAllLanes, sum, 0) - 1;
    if (sum < 0) break;
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
    const bool leaves_zeros = !C::kSplitsColumns && args.leaves_zeros;
    const bool needs_zeros = leaves_zeros || !__ldg(&args.plan->is_in_order);
    convert_tiles<C>(args, smem, gmem_sum, event, needs_zeros);
    if (is_leader) args.ring_counts[event.ring_sum_idx] = 0;
    place = claim();  // its answer comes while the stores complete
    fence_proxy_async_all();
    __syncwarp();
    if (is_leader) {
      add_release(args.head_done + head_part(args, event.b_idx, event.h_q_idx), 1);
    }
  }
  if (is_leader) ptx::bulk_wait<0>();
}

}  // namespace fm3::sm90_bwd
