// SPDX-License-Identifier: Apache-2.0
// What a call does before the kernel, in one launch: the list of work, and a pass over O and dO at memory speed.
#include <algorithm>
#include <cfloat>

#include "config.cuh"

namespace fm3::sm90_bwd {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * 32;

// --- 1. The list of work --------------------------------------------------------------------------
// choose_plan by a warp: a lane works one choice's cost out, the way through them is the same in all.
__device__ WorkPlan choose_plan_by_warp(const PlanInput& in, const VisitSummary& visits) {
  const int32_t lane = threadIdx.x % 32;
  int32_t own_heads = in.max_part_heads, own_together = 1;
  choose_plan(in, visits, [&](int32_t idx, int32_t heads, int32_t together) {
    if (idx == lane) own_heads = heads, own_together = together;
    return 0.f;
  });
  const float own_cost = plan_cost(in, visits, own_heads, own_together);
  return choose_plan(in, visits, [&](int32_t idx, int32_t heads, int32_t together) {
    return idx < 32 ? __shfl_sync(kAllLanes, own_cost, idx)
                    : plan_cost(in, visits, heads, together);
  });
}

// Key tiles of a list with keys of other ranks, the last ones. A warp.
__device__ int32_t count_remote_tiles(const KernelArgs& args, int64_t list) {
  if (args.remote_begin == INT32_MAX) return 0;
  const int32_t* const k_begins = args.lists.k_begins + list * (args.num_k_tiles + 1);
  int32_t count = 0;
  for (int32_t idx = threadIdx.x % 32; idx < args.lists.num_tiles[list]; idx += 32) {
    count += k_begins[idx + 1] > args.remote_begin;
  }
  return __reduce_add_sync(kAllLanes, count);
}

// choose_remote_plan by a warp, from the first list.
__device__ RemotePlan choose_remote_by_warp(const KernelArgs& args, const PlanInput& in,
                                            const WorkPlan& plan, int32_t remote_tiles) {
  RemoteWork work = {remote_tiles, 0, 0, 0};
  if (remote_tiles > 0) {
    int32_t remote_steps = 0;
    for (int32_t idx = threadIdx.x % 32; idx < remote_tiles; idx += 32) {
      const int32_t steps = args.lists.tile_steps[args.lists.num_tiles[0] - 1 - idx];
      work.max_steps = larger(work.max_steps, steps);
      remote_steps += steps;
    }
    work.max_steps = __reduce_max_sync(kAllLanes, work.max_steps);
    work.remote_steps = __reduce_add_sync(kAllLanes, remote_steps);
    work.own_steps = args.lists.summaries[0].num_steps - work.remote_steps;
  }
  return choose_remote_plan(in, plan, work, args.lead_steps, args.ready_rows != nullptr);
}

// What decides for all lists. A warp.
struct ListChoice {
  PlanInput in;
  WorkPlan plan;
  RemotePlan remote;
  int32_t remote_tiles;
};
__device__ ListChoice choose_by_warp(const KernelArgs& args) {
  const TileLists& lists = args.lists;
  ListChoice chosen = {args.plan_input, {}, {}, 0};
  // Lists with fewer key tiles than others have empty ones.
  int32_t num_tiles = 0, num_q_tiles = 0;
  for (int32_t idx = threadIdx.x % 32; idx < args.mask.b * args.mask.h_mask; idx += 32) {
    num_tiles = larger(num_tiles, lists.num_tiles[idx]);
    if (args.q_tiles != nullptr) num_q_tiles = larger(num_q_tiles, args.q_tiles[idx]);
  }
  chosen.in.num_k_tiles = __reduce_max_sync(kAllLanes, num_tiles);
  chosen.in.num_q_tiles =
      args.q_tiles == nullptr ? args.num_q_tiles : __reduce_max_sync(kAllLanes, num_q_tiles);
  // The first list decides the rest.
  chosen.plan = choose_plan_by_warp(chosen.in, lists.summaries[0]);
  if (args.max_items >= kMostInWaves) chosen.plan.wave_items = 0;
  chosen.remote_tiles = count_remote_tiles(args, 0);
  chosen.remote = choose_remote_by_warp(args, chosen.in, chosen.plan, chosen.remote_tiles);
  return chosen;
}

// Warps that write gradients of remote tiles. A warp.
__device__ int32_t count_sent_warps(const KernelArgs& args) {
  int32_t count = 0;
  for (int32_t b_idx = 0; b_idx < args.shape.b && args.sent_word != nullptr; ++b_idx) {
    // Where an entry has several masks, key tiles are the same ones (max_k_tiles).
    count += 8 * args.shape.h_kv * count_remote_tiles(args, mask_index(args, b_idx, 0));
  }
  return count;
}

// Head part by head part (batch, kv head, part of its group), so that few heads of the ring are open;
// heads_together of them take turns. Inside one, the key tiles in the order of the mask's list.
__device__ __forceinline__ void list_items(const KernelArgs& args, int32_t dq_parts,
                                           int32_t cta_idx, int32_t num_ctas) {
  __shared__ ListChoice smem_chosen;
  const TileLists& lists = args.lists;
  if (threadIdx.x < 32) {
    const ListChoice chosen = choose_by_warp(args);
    if (threadIdx.x == 0) smem_chosen = chosen;
    if (cta_idx == 0) {
      const int32_t sent_warps = count_sent_warps(args);
      const int32_t num_items =
          args.shape.b * args.shape.h_q / chosen.plan.part_heads * chosen.in.num_k_tiles;
      if (threadIdx.x == 0)
        *args.plan = {chosen.plan, num_items, chosen.in.num_q_tiles, sent_warps};
    }
  }
  __syncthreads();
  const PlanInput& in = smem_chosen.in;
  const WorkPlan plan = smem_chosen.plan;
  const int32_t num_k_tiles = in.num_k_tiles, remote_tiles = smem_chosen.remote_tiles;
  const bool same_mask = args.mask.h_mask <= args.shape.h_kv;
  const int32_t num_masks = args.mask.b * args.mask.h_mask;
  for (int32_t idx = cta_idx * kThreads + threadIdx.x; idx < num_masks;
       idx += num_ctas * kThreads) {
    args.walks[idx] = choose_item_walk(in, lists.summaries[idx], plan.is_in_order, same_mask);
  }
  const int32_t num_head_parts = args.shape.b * args.shape.h_q / plan.part_heads;
  const int32_t work_idx = cta_idx * kThreads + threadIdx.x;
  if (work_idx >= num_head_parts * num_k_tiles) return;
  const RemotePlan remote = smem_chosen.remote;
  const ItemPlace place =
      item_place(work_idx, num_k_tiles, num_head_parts, plan.heads_together, remote, remote_tiles);
  const int32_t head_idx = place.head_part / plan.num_parts;  // (batch, kv head)
  const int32_t part = place.head_part % plan.num_parts;
  TileInfo tile = {};
  tile.b_idx = head_idx / args.shape.h_kv;
  tile.h_kv_idx = head_idx % args.shape.h_kv;
  const int32_t h_q_first = tile.h_kv_idx * args.group;
  tile.h_q_begin = h_q_first + part * plan.part_heads;
  tile.h_q_end = tile.h_q_begin + plan.part_heads;
  const int64_t list = mask_index(args, tile.b_idx, h_q_first);  // parts of a head share one order
  const VisitSummary visits = lists.summaries[list];
  const Walk walk = choose_item_walk(in, visits, plan.is_in_order, same_mask);
  const TileOrder order = choose_order(in, visits, plan.is_in_order, walk);
  const auto tile_at = [&](int32_t rank) {
    if (order == TileOrder::kFirstKeysFirst) return rank;
    if (order == TileOrder::kLastKeysFirst) return num_k_tiles - 1 - rank;
    return lists.by_length[list * args.num_k_tiles + rank];
  };
  const bool is_split = place.head_part >= num_head_parts - remote.split_parts;
  const int32_t num_first = place.head_part < remote.first_parts ? remote.first_tiles : 0;
  // In a fixed order turns follow the list.
  tile.k_tile_idx =
      !plan.is_in_order && (is_split || num_first > 0)
          ? arranged_tile(place.rank, num_k_tiles, remote_tiles, num_first, is_split, tile_at)
          : tile_at(place.rank);
  const auto sum_of_masks = [&](int32_t b_idx, int32_t h_q_begin, const int32_t* values,
                                int64_t stride) {
    int32_t sum = 0;
    for (int32_t h_q_idx = h_q_begin; h_q_idx < h_q_begin + plan.part_heads; ++h_q_idx) {
      sum += values[mask_index(args, b_idx, h_q_idx) * stride];
    }
    return sum;
  };
  tile.num_steps = sum_of_masks(tile.b_idx, tile.h_q_begin, lists.tile_steps + tile.k_tile_idx,
                                args.num_k_tiles);
  const bool is_aligned = walk == kWalkUpAligned || walk == kWalkDownAligned;
  const int32_t wave = plan.is_in_order
                           ? wave_start_parts(in, visits, work_idx, place.rank, plan.wave_items)
                           : wave_end(work_idx, num_head_parts * num_k_tiles, plan.wave_items);
  tile.flags = (same_mask && is_aligned ? kItemHeadsInside : 0) |
               (plan.is_in_order ? kItemInOrder : 0) |
               static_cast<uint32_t>(wave) << kItemWaveShift;
  tile.ring_row = place.head_part % plan.ring_slots * plan.part_heads - tile.h_q_begin;
  tile.ring_before = place.head_part - plan.ring_slots;
  if (tile.ring_before >= 0) {
    const int32_t first_row_head = tile.ring_before * plan.part_heads;  // of all query heads
    tile.ring_before_sums =
        dq_parts * sum_of_masks(first_row_head / args.shape.h_q, first_row_head % args.shape.h_q,
                                lists.shared_rows, 1);
  }
  const int32_t* const k_begins = lists.k_begins + list * (args.num_k_tiles + 1) + tile.k_tile_idx;
  const int32_t num_keys = k_begins[1] - k_begins[0];
  tile.k_begin = k_begins[0];
  tile.flags |= static_cast<uint32_t>(num_keys) << kItemKeysShift;
  if (num_keys > 0 && k_begins[1] > args.remote_begin) tile.flags |= kItemRemote;
  const bool is_short = num_keys < lists.block_k && k_begins[1] < args.shape.s_k;
  tile.kv_sum_idx = is_short ? kShortTile : -1;
  if (plan.num_parts > 1) {
    tile.kv_sum_idx = head_idx % args.kv_sum_heads * args.num_k_tiles + place.rank;
  }
  args.items[work_idx] = tile;
}

// --- 2. Rows: lse and delta as the kernel takes them, dq of row tiles without visitors -----------
// The first blocks of a sequence make the list of work: a launch less (3 to 5 us).
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

// lse and delta of a row as the kernel takes them; lse_log2 is FLT_MAX in a row that is another tile's.
__device__ __forceinline__ void write_row(const KernelArgs& args, bool packs_rows, int64_t place,
                                          float lse_log2, float minus_delta, bool is_hidden) {
  if (packs_rows) {
    const bool is_none = is_hidden || lse_log2 == FLT_MAX;
    static_cast<RowPieces*>(args.lse)[place] =
        pieces_of(score_start(lse_log2, is_none, args.softmax_scale), is_hidden);
    static_cast<RowPieces*>(args.minus_delta)[place] = pieces_of(minus_delta, false);
  } else {
    static_cast<float*>(args.lse)[place] = lse_log2;
    static_cast<float*>(args.minus_delta)[place] = minus_delta;
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads, 2)
    row_kernel(const __grid_constant__ KernelArgs args, const PrepareArgs in, int32_t item_ctas) {
  if (static_cast<int32_t>(blockIdx.x) < item_ctas) {
    list_items(args, in.dq_parts, blockIdx.y * item_ctas + blockIdx.x, gridDim.y * item_ctas);
    return;
  }
  const int32_t row_cta = blockIdx.x - item_ctas;
  const int32_t num_groups = (args.shape.h_q + kHeads - 1) / kHeads;
  const int32_t h_idx = row_cta % num_groups * kHeads + threadIdx.x / 16;
  const int32_t q_first = row_cta / num_groups * kRows, b_idx = blockIdx.y;
  const int32_t part = threadIdx.x % 16;
  const bool is_head = h_idx < args.shape.h_q;
  const T* const out = static_cast<const T*>(in.out) + b_idx * in.stride_out.b +
                       h_idx * in.stride_out.h + q_first * in.stride_out.s;
  // Asked for early: the answers come while rows do. Where rows go; the pass itself stays on the grid.
  RowPlaces places = {0, INT32_MAX, 0, 0};
  if (args.row_places != nullptr) {
    const int32_t num_places = (args.shape.s_q + kBlockQ - 1) / kBlockQ;
    const int4 raw = __ldg(reinterpret_cast<const int4*>(args.row_places) + b_idx * num_places +
                           q_first / kBlockQ);
    places = {raw.x, raw.y, raw.z, 0};
  }
  const int64_t head = int64_t{b_idx} * args.shape.h_q + h_idx;
  const int32_t q_own = q_first + part / 2;
  const bool is_row = is_head && q_own < args.shape.s_q;
  float lse = 0.f, dlse = 0.f;
  if (is_row && part % 2 == 0) {
    lse = __ldg(in.lse + head * args.shape.s_q + q_own);
    if (in.dlse != nullptr) dlse = __ldg(in.dlse + head * args.shape.s_q + q_own);
  }
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
  int32_t num_visits = 1;  // of the lane's row
  if (is_row) {
    num_visits = __ldg(&args.lists
                            .visits[int64_t{mask_index(args, b_idx, h_idx)} * args.num_q_tiles +
                                    places.place(q_own) / kBlockQ]
                            .count);
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
  const int64_t head_rows = head * args.num_q_tiles * kBlockQ;
  if (is_row && part % 2 == 0) {
    float lse_log2 = INFINITY;  // P = exp2(x - inf) = 0: a row that sees nothing
    if (lse != -INFINITY) lse_log2 = lse * kLog2E;
    const bool is_hidden = lse_log2 == INFINITY;
    // A hidden row's dS is 0 * (dP - delta): delta must be finite.
    const float minus_delta = is_hidden ? 0.f : -(sum - dlse);
    write_row(args, in.packs_rows, head_rows + places.place(q_own), lse_log2, minus_delta,
              is_hidden);
  }
  // What the tile before a cut lacks: rows with P = 0 that are not hidden (they are the next tile's).
  if (is_head && static_cast<uint32_t>(places.cut - q_first) < kRows) {
    const int64_t end = head_rows + places.place(places.cut);
    for (int32_t idx = part; idx < places.cut_shift - places.shift; idx += 16) {
      write_row(args, in.packs_rows, end - 1 - idx, FLT_MAX, 0.f, false);
    }
  }
  // What the last tile lacks: no rows at all.
  const int32_t q_last = args.shape.s_q - 1;
  if (is_head && static_cast<uint32_t>(q_last - q_first) < kRows) {
    const int32_t place = places.place(q_last);
    for (int32_t idx = part; idx < kBlockQ - 1 - place % kBlockQ; idx += 16) {
      write_row(args, in.packs_rows, head_rows + place + 1 + idx, INFINITY, 0.f, true);
    }
  }
  const uint32_t blind = __ballot_sync(kAllLanes, num_visits == 0) >> (threadIdx.x & 16) & 0xFFFF;
  if (blind == 0) return;
  T* const dq = static_cast<T*>(args.dq) + b_idx * args.stride_dq.b + h_idx * args.stride_dq.h;
  for (int32_t row = 0; row < kRows; ++row) {
    if ((blind >> 2 * row & 1) == 0) continue;
    const int32_t q_idx = q_first + row;
    for (int32_t d_idx = part * 8; d_idx < args.shape.d_qk; d_idx += 128) {
      *reinterpret_cast<uint4*>(dq + q_idx * args.stride_dq.s + d_idx) = make_uint4(0, 0, 0, 0);
    }
  }
}

__global__ void word_kernel(uint32_t* word, uint32_t value) {
  ptx::store_release_system(word, value);
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
  const auto item_ctas =
      static_cast<int32_t>(div_up(div_up(args.max_items, kThreads), args.shape.b));
  const dim3 grid(item_ctas + div_up(args.shape.h_q, kHeads) * div_up(args.shape.s_q, kRows),
                  args.shape.b);
  if (in.dtype == DType::kBFloat16) {
    row_kernel<__nv_bfloat16><<<grid, kThreads, 0, stream>>>(args, in, item_ctas);
  } else {
    row_kernel<__half><<<grid, kThreads, 0, stream>>>(args, in, item_ctas);
  }
  return cudaGetLastError();
}

cudaError_t set_word(uint32_t* word, uint32_t value, cudaStream_t stream) {
  word_kernel<<<1, 1, 0, stream>>>(word, value);
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
