// SPDX-License-Identifier: Apache-2.0
// What the driver (attention.cc) and the per-target kernels agree on. One kernel source is compiled
// once a SIMD target; each compilation exports one KernelTable.
#pragma once

#include <atomic>
#include <cstdint>

#include "fm3/params.h"
#include "fm3/schedule.h"

namespace fm3::cpu {

// Rows of q and columns of k in one tile. They never depend on the number of threads.
constexpr int32_t kBlockQ = 128;
constexpr int32_t kBlockK = 128;
static_assert(kBlockMaskTile % kBlockQ == 0 && kBlockMaskTile == kBlockK,
              "a tile lies inside one block_mask entry");

// What both directions share during one call.
struct MaskContext {
  MaskView mask;
  const KeyTileSummary* summaries;  // [b, h_mask, num_k_tiles] for tiles of kBlockK keys
  int32_t h_q;
};

struct BackwardContext {
  MaskContext mask;
  const float* delta;  // [b, h_q, s_q] rowsum(dout * out)
  // fp32 sums of dq, row q of head (b, h) at dq_acc_f32[b * stride.b + q * stride.s + h * stride.h -
  // dq_acc_offset]: the output itself for fp32 tensors, else room for the heads in work.
  float* dq_acc_f32;
  Strides stride_dq_acc;
  int64_t dq_acc_offset;
  std::atomic<int32_t>* dq_turn;  // [b, h_q, num_q_tiles] last key tile that was added; -1 at first
};

struct KernelTable {
  const char* name;
  bool (*is_supported)();
  int64_t (*forward_scratch_bytes)(const Shape& shape);
  int64_t (*backward_scratch_bytes)(const Shape& shape);
  // out and lse of one query tile of one head.
  void (*forward_query_tile)(const FwdParams& params, const MaskContext& mask, int32_t b_idx,
                             int32_t h_q_idx, int32_t q_tile_idx, void* scratch);
  // delta of one query tile of one head.
  void (*backward_delta)(const BwdParams& params, int32_t b_idx, int32_t h_q_idx,
                         int32_t q_tile_idx, float* delta, void* scratch);
  // dk and dv of one key tile of one kv head, and its share of dq added in order of key tiles.
  void (*backward_key_tile)(const BwdParams& params, const BackwardContext& context, int32_t b_idx,
                            int32_t h_kv_idx, int32_t k_tile_idx, void* scratch);
  // Converts fp32 sums of dq to the tensor's type.
  void (*backward_store_dq)(const BwdParams& params, const BackwardContext& context, int32_t b_idx,
                            int32_t h_q_idx, int32_t q_tile_idx);
};

extern const KernelTable kBaselineKernels;
#if defined(__x86_64__)
extern const KernelTable kAvx2Kernels;
extern const KernelTable kAvx512Kernels;
#endif

}  // namespace fm3::cpu
