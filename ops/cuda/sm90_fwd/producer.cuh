// SPDX-License-Identifier: Apache-2.0
// Warpgroup 0: the loader warp claims query tiles and issues the copies; three mask warps turn the
// bounds of partial steps into row bits. Both read the same spans and run ahead of the consumers.
#pragma once

#include "config.cuh"
#include "remote_rows.cuh"

namespace fm3::sm90 {

constexpr uint32_t kAllLanes = 0xFFFFFFFF;

// Spans of one query tile, 32 at a time in the lanes of a warp.
class SpanReader {
 public:
  __device__ __forceinline__ SpanReader(const Span* spans, int32_t num_spans)
      : spans_(spans), num_spans_(num_spans), lane_(threadIdx.x % 32) {
    fetch(0);
  }
  __device__ __forceinline__ Span get(int32_t idx) {
    if (idx != 0 && idx % 32 == 0) fetch(idx);
    return {__shfl_sync(kAllLanes, packed_, idx % 32)};
  }

 private:
  __device__ __forceinline__ void fetch(int32_t base) {
    packed_ = base + lane_ < num_spans_ ? __ldg(&spans_[base + lane_].packed) : 0;
  }
  const Span* spans_;
  int32_t num_spans_, lane_;
  uint32_t packed_;
};

__device__ __forceinline__ int64_t mask_list(const FwdArgs& args, int32_t b_idx, int32_t h_idx) {
  return int64_t{b_idx} * args.mask.h_mask + mask_head(args, h_idx);
}

__device__ __forceinline__ const Span* tile_spans(const FwdArgs& args, int32_t b_idx, int32_t h_idx,
                                                  int32_t q_tile_idx) {
  const ScheduleView& schedule = args.schedule;
  return schedule.spans +
         (mask_list(args, b_idx, h_idx) * schedule.num_q_tiles + q_tile_idx) * schedule.max_spans;
}

// Work order: batch entries in turn; in each, groups of heads whose K/V fit the L2 together; in a
// group, tiles from the dearest to the cheapest, the heads of the group side by side.
template <class Config>
__device__ __forceinline__ typename Config::Tile decode_tile(const FwdArgs& args, int32_t tile) {
  if (tile >= args.num_tiles) return {0, 0, 0, 0};
  const int32_t num_q_tiles = args.schedule.num_q_tiles;
  const int32_t tiles_per_batch = args.h_q * num_q_tiles;
  const int32_t b_idx = tile / tiles_per_batch;
  int32_t rest = tile - b_idx * tiles_per_batch;
  const int32_t h_begin = rest / (args.heads_per_group * num_q_tiles) * args.heads_per_group;
  rest -= h_begin * num_q_tiles;
  const int32_t width = min(args.heads_per_group, args.h_q - h_begin);
  const int32_t rank = rest / width;
  const int32_t h_idx = h_begin + rest - rank * width;
  const QueryTileEntry entry =
      args.schedule.order[mask_list(args, b_idx, h_idx) * num_q_tiles + rank];
  return {entry.q_tile_idx, h_idx, b_idx, entry.num_spans};
}

// --- Loader: one warp ----------------------------------------------------------------------------
template <class Config>
class Loader {
  using Smem = typename Config::Smem;
  using Tile = typename Config::Tile;

 public:
  __device__ __forceinline__ Loader(const FwdArgs& args, Smem& smem)
      : args_(args), smem_(smem), is_issuer_(threadIdx.x % 32 == 0) {}

  // PPT: the next tile is claimed while the current one's copies are still being issued, so a CTA
  // asks for work at the pace it finishes it.
  __device__ __forceinline__ void run() {
    Tile tile = claim(static_cast<int32_t>(blockIdx.x));
    while (tile.num_spans > 0) {
      Tile next_tile{};
      bool has_next = false;
      int32_t num_steps = 0;
      SpanReader spans(tile_spans(args_, tile.b_idx, tile.h_idx, tile.q_tile_idx), tile.num_spans);
      for (int32_t span_idx = 0; span_idx < tile.num_spans; ++span_idx) {
        const Span span = spans.get(span_idx);
        const int32_t steps = span.count() * Config::kStepsPerItem;
        const bool is_last_span = span_idx == tile.num_spans - 1;
        for (int32_t step = 0; step < steps; ++step) {
          const int32_t flags = (num_steps == 0 ? Config::kFirst : 0) |
                                (is_last_span && step == steps - 1 ? Config::kLast : 0) |
                                (span.is_full() ? 0 : Config::kPartial);
          load_step(tile, span.k_begin() + step * Config::kCols, flags);
          if (++num_steps == 2) next_tile = claim_next(), has_next = true;
        }
      }
      tile = has_next ? next_tile : claim_next();
    }
    finish();
  }

