// SPDX-License-Identifier: Apache-2.0
// What no pair shows may hold anything, NaN and infinities too: hidden pairs have P = 0 exactly, and these
// keep 0 times what they hold from becoming NaN. Only partial steps have hidden pairs.
//
// A row or a key that is hidden here but not everywhere keeps its numbers: it shows them to its gradients
// anyway.
#pragma once

#include "config.cuh"

namespace fm3::sm90_bwd {

// Row `row` of a tile of kRows rows in panels of 64 columns. One warp.
template <int kRows, int kCols, class T>
__device__ __forceinline__ void clear_row(T* tile, int32_t row) {
#pragma unroll
  for (int panel = 0; panel < kCols / 64; ++panel) {
    reinterpret_cast<uint32_t*>(tile + (panel * kRows + row) * 64)[threadIdx.x % 32] = 0;
  }
}

__device__ __forceinline__ bool is_hidden_row(float lse_log2) { return lse_log2 == INFINITY; }
__device__ __forceinline__ bool is_hidden_row(const RowPieces& lse) {
  return lse.third_and_mark >> 16 != 0;
}

// Rows of Q and dO that see no key at all: lse is +inf. Consumer warp by consumer warp; the caller fences
// and lets the warpgroups meet before a product of dV or dK reads them.
template <class C>
__device__ __forceinline__ void clear_hidden_rows(Smem<C>& smem, uint32_t count) {
  constexpr int32_t kWarpRows = kBlockQ / kNumConsumerWarps;
  const int32_t first = (threadIdx.x - 128) / 32 * kWarpRows;
#pragma unroll 1
  for (int32_t row = first; row < first + kWarpRows; ++row) {
    if (!is_hidden_row(smem.lse[count % C::kLseStages][row])) continue;
    clear_row<kBlockQ, C::kDim>(smem.q[count % C::kQStages], row);
    clear_row<kBlockQ, C::kDimV>(smem.dout[count % C::kDoutStages], row);
  }
}

// Keys that no row sees, of the consumer warp's share. S has been computed from the tile of K already;
// the caller fences, and lets those meet who read K before dQ and, for d <= 128, V before dP (elsewhere dP comes
// first, and hide_packed sets what it becomes to 0). Query heads of a group
// that have masks of their own may show a key each other hides, so for those K and V stay as they are.
template <class C>
__device__ __forceinline__ void clear_hidden_keys(const KernelArgs& args, typename C::T* k,
                                                  typename C::T* v, const int4* bounds) {
  if (args.mask.h_mask > args.shape.h_kv) return;
  constexpr int32_t kWarpKeys = C::kBlockK / kNumConsumerWarps;
  const int32_t first = (threadIdx.x - 128) / 32 * kWarpKeys;
  const int32_t s_q = args.shape.s_q;
  const int4 rows = bounds[first + threadIdx.x % kWarpKeys];
  const bool is_hidden = (rows.x <= 0 && rows.y >= s_q) || (rows.z <= 0 && rows.w >= s_q) ||
                         (rows.z <= 0 && rows.w >= rows.x && rows.y >= s_q) ||
                         (rows.x <= 0 && rows.y >= rows.z && rows.w >= s_q);
  uint32_t hidden = __ballot_sync(kAllLanes, is_hidden && threadIdx.x % 32 < kWarpKeys);
#pragma unroll 1
  for (; hidden != 0; hidden &= hidden - 1) {
    const int32_t key = first + __ffs(hidden) - 1;
    clear_row<C::kBlockK, C::kDim>(k, key);
    clear_row<C::kBlockK, C::kDimV>(v, key);
  }
}

// Which of a thread's scores of two keys, bounds[0] and bounds[8], with rows q_first + 8 j + e their bounds hide:
// hidden_scores of each, 16 bits a key.
__device__ __forceinline__ uint32_t hidden_of_keys(const int4* bounds, int32_t q_first) {
  const int4 rows[2] = {bounds[0], bounds[8]};
  uint32_t hidden = 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    hidden |= hidden_scores({rows[i].x, rows[i].y, rows[i].z, rows[i].w}, q_first) << 16 * i;
  }
  return hidden;
}

// P and dS of such pairs become 0, whatever they are: register 2 j + i holds key i, rows first_row + 8 j + {0, 1}.
// Bits turn into bytes: those of both rows become the signs of two bytes, and these are spread.
__device__ __forceinline__ void hide_packed(uint32_t (&p)[8], uint32_t (&ds)[8], uint32_t hidden,
                                            int32_t first_row) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint32_t mask;
      asm("prmt.b32 %0, %1, 0, %2;"
          : "=r"(mask)
          : "r"(hidden << (7 - first_row / 8 - j)), "r"(i == 0 ? 0x9988 : 0xBBAA));
      p[2 * j + i] &= ~mask;
      ds[2 * j + i] &= ~mask;
    }
  }
}

}  // namespace fm3::sm90_bwd
