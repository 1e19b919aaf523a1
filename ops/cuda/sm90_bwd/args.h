// SPDX-License-Identifier: Apache-2.0
// What one backward launch gets, its workspace, and the launchers. Plain C++: included by the
// dispatch as well.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "fm3/params.h"
#include "lists.h"
#include "row_pieces.h"

namespace fm3::sm90_bwd {

// A work item: what a key tile is about.
struct alignas(16) TileInfo {
  int32_t b_idx, h_kv_idx, k_tile_idx;
  int32_t num_steps;           // < 0: no more work
  int32_t h_q_begin, h_q_end;  // query heads of the item
  // kItemHeadsInside, kItemInOrder, kItemRemote; from kItemKeysShift on the number of its keys; from kItemWaveShift on
  // its wave_end, in order its wave_start_parts
  uint32_t flags;
  // The ring slot: its first row of tiles less h_q_begin, so that h_q_idx can be added; the head's part that
  // had it before (< 0: none) and how many of its sums must be converted.
  int32_t ring_row, ring_before, ring_before_sums;
  // Where the parts of a group sum up dK and dV (< 0: the item is no part, see also kShortTile), and its count when that is free.
  int32_t kv_sum_idx;
  int32_t k_begin;  // its first key
};

// kv_sum_idx of a tile that is no part of a sum, but whose gradients TMA may not write as it does elsewhere: behind its
// last key come those of the next tile.
constexpr int32_t kShortTile = INT32_MAX;

// What the pass before the kernel decides.
struct CallPlan : WorkPlan {
  int32_t num_items;
  int32_t num_q_tiles;  // the most that a mask of the call has
  int32_t sent_warps;   // that write gradients of remote tiles, see sent.cuh
};

// All heads of a row tile come before the next row tile. Parts of a sum are added in turns. Some of its keys are of
// another rank, and something is asked of them.
constexpr uint32_t kItemHeadsInside = 1, kItemInOrder = 2, kItemRemote = 4;
constexpr int32_t kItemKeysShift = 3, kItemWaveShift = 11;
constexpr int32_t kMostInWaves =
    1 << (32 - kItemWaveShift);  // items of a call that may come in waves
FM3_HOST_DEVICE int32_t k_end_of(const volatile TileInfo& tile) {
  return tile.k_begin + static_cast<int32_t>(tile.flags >> kItemKeysShift & 0xFF);
}

struct KernelArgs {
  // (d, s, h, b), boxes of 64 columns, 128-byte swizzle; of dk and dv 64 rows, of dq 16.
  CUtensorMap map_q, map_k, map_v, map_dout, map_dq, map_dk, map_dv;
  Shape shape;
  MaskView mask;         // the caller's
  int32_t group;         // h_q / h_kv
  int32_t num_q_tiles;   // the lists' room
  int32_t num_k_tiles;   // the lists' room, lists.num_k_tiles
  int32_t num_hulls;     // lists.num_hulls
  int32_t num_q_chunks;  // ceil(num_q_tiles / 32)
  PlanInput plan_input;  // but for num_k_tiles and num_q_tiles, which the lists say
  int32_t max_items;     // room in `items`
  int32_t kv_sum_heads;  // (batch, kv head)s that kv_sums has room for
  int32_t is_deterministic;
  int32_t leaves_zeros;  // in dq_ring, whoever adds first
  float softmax_scale;
  // Of MaskLists; nullptr where row tiles are on the grid. The masks' number is then that of the batch.
  const TilePair* q_rows;
  const int32_t* q_tiles;
  const RowPlaces* row_places;
  TileLists lists;     // of the kernel's key tiles
  const int4* bounds;  // lists.bounds: [b, h_mask, num_hulls * kHullK] KeyRows, block_k a key tile
  int32_t* walks;      // [b, h_mask] of type Walk
  CallPlan* plan;      // of all lists; the first one's visits decide
  TileInfo* items;     // [at most b * h_q * num_k_tiles] in the order of work
  // [b, h_q, num_q_tiles * kBlockQ] of RowPieces if packs_rows, else of float:
  void* lse;          // score_start; or lse in log2, +inf in a hidden row
  void* minus_delta;  // dlse - sum(dO * O)
  // All zero at first (of dq_ring, in a fixed order, nothing is asked):
  int32_t* next_work;
  int32_t *next_finished, *next_conversion;  // places in `finished`: to fill, to convert
  int32_t* finished;     // [b * h_q * num_q_tiles * dq_parts] complete sums as they come: index + 1
  int32_t* head_done;    // [b * h_q / part_heads] shared row tiles converted
  int32_t* kv_counts;    // [kv_sum_heads, num_k_tiles, 8 warps] parts in a sum, sums taken
  int32_t* ring_counts;  // [ring_heads, num_q_tiles, dq_parts]
  float* dq_ring;        // [ring_heads, num_q_tiles, dq_parts, kBlockQ * dim / dq_parts]
  float* kv_sums;        // [kv_sum_heads, num_k_tiles, block_k * (dim_qk + dim_v)]
  // Outputs, strided:
  void* dq;
  void* dk;
  void* dv;
  Strides stride_dq, stride_dk, stride_dv;
  // First key of other ranks of which something is asked; none: INT32_MAX.
  int32_t remote_begin;
  const uint32_t* ready_rows;  // as in BwdParams; nullptr: all are in
  uint32_t* ready_status;
  uint32_t ready_polls;
  // See sent.cuh. What is to be left behind them, in steps of a multiprocessor; < 0: nobody waits.
  float lead_steps;
  int32_t* sent_count;  // warps that have written their gradients; zero at first
  uint32_t* sent_word;
  uint32_t sent_value;
};

// What the passes before the kernel read besides KernelArgs.
struct PrepareArgs {
  DType dtype;
  const void* out;    // [b, s_q, h_q, d_v]
  const void* dout;   // [b, s_q, h_q, d_v]
  const float* lse;   // [b, h_q, s_q]
  const float* dlse;  // [b, h_q, s_q]; may be nullptr
  Strides stride_out, stride_dout;
  int32_t dq_parts;
  bool packs_rows;
  void* zeroed;  // the part of the workspace that must be zero
  int64_t zeroed_bytes;
};

// Makes the lists of a mask.
cudaError_t make_lists(const MaskView& mask, const MaskLists& lists, cudaStream_t stream);

// Fills items, counts, lse and delta; writes zeros to dq where no key is visible.
cudaError_t prepare(const KernelArgs& args, const PrepareArgs& prepare_args, cudaStream_t stream);

// *word = value, once the stream's work so far is done.
cudaError_t set_word(uint32_t* word, uint32_t value, cudaStream_t stream);

// Zeros of a strided [b, s, h, d] tensor of 2-byte elements.
cudaError_t fill_zero(void* data, const Strides& stride, int64_t b, int64_t s, int64_t h, int32_t d,
                      cudaStream_t stream);

// One compiled kernel. It serves d_qk <= dim_qk and d_v <= dim_v.
struct BwdKernel {
  DType dtype;
  int32_t dim_qk, dim_v;
  int32_t block_k;     // keys of a work item
  int32_t dq_parts;    // sums a row tile has in the ring
  bool sums_parts;     // whether a group of query heads may be cut, see kv_sum.cuh
  bool packs_rows;     // lse and delta come as RowPieces
  bool leaves_zeros;   // where it is asked to; else in what it reads
  bool serves_remote;  // keys of other ranks: waits for them, says when their gradients are written
  cudaError_t (*launch)(const KernelArgs& args, int32_t num_ctas, cudaStream_t stream);
};

extern const BwdKernel kBwdD64Bf16, kBwdD128Bf16, kBwdD192V128Bf16, kBwdD192Bf16, kBwdD256Bf16,
    kBwdD64Fp16, kBwdD128Fp16, kBwdD192V128Fp16, kBwdD192Fp16, kBwdD256Fp16;

}  // namespace fm3::sm90_bwd