 private:
  __device__ __forceinline__ Tile claim_next() {
    int32_t claimed = 0;
    if (is_issuer_) claimed = atomicAdd(args_.next_tile, 1);
    return claim(static_cast<int32_t>(gridDim.x) + __shfl_sync(kAllLanes, claimed, 0));
  }
  // Decodes the tile and hands it to the mask warps.
  __device__ __forceinline__ Tile claim(int32_t tile_id) {
    const Tile tile = decode_tile<Config>(args_, tile_id);
    ptx::mbar_wait_warp(&smem_.tile_empty[tile_pos_.slot], tile_pos_.parity ^ 1);
    if (is_issuer_) {
      smem_.tile[tile_pos_.slot] = tile;
      ptx::mbar_arrive(&smem_.tile_full[tile_pos_.slot]);
    }
    __syncwarp();
    tile_pos_.next();
    return tile;
  }

  // Copies are issued in the order the consumers need them: K of this step, V of the step before
  // (they multiply P V one step late), and the query tile after both, because its buffer is freed
  // last.
  __device__ __forceinline__ void load_step(const Tile& tile, int32_t k_begin, int32_t flags) {
    const int32_t h_kv_idx = tile.h_idx / (args_.h_q / args_.h_kv);
    const int32_t q_begin = tile.q_tile_idx * kTileQ;
    ptx::mbar_wait_warp(&smem_.k_empty[k_pos_.slot], k_pos_.parity ^ 1);
    if (args_.ready_rows != nullptr) wait_rows(args_, seen_rows_, k_begin + Config::kCols);
    if (is_issuer_) {
      smem_.step[k_pos_.slot] = {flags, q_begin, tile.h_idx, tile.b_idx};
      ptx::Barrier* barrier = &smem_.k_full[k_pos_.slot];
      ptx::mbar_arrive_expect_tx(barrier, Config::kBytesK);
#pragma unroll
      for (int panel = 0; panel < Config::kPanelsQk; ++panel) {
        ptx::tma_load_4d(smem_.k[k_pos_.slot] + panel * Config::kCols * 128, &args_.map_k, barrier,
                         panel * Config::kPanelCols, k_begin, h_kv_idx, tile.b_idx);
      }
    }
    __syncwarp();
    k_pos_.next();
    if (has_pending_v_) load_pending_v();
    pending_k_begin_ = k_begin, pending_h_idx_ = h_kv_idx, pending_b_idx_ = tile.b_idx;
    has_pending_v_ = true;
    if (flags & Config::kFirst) load_q(tile, q_begin);
  }

  __device__ __forceinline__ void load_q(const Tile& tile, int32_t q_begin) {
#pragma unroll
    for (int group = 0; group < Config::kNumConsumers; ++group) {
      ptx::mbar_wait_warp(&smem_.q_empty[group], q_parity_ ^ 1);
      if (is_issuer_) {
        ptx::mbar_arrive_expect_tx(&smem_.q_full[group], Config::kBytesQGroup);
#pragma unroll
        for (int panel = 0; panel < Config::kPanelsQk; ++panel) {
          ptx::tma_load_4d(smem_.q[group] + panel * Config::kRowsPerGroup * 128, &args_.map_q,
                           &smem_.q_full[group], panel * Config::kPanelCols,
                           q_begin + group * Config::kRowsPerGroup, tile.h_idx, tile.b_idx,
                           ptx::kEvictFirst);
        }
      }
      __syncwarp();
    }
    q_parity_ ^= 1;
  }

