// SPDX-License-Identifier: Apache-2.0
// Builds the device schedule in three launches: scan the bounds (O(s_k)), make the lists of spans,
// order the tiles by falling cost. Where tiles may leave the grid, a fourth says where they begin.
#include "build.cuh"
#include "launch_sizes.cuh"
#include "with_form.cuh"

namespace fm3::sm90 {
namespace {

bool is_empty(const MaskView& mask) {
  return int64_t{mask.b} * mask.h_mask * mask.s_q == 0 || mask.s_k == 0;
}

}  // namespace

int64_t schedule_bytes(const MaskView& mask) { return schedule_layout(mask, nullptr, nullptr); }

cudaError_t scan_bounds(const MaskView& mask, void* blob, cudaStream_t stream) {
  ScheduleView schedule;
  schedule_layout(mask, blob, &schedule);
  if (is_empty(mask)) return cudaSuccess;
  const LaunchSizes sizes = launch_sizes(mask, schedule);
  return with_form(mask.form, [&](auto form) {
    scan_kernel<form>
        <<<sizes.scan_ctas, kScanThreads, 0, stream>>>(mask, schedule, sizes.num_blocks);
    return cudaGetLastError();
  });
}

cudaError_t build_schedule(const MaskView& mask, void* blob, cudaStream_t stream) {
  const cudaError_t error = scan_bounds(mask, blob, stream);
  if (error != cudaSuccess || is_empty(mask)) return error;
  ScheduleView schedule;
  schedule_layout(mask, blob, &schedule);
  const LaunchSizes sizes = launch_sizes(mask, schedule);
  return with_form(mask.form, [&](auto form) {
    if (form != BoundForm::kNone && schedule.q_begins != nullptr) {
      constexpr BoundForm kForm = form == BoundForm::kNone ? BoundForm::kLower1 : form.value;
      cut_kernel<kForm><<<sizes.cut_ctas, kCutThreads, 0, stream>>>(mask, schedule);
      list_kernel<kForm, true><<<sizes.list_ctas, kListThreads, 0, stream>>>(mask, schedule);
    } else {
      list_kernel<form, false><<<sizes.list_ctas, kListThreads, 0, stream>>>(mask, schedule);
    }
    order_kernel<<<sizes.order_ctas, kRankThreads, 0, stream>>>(schedule, sizes.tile_order_ctas,
                                                                sizes.pair_order_ctas);
    return cudaGetLastError();
  });
}

}  // namespace fm3::sm90
