// SPDX-License-Identifier: Apache-2.0
// Which row tiles a key tile visits, as the pass before the kernel found them.
#pragma once

#include "config.cuh"

namespace fm3::sm90_bwd {

// Walks the visited row tiles of one key tile, 32 at a time: upwards, or downwards where the mask's key tiles
// are aligned at their last rows (`walks`). All lanes of a converged warp.
class RowWalk {
 public:
  __device__ RowWalk(const KernelArgs& args, int32_t mask_idx, int32_t k_tile_idx, bool is_in_order)
      : mask_idx_(mask_idx), k_tile_idx_(k_tile_idx), is_in_order_(is_in_order) {
    const int2 chunks = __ldg(reinterpret_cast<const int2*>(args.lists.step_chunks) + tile(args));
    is_down_ = __ldg(args.walks + mask_idx) == kWalkDownAligned;
    chunk_ = is_down_ ? chunks.y : chunks.x - 1;
    end_chunk_ = is_down_ ? chunks.x - 1 : chunks.y;
  }

  // Moves to the next visited row tile; false if there is none.
  __device__ bool next(const KernelArgs& args) {
    while (visible_ == 0) {
      chunk_ += is_down_ ? -1 : 1;
      if (chunk_ == end_chunk_) return false;
      const uint2 bits = __ldg(reinterpret_cast<const uint2*>(args.lists.step_bits) +
                               tile(args) * args.num_q_chunks + chunk_);
      visible_ = bits.x;
      partial_ = bits.y;
      own_visits_order_ = 0;
      const int32_t own_tile = chunk_ * 32 + threadIdx.x % 32;
      if (own_tile < args.num_q_tiles) {
        const int2 visits = __ldg(reinterpret_cast<const int2*>(args.lists.visits) +
                                  int64_t{mask_idx_} * args.num_q_tiles + own_tile);
        own_visits_order_ = visits.x;
        own_q_begin_ = visits.y;
        if (is_in_order_) own_visits_order_ |= turn(args, own_tile) << 16;
      }
    }
    bit_ = is_down_ ? 31 - __clz(visible_) : __ffs(visible_) - 1;
    visible_ ^= 1u << bit_;
    return true;
  }
  __device__ int32_t q_tile_idx() const { return chunk_ * 32 + bit_; }
  __device__ bool is_partial() const { return partial_ >> bit_ & 1; }
  __device__ uint32_t visits_order() const {
    return __shfl_sync(kAllLanes, own_visits_order_, bit_);
  }
  __device__ int32_t q_begin() const { return __shfl_sync(kAllLanes, own_q_begin_, bit_); }

 private:
  __device__ int64_t tile(const KernelArgs& args) const {
    return int64_t{mask_idx_} * args.num_k_tiles + k_tile_idx_;
  }

  // Of this key tile at a row tile that it visits. Rows are walked down where key tiles are added in the order of keys,
  // and from the last key on elsewhere (choose_order).
  __device__ uint32_t turn(const KernelArgs& args, int32_t q_tile_idx) const {
    const int64_t word = int64_t{mask_idx_} * args.lists.num_k_words + k_tile_idx_ / 32;
    const uint2 raw = __ldg(reinterpret_cast<const uint2*>(args.lists.visitors) +
                            word * args.num_q_tiles + q_tile_idx);
    const int32_t before = Visitors{raw.x, static_cast<int32_t>(raw.y)}.before_tile(k_tile_idx_);
    return is_down_ ? before : own_visits_order_ - 1 - before;
  }

  int32_t mask_idx_, k_tile_idx_;
  int32_t chunk_, end_chunk_, bit_ = 0;
  bool is_in_order_, is_down_;
  uint32_t visible_ = 0, partial_ = 0, own_visits_order_ = 0;
  int32_t own_q_begin_ = 0;
};

}  // namespace fm3::sm90_bwd
