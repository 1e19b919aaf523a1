// SPDX-License-Identifier: Apache-2.0
// Order of a prepared schedule for keys that are still on their way: tiles that need none of them
// first, in each list, and of all lists (`late_tiles`).
#include "../schedule/device_schedule.cuh"
#include "rows.cuh"

namespace fm3::sm90 {
namespace {

constexpr uint32_t kAllLanes = 0xFFFFFFFF;
static_assert(sizeof(TileCost) == sizeof(QueryTileEntry), "costs serve as scratch");

// One warp a list, of single tiles or of pairs (blockIdx.y): a stable partition of its order.
__global__ void __launch_bounds__(32) local_first_kernel(ScheduleView schedule, int32_t k_end) {
  const bool is_pair = blockIdx.y == 1;
  const SpanLists lists = is_pair ? schedule.pairs : schedule.tiles;
  const int32_t item_cols = is_pair ? kPairItemCols : kTileItemCols;
  const int64_t list_begin = int64_t{blockIdx.x} * lists.count;
  QueryTileEntry* const order = lists.order + list_begin;
  auto* const sorted = reinterpret_cast<QueryTileEntry*>(lists.costs + list_begin);
  const int32_t lane = threadIdx.x;
  const auto is_local = [&](const QueryTileEntry& entry) {
    const Span* spans = lists.spans + (list_begin + entry.q_tile_idx) * schedule.max_spans;
    const Span last = spans[entry.list.num_spans() - 1];
    return last.k_begin() + entry.list.shift() + last.count() * item_cols <= k_end;
  };
  int32_t num_local = 0;
  for (int32_t base = 0; base < lists.count; base += 32) {
    const bool is_tile = base + lane < lists.count;
    num_local += __popc(__ballot_sync(kAllLanes, is_tile && is_local(order[base + lane])));
  }
  if (lane == 0) {  // of all lists the most, so that those before them are local in each
    atomicMax(is_pair ? &schedule.totals->late_pairs : &schedule.totals->late_tiles,
              lists.count - num_local);
  }
  int32_t next_local = 0, next_remote = num_local;
  for (int32_t base = 0; base < lists.count; base += 32) {
    const bool is_tile = base + lane < lists.count;
    const QueryTileEntry entry = is_tile ? order[base + lane] : QueryTileEntry{0, {1}};
    const bool is_first = is_tile && is_local(entry);
    const uint32_t locals = __ballot_sync(kAllLanes, is_first);
    const uint32_t remotes = __ballot_sync(kAllLanes, is_tile && !is_first);
    const uint32_t before = (1u << lane) - 1;
    if (is_first) sorted[next_local + __popc(locals & before)] = entry;
    if (is_tile && !is_first) sorted[next_remote + __popc(remotes & before)] = entry;
    next_local += __popc(locals), next_remote += __popc(remotes);
  }
  __syncwarp();
  for (int32_t idx = lane; idx < lists.count; idx += 32) order[idx] = sorted[idx];
}

}  // namespace

cudaError_t order_local_first(const MaskView& mask, void* blob, int32_t k_end,
                              cudaStream_t stream) {
  ScheduleView schedule;
  schedule_layout(mask, blob, &schedule);
  const int64_t num_lists = int64_t{mask.b} * mask.h_mask;
  if (num_lists == 0 || schedule.num_q_tiles == 0 || mask.s_k == 0) return cudaSuccess;
  local_first_kernel<<<dim3(static_cast<uint32_t>(num_lists), 2), 32, 0, stream>>>(schedule, k_end);
  return cudaGetLastError();
}

}  // namespace fm3::sm90
