// SPDX-License-Identifier: Apache-2.0
// The light passes before the kernel: what each key tile visits, in which order, and one pass over
// O and dO at memory speed.
#include <algorithm>

#include "../schedule/rank.cuh"
#include "config.cuh"
#include "steps.h"

namespace fm3::sm90_bwd {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * 32;

// --- 1. Bounds and hulls: one warp a block of 128 keys ------------------------------------------
__global__ void __launch_bounds__(kThreads) scan_kernel(KernelArgs args, int64_t num_blocks) {
  const int64_t block_idx = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (block_idx >= num_blocks) return;
  const MaskView& mask = args.mask;
  const int32_t lane = threadIdx.x % 32;
  const int64_t mask_idx = block_idx / args.num_hulls;
  const int32_t k_begin = static_cast<int32_t>(block_idx % args.num_hulls) * kHullK;
  const int32_t* list_bounds = mask.bounds + mask_idx * mask.s_k * num_bounds(mask.form);
  int32_t low[4] = {sm90::kNever, sm90::kNever, sm90::kNever, sm90::kNever};
  int32_t high[4] = {-1, -1, -1, -1};
#pragma unroll
  for (int32_t step = 0; step < kHullK / 32; ++step) {
    const int32_t k_idx = k_begin + step * 32 + lane;
    int4 rows = make_int4(0, mask.s_q, 0, 0);
    if (k_idx < mask.s_k) {
      const sm90::HiddenRows hidden = sm90::hidden_rows(mask, list_bounds, k_idx);
      const bool has_lt = hidden.lt.begin < hidden.lt.end;
      const bool has_ut = hidden.ut.begin < hidden.ut.end;
      const int32_t value[4] = {
          has_lt ? hidden.lt.begin : sm90::kNever, has_lt ? hidden.lt.end : -1,
          has_ut ? hidden.ut.begin : sm90::kNever, has_ut ? hidden.ut.end : -1};
#pragma unroll
      for (int idx = 0; idx < 4; ++idx) {
        low[idx] = min(low[idx], value[idx]);
        high[idx] = max(high[idx], value[idx]);
      }
      const TwoIntervals folded = fold_causal(hidden, mask.is_causal, mask.s_q);
      rows = make_int4(folded.lt_begin, folded.lt_end, folded.ut_begin, folded.ut_end);
    }
    args.bounds[block_idx * kHullK + step * 32 + lane] = rows;
  }
#pragma unroll
  for (int idx = 0; idx < 4; ++idx) {
    low[idx] = __reduce_min_sync(kAllLanes, low[idx]);
    high[idx] = __reduce_max_sync(kAllLanes, high[idx]);
  }
  if (lane == 0) {
    args.hulls[block_idx] = {low[0], high[0], low[1], high[1], low[2], high[2], low[3], high[3]};
  }
}

// --- 2. Visits: one warp a key tile -------------------------------------------------------------
__global__ void __launch_bounds__(kThreads)
    visit_kernel(KernelArgs args, int32_t block_k, int64_t num_tiles) {
  const int64_t tile_idx = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (tile_idx >= num_tiles) return;
  const int32_t lane = threadIdx.x % 32;
  const int32_t mask_idx = static_cast<int32_t>(tile_idx / args.num_k_tiles);
  const int32_t k_begin = static_cast<int32_t>(tile_idx % args.num_k_tiles) * block_k;
  int32_t num_steps = 0, first_chunk = 0, end_chunk = 0;
  for (int32_t chunk = 0; chunk < args.num_q_chunks; ++chunk) {
    const int32_t q_tile_idx = chunk * 32 + lane;
    const StepClass step = classify_step(args.mask, args.hulls, args.num_hulls, mask_idx, k_begin,
                                         block_k, q_tile_idx);
    const uint32_t visited = __ballot_sync(kAllLanes, step != StepClass::kSkip);
    const uint32_t partial = __ballot_sync(kAllLanes, step == StepClass::kPartial);
    if (lane == 0)
      args.step_bits[tile_idx * args.num_q_chunks + chunk] = make_uint2(visited, partial);
    if (visited == 0) continue;
    num_steps += __popc(visited);
    if (num_steps == __popc(visited)) first_chunk = chunk;
    end_chunk = chunk + 1;
    if (step != StepClass::kSkip) {
      atomicAdd(&args.visits[int64_t{mask_idx} * args.num_q_tiles + q_tile_idx], 1);
    }
  }
  if (lane == 0) {
    args.tile_steps[tile_idx] = num_steps;
    args.step_chunks[tile_idx] = make_int2(first_chunk, end_chunk);
    // The row tile a walk is at after a few steps, from either end.
    const uint2* const bits =
        args.step_bits + tile_idx * args.num_q_chunks;  // this lane's own writes
    int2 sample = make_int2(-1, -1);
    if (num_steps > 0) {
      int32_t left = min(kSampleStep, num_steps - 1), chunk = first_chunk;
      for (; left >= __popc(bits[chunk].x); ++chunk) left -= __popc(bits[chunk].x);
      sample.x = chunk * 32 + static_cast<int32_t>(__fns(bits[chunk].x, 0, left + 1));
      left = min(kSampleStep, num_steps - 1), chunk = end_chunk - 1;
      for (; left >= __popc(bits[chunk].x); --chunk) left -= __popc(bits[chunk].x);
      sample.y = chunk * 32 + 31 - static_cast<int32_t>(__fns(__brev(bits[chunk].x), 0, left + 1));
    }
    args.sample_rows[tile_idx] = sample;
  }
}

// --- 3. Order of the key tiles, and the row tiles that share a sum ------------------------------
// What the key tiles of a list visit, the same in all threads of a block.
__device__ VisitSummary summarize(const KernelArgs& args, int64_t tiles_begin) {
  __shared__ int32_t smem_sums[5];
  __shared__ unsigned long long smem_steps;
  if (threadIdx.x < 5) smem_sums[threadIdx.x] = 0;
  if (threadIdx.x == 0) smem_steps = 0;
  __syncthreads();
  int64_t num_steps = 0;
  int32_t max_steps = 0, max_late_steps = 0;
  int32_t num_visiting = 0, num_apart_up = 0, num_apart_down = 0;
  for (int32_t idx = threadIdx.x; idx < args.num_k_tiles; idx += blockDim.x) {
    const int32_t steps = args.tile_steps[tiles_begin + idx];
    num_steps += steps;
    max_steps = max(max_steps, steps);
    if (idx >= args.num_k_tiles / 2) max_late_steps = max(max_late_steps, steps);
    num_visiting += steps > 0;
    const int2 own = args.sample_rows[tiles_begin + idx];
    const int2 next = idx + 1 < args.num_k_tiles ? args.sample_rows[tiles_begin + idx + 1] : own;
    num_apart_up += own.x != next.x;
    num_apart_down += own.y != next.y;
  }
  max_steps = __reduce_max_sync(kAllLanes, max_steps);
  max_late_steps = __reduce_max_sync(kAllLanes, max_late_steps);
  num_visiting = __reduce_add_sync(kAllLanes, num_visiting);
  num_apart_up = __reduce_add_sync(kAllLanes, num_apart_up);
  num_apart_down = __reduce_add_sync(kAllLanes, num_apart_down);
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    num_steps += __shfl_xor_sync(kAllLanes, num_steps, offset);
  }
  if (threadIdx.x % 32 == 0) {
    atomicAdd(&smem_steps, static_cast<unsigned long long>(num_steps));
    atomicMax(&smem_sums[0], max_steps);
    atomicMax(&smem_sums[1], max_late_steps);
    atomicAdd(&smem_sums[2], num_visiting);
    atomicAdd(&smem_sums[3], num_apart_up);
    atomicAdd(&smem_sums[4], num_apart_down);
  }
  __syncthreads();
  return {static_cast<int64_t>(smem_steps),
          smem_sums[0],
          smem_sums[1],
          smem_sums[2],
          smem_sums[3],
          smem_sums[4]};
}

