// SPDX-License-Identifier: Apache-2.0
// What one forward launch gets, and the launchers. Plain C++: included by the dispatch as well.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "../schedule/device_schedule.cuh"
#include "fm3/params.h"

namespace fm3::sm90 {

struct FwdArgs {
  // [b, h, s, d], boxes of 64 columns, 128-byte swizzle; K and V for single tiles and for pairs
  CUtensorMap map_q, map_k[2], map_v[2];
  MaskView mask;
  ScheduleView schedule;
  void* out;              // [b, s_q, h_q, d_v]
  float* lse;             // [b, h_q, s_q]
  int32_t* next_tile;     // the PPT counter, zero at launch
  int32_t* revisit_next;  // [b, h_q, tiles.count, 8]: chains of 16-row blocks (revisit.cuh)
  const void *q, *k, *v;  // as the maps, for revisit.cuh
  Strides stride_q, stride_k, stride_v, stride_out;
  int32_t b, s_q, s_k, h_q, h_kv, d_qk, d_v;
  int32_t heads_per_group;  // query heads whose K/V share the L2 at a time
  int32_t num_tiles;        // b * h_q * num_q_tiles
  // Scores are multiplied by `prescale` if `needs_prescale` (softmax_scale <= 0), then scaled by the
  // positive `scale`.
  float scale, scale_log2, prescale;
  int32_t needs_prescale;
  // FwdParams::ready_rows and what belongs to it.
  const uint32_t* ready_rows;
  uint32_t* ready_status;
  uint32_t ready_polls;
};

// One compiled kernel. It serves d_qk <= head_qk and d_v <= head_v.
struct FwdKernel {
  DType dtype;
  int32_t head_qk, head_v;
  int32_t step_cols, pair_step_cols;  // rows of the K and V boxes
  cudaError_t (*launch)(const FwdArgs& args, int32_t num_ctas, cudaStream_t stream);
};
constexpr int32_t kRowsPerQBox = 64;

extern const FwdKernel kFwdD64Bf16, kFwdD96Bf16, kFwdD128Bf16, kFwdD192V128Bf16, kFwdD192Bf16,
    kFwdD256Bf16, kFwdD64Fp16, kFwdD96Fp16, kFwdD128Fp16, kFwdD192V128Fp16, kFwdD192Fp16,
    kFwdD256Fp16;

}  // namespace fm3::sm90
