// SPDX-License-Identifier: Apache-2.0
// Which row tiles a key tile visits: the one walk that the counting pass and the loader share.
#pragma once

#include "config.cuh"
#include "steps.h"

namespace fm3::sm90_bwd {

constexpr uint32_t kAllLanes = 0xFFFFFFFF;

// Walks the visited row tiles of one key tile upwards, 32 at a time. All lanes of a converged warp.
class RowWalk {
 public:
  __device__ RowWalk(const KernelArgs& args, int32_t mask_idx, int32_t k_tile_idx, int32_t block_k)
      : mask_idx_(mask_idx), k_tile_idx_(k_tile_idx), block_k_(block_k) {
    (void)args;
  }

  // Moves to the next visited row tile; false if there is none.
  __device__ bool next(const KernelArgs& args) {
    while (visible_ == 0) {
      chunk_ += 32;
      if (chunk_ >= args.num_q_tiles) return false;
      const int32_t own_tile = chunk_ + threadIdx.x % 32;
      const StepClass step = classify_step(args.mask, args.hulls, args.num_hulls, mask_idx_,
                                           k_tile_idx_ * block_k_, block_k_, own_tile);
      visible_ = __ballot_sync(kAllLanes, step != StepClass::kSkip);
      partial_ = __ballot_sync(kAllLanes, step == StepClass::kPartial);
      if (visible_ == 0) continue;
      own_visits_order_ = 0;
      if (own_tile < args.num_q_tiles) {
        const int64_t row = static_cast<int64_t>(mask_idx_) * args.num_q_tiles + own_tile;
        own_visits_order_ = __ldg(args.visits + row);
        if (args.is_deterministic) {
          const int64_t tile = static_cast<int64_t>(mask_idx_) * args.num_k_tiles + k_tile_idx_;
          own_visits_order_ |=
              static_cast<uint32_t>(__ldg(args.turns + tile * args.num_q_tiles + own_tile)) << 16;
        }
      }
    }
    bit_ = __ffs(visible_) - 1;
    visible_ &= visible_ - 1;
    return true;
  }
  __device__ int32_t q_tile_idx() const { return chunk_ + bit_; }
  __device__ bool is_partial() const { return partial_ >> bit_ & 1; }
  __device__ uint32_t visits_order() const {
    return __shfl_sync(kAllLanes, own_visits_order_, bit_);
  }

 private:
  int32_t mask_idx_, k_tile_idx_, block_k_;
  int32_t chunk_ = -32, bit_ = 0;
  uint32_t visible_ = 0, partial_ = 0, own_visits_order_ = 0;
};

}  // namespace fm3::sm90_bwd