// Free order: longest first, so that what starts last is short, or by key (goes_by_key). Fixed order
// (deterministic): from the last key tile, rows walked up; every row tile is then summed in that order, and
// under a causal rule or a window the tiles reach it in that order by themselves, because a later tile starts
// at later rows. Or by key, rows walked down (choose_item_walk).
__global__ void __launch_bounds__(sm90::kRankThreads) order_kernel(KernelArgs args) {
  const int64_t tiles_begin = int64_t{blockIdx.y} * args.num_k_tiles;
  const int32_t tile_begin = blockIdx.x * sm90::kRankTiles;
  const int32_t tile_idx = tile_begin + threadIdx.x % 32;  // the same in every warp
  const bool is_tile = tile_idx < args.num_k_tiles;
  const VisitSummary visits = summarize(args, tiles_begin);
  __syncthreads();
  // The first list decides for all.
  const VisitSummary first = blockIdx.y == 0 ? visits : summarize(args, 0);
  const bool is_in_order = adds_in_order(args.plan_input, first);
  const Walk walk =
      choose_item_walk(args.plan_input, visits, is_in_order, args.mask.h_mask <= args.shape.h_kv);
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    args.walks[blockIdx.y] = walk;
    if (blockIdx.y == 0) *args.plan = choose_plan(args.plan_input, visits);
  }
  int32_t place = tile_idx;
  if (is_in_order && walk != kWalkDownAligned) {
    place = args.num_k_tiles - 1 - tile_idx;
  } else if (!goes_by_key(args.plan_input, visits)) {
    const int32_t* const steps = args.tile_steps + tiles_begin;
    place = sm90::rank_tiles(args.num_k_tiles, tile_begin, is_tile ? steps[tile_idx] : 0,
                             [&](int32_t idx) { return steps[idx]; });
  }
  if (threadIdx.x < 32 && is_tile) args.tile_order[tiles_begin + place] = tile_idx;
  int32_t num_shared = 0;
  for (int32_t row = blockIdx.x * blockDim.x + threadIdx.x; row < args.num_q_tiles;
       row += gridDim.x * blockDim.x) {
    num_shared += args.visits[int64_t{blockIdx.y} * args.num_q_tiles + row] > 1;
  }
  num_shared = __reduce_add_sync(kAllLanes, num_shared);
  if (threadIdx.x % 32 == 0 && num_shared > 0) {
    atomicAdd(&args.shared_rows[blockIdx.y], num_shared);
  }
}