  __device__ __forceinline__ void load_pending_v() {
    ptx::mbar_wait_warp(&smem_.v_empty[v_pos_.slot], v_pos_.parity ^ 1);
    if (is_issuer_) {
      ptx::Barrier* barrier = &smem_.v_full[v_pos_.slot];
      ptx::mbar_arrive_expect_tx(barrier, Config::kBytesV);
#pragma unroll
      for (int panel = 0; panel < Config::kPanelsV; ++panel) {
        ptx::tma_load_4d(smem_.v[v_pos_.slot] + panel * Config::kCols * 128, &args_.map_v, barrier,
                         panel * Config::kPanelCols, pending_k_begin_, pending_h_idx_,
                         pending_b_idx_);
      }
    }
    __syncwarp();
    v_pos_.next();
  }

  __device__ __forceinline__ void finish() {
    ptx::mbar_wait_warp(&smem_.k_empty[k_pos_.slot], k_pos_.parity ^ 1);
    if (is_issuer_) {
      smem_.step[k_pos_.slot] = {Config::kEnd, 0, 0, 0};
      ptx::mbar_arrive(&smem_.k_full[k_pos_.slot]);
    }
    __syncwarp();
    if (has_pending_v_) load_pending_v();
  }

  const FwdArgs& args_;
  Smem& smem_;
  bool is_issuer_;
  RingPos<Config::kStages> k_pos_, v_pos_;
  RingPos<Config::kTileSlots> tile_pos_;
  uint32_t q_parity_ = 0;
  int32_t pending_k_begin_ = 0, pending_h_idx_ = 0, pending_b_idx_ = 0;
  bool has_pending_v_ = false;
  int32_t seen_rows_ = 0;  // key rows known to be in
};

// --- Mask warps ----------------------------------------------------------------------------------
// Bits [0, row) of a 32-bit word, for row clamped to [0, 32].
__device__ __forceinline__ uint32_t rows_below(int32_t row) {
  uint32_t at_or_above;
  asm("shl.b32 %0, %1, %2;" : "=r"(at_or_above) : "r"(0xFFFFFFFF), "r"(max(row, 0)));
  return ~at_or_above;
}

__device__ __forceinline__ uint32_t rows_of(const Interval& rows, int32_t first_row) {
  return rows_below(rows.end - first_row) & ~rows_below(rows.begin - first_row);
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
      if (lane_ == 0) ptx::mbar_arrive(&smem_.tile_empty[tile_pos.slot]);
      tile_pos.next();
      if (tile.num_spans == 0) return;
      make_tile(tile);
    }
  }

 private:
  __device__ __forceinline__ void make_tile(const Tile& tile) {
    const MaskView& mask = args_.mask;
    const int64_t list_idx = mask_list(args_, tile.b_idx, tile.h_idx);
    const int32_t* bounds = mask.bounds + list_idx * mask.s_k * num_bounds(mask.form);
    const int32_t* block_row =
        mask.block_mask == nullptr
            ? nullptr
            : mask.block_mask + (list_idx * args_.schedule.num_q_tiles + tile.q_tile_idx) *
                                    args_.schedule.num_hulls;
    SpanReader spans(tile_spans(args_, tile.b_idx, tile.h_idx, tile.q_tile_idx), tile.num_spans);
    for (int32_t span_idx = 0; span_idx < tile.num_spans; ++span_idx) {
      const Span span = spans.get(span_idx);
      if (span.is_full()) continue;
      for (int32_t step = 0; step < span.count() * Config::kStepsPerItem; ++step) {
        make_step(bounds, block_row, tile.q_tile_idx * kTileQ,
                  span.k_begin() + step * Config::kCols);
      }
    }
  }

  __device__ __forceinline__ void make_step(const int32_t* bounds, const int32_t* block_row,
                                            int32_t q_begin, int32_t k_begin) {
    ptx::mbar_wait_warp(&smem_.mask_empty[pos_.slot], pos_.parity ^ 1);
    for (int word = warp_idx_; word < Config::kMaskWords; word += Config::kMaskWarps) {
      const int32_t k_idx = k_begin + word * 32 + lane_;
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
    if (lane_ == 0) ptx::mbar_arrive(&smem_.mask_full[pos_.slot]);
    pos_.next();
  }

  const FwdArgs& args_;
  Smem& smem_;
  int warp_idx_, lane_;
  RingPos<Config::kMaskSlots> pos_;
};

}  // namespace fm3::sm90
