// SPDX-License-Identifier: Apache-2.0
// Warps 1 to 3 of warpgroup 0: the bounds of a partial step become one bit a pair, ahead of the
// consumers.
#pragma once

#include "tile_lists.cuh"

namespace fm3::sm90 {

// Bits [0, row) of a 32-bit word, for row clamped to [0, 32].
__device__ __forceinline__ uint32_t rows_below(int32_t row) {
  uint32_t at_or_above;
  asm("shl.b32 %0, %1, %2;" : "=r"(at_or_above) : "r"(0xFFFFFFFF), "r"(max(row, 0)));
  return ~at_or_above;
}

__device__ __forceinline__ uint32_t rows_of(const Interval& rows, int32_t first_row) {
  return rows_below(rows.end - first_row) & ~rows_below(rows.begin - first_row);
}

// Column of a bit of a mask word: byte t holds those of a consumer's thread with lane t modulo 4, in the order
// of its accumulators, so that one instruction makes predicates of six of them.
__device__ __forceinline__ int mask_bit_column(int bit) {
  return bit % 8 / 2 * 8 + bit / 8 * 2 + bit % 2;
}

// 32 x 32 bits over the lanes of a warp: bit c of lane r <-> bit r of lane c.
__device__ __forceinline__ uint32_t transpose_bits(uint32_t bits, int lane) {
#pragma unroll
  for (int shift = 16; shift > 0; shift /= 2) {
    // Bit positions whose bit `shift` is 0.
    const uint32_t low = shift == 16  ? 0x0000FFFF
                         : shift == 8 ? 0x00FF00FF
                         : shift == 4 ? 0x0F0F0F0F
                         : shift == 2 ? 0x33333333
                                      : 0x55555555;
    const uint32_t other = __shfl_xor_sync(kAllLanes, bits, shift);
    const bool is_high = lane & shift;
    const uint32_t keep = is_high ? ~low : low;
    const uint32_t moved = __funnelshift_l(other, other, is_high ? 32 - shift : shift);
    bits = (bits & keep) | (moved & ~keep);
  }
  return bits;
}

template <class Config>
class MaskMaker {
  using Smem = typename Config::Smem;
  using Tile = typename Config::Tile;

 public:
  __device__ __forceinline__ MaskMaker(const FwdArgs& args, Smem& smem, int warp_idx)
      : args_(args), smem_(smem), warp_idx_(warp_idx), lane_(threadIdx.x % 32) {}

  __device__ __forceinline__ void run() {
    RingPos<Config::kTileSlots> tile_pos;
    while (true) {
      ptx::mbar_wait_warp(&smem_.tile_full[tile_pos.slot], tile_pos.parity);
      const Tile tile = smem_.tile[tile_pos.slot];
      __syncwarp();
      if (ptx::arrives(lane_ == 0)) ptx::mbar_arrive(&smem_.tile_empty[tile_pos.slot]);
      tile_pos.next();
      if (tile.list.num_spans() == 0) return;
      make_tile(tile);
    }
  }

 private:
  __device__ __forceinline__ void make_tile(const Tile& tile) {
    const MaskView& mask = args_.mask;
    const int64_t list_idx = mask_list(args_, tile.b_idx, tile.h_idx);
    const int32_t* bounds = mask.bounds + list_idx * mask.s_k * num_bounds(mask.form);
    const int32_t num_q_tiles = args_.schedule.num_q_tiles;  // a pair's second tile may lack rows
    const int32_t* block_row =
        mask.block_mask == nullptr
            ? nullptr
            : mask.block_mask + (list_idx * num_q_tiles + min(tile.q_tile_idx, num_q_tiles - 1)) *
                                    args_.schedule.num_hulls;
    const Span* spans = tile_spans<Config>(args_, tile);
    uint32_t packed = 0;
    for (int32_t span_idx = 0; span_idx < tile.list.num_spans(); ++span_idx) {
      if (span_idx % 32 == 0) packed = fetch_spans(spans, tile.list.num_spans(), span_idx);
      const Span span = {__shfl_sync(kAllLanes, packed, span_idx % 32)};
      if (span.is_full()) continue;
      for (int32_t step = 0; step < steps_of<Config>(span); ++step) {
        make_step(bounds, block_row, tile.q_begin(), Config::rows_of_bits(tile.step_bits),
                  span.k_begin() + tile.list.shift() + step * Config::kCols);
      }
    }
  }

  __device__ __forceinline__ void make_step(const int32_t* bounds, const int32_t* block_row,
                                            int32_t q_begin, int32_t num_rows, int32_t k_begin) {
    ptx::mbar_wait_warp(&smem_.mask_empty[pos_.slot], pos_.parity ^ 1);
    for (int word = warp_idx_; word < Config::kMaskWords; word += Config::kMaskWarps) {
      const int32_t k_idx = k_begin + word * 32 + mask_bit_column(lane_);
      uint32_t visible[kTileQ / 32];  // of column k_idx: bit r of [i] is row 32 i + r
      const bool is_column =
          k_idx < args_.mask.s_k &&
          !(block_row != nullptr && __ldg(&block_row[k_idx / kBlockMaskTile]) == 0);
      if (is_column) {
        const HiddenRows rows = hidden_rows(args_.mask, bounds, k_idx);
#pragma unroll
        for (int idx = 0; idx < kTileQ / 32; ++idx) {
          const int32_t first_row = q_begin + 32 * idx;
          visible[idx] = ~(rows_of(rows.lt, first_row) | rows_of(rows.ut, first_row) |
                           rows_below(rows.causal.end - first_row));
          // Rows behind a short tile see all: one that has seen nothing makes its warp search for a maximum.
          if (Config::kIsCut) visible[idx] |= ~rows_below(num_rows - 32 * idx);
        }
      } else {
#pragma unroll
        for (int idx = 0; idx < kTileQ / 32; ++idx) visible[idx] = 0;
      }
      __syncwarp();
#pragma unroll
      for (int idx = 0; idx < kTileQ / 32; ++idx) {
        smem_.mask_bits[pos_.slot][32 * idx + lane_][word] = transpose_bits(visible[idx], lane_);
      }
    }
    __syncwarp();
    if (ptx::arrives(lane_ == 0)) ptx::mbar_arrive(&smem_.mask_full[pos_.slot]);
    pos_.next();
  }

  const FwdArgs& args_;
  Smem& smem_;
  int warp_idx_, lane_;
  RingPos<Config::kMaskSlots> pos_;
};

}  // namespace fm3::sm90