// --- 4. The list of work --------------------------------------------------------------------------
// Head part by head part (batch, kv head, part of its group), so that few heads of the ring are open;
// heads_together of them take turns. Inside one, the key tiles in the order of the mask's list.
__global__ void __launch_bounds__(kThreads) item_kernel(KernelArgs args, int32_t dq_parts) {
  const WorkPlan plan = *args.plan;
  const int32_t num_head_parts = args.shape.b * args.shape.h_q / plan.part_heads;
  const int32_t work_idx = blockIdx.x * kThreads + threadIdx.x;
  if (work_idx >= num_head_parts * args.num_k_tiles) return;
  const ItemPlace place =
      item_place(work_idx, args.num_k_tiles, num_head_parts, plan.heads_together);
  const int32_t head_idx = place.head_part / plan.num_parts;  // (batch, kv head)
  const int32_t part = place.head_part % plan.num_parts;
  TileInfo tile = {};
  tile.b_idx = head_idx / args.shape.h_kv;
  tile.h_kv_idx = head_idx % args.shape.h_kv;
  const int32_t h_q_first = tile.h_kv_idx * args.group;
  tile.h_q_begin = h_q_first + part * plan.part_heads;
  tile.h_q_end = tile.h_q_begin + plan.part_heads;
  const int64_t list = mask_index(args, tile.b_idx, h_q_first);  // parts of a head share one order
  tile.k_tile_idx = args.tile_order[list * args.num_k_tiles + place.rank];
  const auto sum_of_masks = [&](int32_t b_idx, int32_t h_q_begin, const int32_t* values,
                                int64_t stride) {
    int32_t sum = 0;
    for (int32_t h_q_idx = h_q_begin; h_q_idx < h_q_begin + plan.part_heads; ++h_q_idx) {
      sum += values[mask_index(args, b_idx, h_q_idx) * stride];
    }
    return sum;
  };
  tile.num_steps =
      sum_of_masks(tile.b_idx, tile.h_q_begin, args.tile_steps + tile.k_tile_idx, args.num_k_tiles);
  const Walk walk = static_cast<Walk>(args.walks[list]);
  const bool same_mask = args.mask.h_mask <= args.shape.h_kv;
  const bool is_aligned = walk == kWalkUpAligned || walk == kWalkDownAligned;
  tile.flags =
      (same_mask && is_aligned ? kItemHeadsInside : 0) | (plan.is_in_order ? kItemInOrder : 0);
  tile.ring_row = place.head_part % plan.ring_slots * plan.part_heads - tile.h_q_begin;
  tile.ring_before = place.head_part - plan.ring_slots;
  if (tile.ring_before >= 0) {
    const int32_t first_row_head = tile.ring_before * plan.part_heads;  // of all query heads
    tile.ring_before_sums =
        dq_parts * sum_of_masks(first_row_head / args.shape.h_q, first_row_head % args.shape.h_q,
                                args.shared_rows, 1);
  }
  tile.kv_sum_idx = -1;
  if (plan.num_parts > 1) {
    tile.kv_sum_idx = head_idx % args.kv_sum_heads * args.num_k_tiles + place.rank;
    tile.kv_counts_before = head_idx / args.kv_sum_heads * (plan.num_parts + 1);
  }
  args.items[work_idx] = tile;
}

