// SPDX-License-Identifier: Apache-2.0
// What one backward launch gets, its workspace, and the launchers. Plain C++: included by the
// dispatch as well.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "fm3/params.h"
#include "steps.h"

namespace fm3::sm90_bwd {

struct KernelArgs {
  // (d, s, h, b), boxes of 64 columns, 128-byte swizzle; of dk and dv 64 rows.
  CUtensorMap map_q, map_k, map_v, map_dout, map_dk, map_dv;
  Shape shape;
  MaskView mask;                     // the caller's
  int32_t group;                     // h_q / h_kv
  int32_t num_q_tiles, num_k_tiles;  // ceil(s_q / kBlockQ), ceil(s_k / block_k)
  int32_t num_hulls;                 // ceil(s_k / kHullK)
  int32_t num_q_chunks;              // ceil(num_q_tiles / 32)
  int32_t num_work, ring_heads;
  int32_t is_deterministic;
  float softmax_scale;
  sm90::ColumnHull* hulls;  // [b, h_mask, num_hulls]
  int4* bounds;             // [b, h_mask, num_hulls * kHullK] rows hidden from a key: [x, y) and
                            // [z, w), causal rule included; everything for keys past s_k
  int32_t* tile_order;      // [b, h_mask, num_k_tiles] key tiles in the order of work
  int32_t* tile_steps;      // [b, h_mask, num_k_tiles] visited row tiles
  uint2* step_bits;    // [b, h_mask, num_k_tiles, num_q_chunks] of 32 row tiles: which a key tile
                       // visits (x), which of those are partial (y)
  int2* step_chunks;   // [b, h_mask, num_k_tiles] all visits are in chunks [x, y)
  uint16_t* turns;     // [b, h_mask, num_k_tiles, num_q_tiles]; deterministic only
  float* lse_log2;     // [b, h_q, num_q_tiles * kBlockQ]; +inf in a hidden row
  float* minus_delta;  // likewise, dlse - sum(dO * O)
  // All zero at first:
  int32_t* next_work;
  int32_t* visits;       // [b, h_mask, num_q_tiles] visiting key tiles
  int32_t* shared_rows;  // [b, h_mask] row tiles with more than one visitor
  int32_t* head_done;    // [b * h_kv] shared row tiles converted
  int32_t* ring_counts;  // [ring_heads, group, num_q_tiles, dq_parts]
  float* dq_ring;        // [ring_heads, group, num_q_tiles, dq_parts, kBlockQ * dim / dq_parts]
  // Outputs, strided:
  void* dq;
  void* dk;
  void* dv;
  Strides stride_dq, stride_dk, stride_dv;
};

// What the passes before the kernel read besides KernelArgs.
struct PrepareArgs {
  DType dtype;
  const void* out;    // [b, s_q, h_q, d_v]
  const void* dout;   // [b, s_q, h_q, d_v]
  const float* lse;   // [b, h_q, s_q]
  const float* dlse;  // [b, h_q, s_q]; may be nullptr
  Strides stride_out, stride_dout;
  int32_t block_k;
  void* zeroed;  // the part of the workspace that must be zero
  int64_t zeroed_bytes;
};

// Fills hulls, bounds, order, counts, lse and delta; writes zeros to dq where no key is visible.
cudaError_t prepare(const KernelArgs& args, const PrepareArgs& prepare_args, cudaStream_t stream);

// Zeros of a strided [b, s, h, d] tensor of 2-byte elements.
cudaError_t fill_zero(void* data, const Strides& stride, int64_t b, int64_t s, int64_t h, int32_t d,
                      cudaStream_t stream);

// One compiled kernel. It serves d_qk <= dim_qk and d_v <= dim_v.
struct BwdKernel {
  DType dtype;
  int32_t dim_qk, dim_v;
  int32_t block_k;   // keys of a work item
  int32_t dq_parts;  // sums a row tile has in the ring
  cudaError_t (*launch)(const KernelArgs& args, int32_t num_ctas, cudaStream_t stream);
};

extern const BwdKernel kBwdD64Bf16, kBwdD128Bf16, kBwdD192V128Bf16, kBwdD192Bf16, kBwdD256Bf16,
    kBwdD64Fp16, kBwdD128Fp16, kBwdD192V128Fp16, kBwdD192Fp16, kBwdD256Fp16;

}  // namespace fm3::sm90_bwd