// --- 5. Turns (if there are any): how many visitors of a row tile come before a key tile -----------
__global__ void __launch_bounds__(kThreads) turn_kernel(KernelArgs args) {
  const int32_t q_tile_idx = blockIdx.x * kThreads + threadIdx.x;
  const int32_t mask_idx = blockIdx.y;
  if (q_tile_idx >= args.num_q_tiles || !args.plan->is_in_order) return;
  const bool is_by_key = args.walks[mask_idx] == kWalkDownAligned;
  int32_t turn = 0;
#pragma unroll 8
  for (int32_t rank = 0; rank < args.num_k_tiles; ++rank) {
    const int32_t k_tile_idx =
        is_by_key ? rank : args.num_k_tiles - 1 - rank;  // as in order_kernel
    const int64_t tile = int64_t{mask_idx} * args.num_k_tiles + k_tile_idx;
    const uint32_t visited = __ldg(args.step_bits + tile * args.num_q_chunks + q_tile_idx / 32).x;
    if ((visited >> (q_tile_idx % 32) & 1) == 0) continue;
    args.turns[tile * args.num_q_tiles + q_tile_idx] = static_cast<uint16_t>(turn++);
  }
}

// --- 6. Rows: lse in log2, delta, and dq of row tiles without visitors --------------------------
// A block reads kRows rows of kHeads neighbouring heads, 16 lanes a head: where rows of all heads lie together,
// 4 KB at a time.
constexpr int kRows = 8, kHeads = kThreads / 16;
static_assert(kBlockQ % kRows == 0);

template <class T>
__device__ __forceinline__ float dot_8(const uint4& x, const uint4& y) {
  const T* const x_values = reinterpret_cast<const T*>(&x);
  const T* const y_values = reinterpret_cast<const T*>(&y);
  float sum = 0.f;
#pragma unroll
  for (int idx = 0; idx < 8; ++idx) {
    sum = fmaf(static_cast<float>(x_values[idx]), static_cast<float>(y_values[idx]), sum);
  }
  return sum;
}

template <class T>
__global__ void __launch_bounds__(kThreads, 2) row_kernel(KernelArgs args, PrepareArgs in) {
  const int32_t num_groups = (args.shape.h_q + kHeads - 1) / kHeads;
  const int32_t h_idx = blockIdx.x % num_groups * kHeads + threadIdx.x / 16;
  const int32_t q_first = blockIdx.x / num_groups * kRows, b_idx = blockIdx.y;
  const int32_t part = threadIdx.x % 16;
  const bool is_head = h_idx < args.shape.h_q;
  const T* const out = static_cast<const T*>(in.out) + b_idx * in.stride_out.b +
                       h_idx * in.stride_out.h + q_first * in.stride_out.s;
  const T* const dout = static_cast<const T*>(in.dout) + b_idx * in.stride_dout.b +
                        h_idx * in.stride_dout.h + q_first * in.stride_dout.s;
  float sums[kRows] = {};
  for (int32_t d_idx = part * 8; d_idx < args.shape.d_v; d_idx += 128) {
    uint4 x[kRows], y[kRows];
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      x[row] = y[row] = make_uint4(0, 0, 0, 0);
      if (is_head && q_first + row < args.shape.s_q) {
        x[row] = __ldcs(reinterpret_cast<const uint4*>(out + row * in.stride_out.s + d_idx));
        y[row] = __ldg(reinterpret_cast<const uint4*>(dout + row * in.stride_dout.s + d_idx));
      }
    }
#pragma unroll
    for (int row = 0; row < kRows; ++row) sums[row] += dot_8<T>(x[row], y[row]);
  }
  // Half of the rows go to the other half of the lanes, three times over; the last pair adds.
#pragma unroll
  for (int num_rows = kRows / 2; num_rows > 0; num_rows /= 2) {
    const bool is_upper = part & (2 * num_rows);
#pragma unroll
    for (int row = 0; row < num_rows; ++row) {
      const float given = is_upper ? sums[row] : sums[row + num_rows];
      const float kept = is_upper ? sums[row + num_rows] : sums[row];
      sums[row] = kept + __shfl_xor_sync(kAllLanes, given, 2 * num_rows);
    }
  }
  float sum = sums[0] + __shfl_xor_sync(kAllLanes, sums[0], 1);
  if (!is_head) return;
  const int64_t head = int64_t{b_idx} * args.shape.h_q + h_idx;
  const int32_t q_own = q_first + part / 2;
  if (part % 2 == 0) {
    float lse_log2 = INFINITY;  // P = exp2(x - inf) = 0: a row that sees nothing, or no row at all
    if (q_own < args.shape.s_q) {
      const float lse = in.lse[head * args.shape.s_q + q_own];
      if (lse != -INFINITY) lse_log2 = lse * kLog2E;
      if (in.dlse != nullptr) sum -= in.dlse[head * args.shape.s_q + q_own];
    }
    const int64_t padded = head * args.num_q_tiles * kBlockQ + q_own;
    args.lse_log2[padded] = lse_log2;
    // A hidden row's dS is 0 * (dP - delta): delta must be finite.
    args.minus_delta[padded] = lse_log2 == INFINITY ? 0.f : -sum;
  }
  const int64_t mask_idx = mask_index(args, b_idx, h_idx);
  if (args.visits[mask_idx * args.num_q_tiles + q_first / kBlockQ] != 0) return;
  T* const dq = static_cast<T*>(args.dq) + b_idx * args.stride_dq.b + h_idx * args.stride_dq.h;
  for (int32_t q_idx = q_first; q_idx < min(q_first + kRows, args.shape.s_q); ++q_idx) {
    for (int32_t d_idx = part * 8; d_idx < args.shape.d_qk; d_idx += 128) {
      *reinterpret_cast<uint4*>(dq + q_idx * args.stride_dq.s + d_idx) = make_uint4(0, 0, 0, 0);
    }
  }
}

__global__ void __launch_bounds__(kThreads)
    zero_kernel(uint16_t* data, Strides stride, int64_t s, int64_t h, int32_t d, int64_t num_rows) {
  for (int64_t row = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32; row < num_rows;
       row += int64_t{gridDim.x} * kWarps) {
    uint16_t* const values =
        data + row / (s * h) * stride.b + row / h % s * stride.s + row % h * stride.h;
    for (int32_t d_idx = threadIdx.x % 32; d_idx < d; d_idx += 32) values[d_idx] = 0;
  }
}

uint32_t div_up(int64_t value, int64_t divisor) {
  return static_cast<uint32_t>((value + divisor - 1) / divisor);
}

}  // namespace

cudaError_t prepare(const KernelArgs& args, const PrepareArgs& in, cudaStream_t stream) {
  const cudaError_t error = cudaMemsetAsync(in.zeroed, 0, in.zeroed_bytes, stream);
  if (error != cudaSuccess) return error;
  const int32_t num_masks = args.mask.b * args.mask.h_mask;
  const int64_t num_blocks = int64_t{num_masks} * args.num_hulls;
  const int64_t num_tiles = int64_t{num_masks} * args.num_k_tiles;
  scan_kernel<<<div_up(num_blocks, kWarps), kThreads, 0, stream>>>(args, num_blocks);
  visit_kernel<<<div_up(num_tiles, kWarps), kThreads, 0, stream>>>(args, in.block_k, num_tiles);
  order_kernel<<<dim3(div_up(args.num_k_tiles, sm90::kRankTiles), num_masks), sm90::kRankThreads, 0,
                 stream>>>(args);
  item_kernel<<<div_up(args.max_items, kThreads), kThreads, 0, stream>>>(args, in.dq_parts);
  if (args.plan_input.can_order) {
    turn_kernel<<<dim3(div_up(args.num_q_tiles, kThreads), num_masks), kThreads, 0, stream>>>(args);
  }
  const dim3 grid(div_up(args.shape.h_q, kHeads) * args.num_q_tiles * (kBlockQ / kRows),
                  args.shape.b);
  if (in.dtype == DType::kBFloat16) {
    row_kernel<__nv_bfloat16><<<grid, kThreads, 0, stream>>>(args, in);
  } else {
    row_kernel<__half><<<grid, kThreads, 0, stream>>>(args, in);
  }
  return cudaGetLastError();
}

cudaError_t fill_zero(void* data, const Strides& stride, int64_t b, int64_t s, int64_t h, int32_t d,
                      cudaStream_t stream) {
  const int64_t num_rows = b * s * h;
  if (num_rows == 0 || d == 0) return cudaSuccess;
  zero_kernel<<<std::min<uint32_t>(div_up(num_rows, kWarps), 4096), kThreads, 0, stream>>>(
      static_cast<uint16_t*>(data), stride, s, h, d, num_rows);
  return cudaGetLastError();
}

}  // namespace fm3::sm90_bwd
