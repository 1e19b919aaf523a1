// SPDX-License-Identifier: Apache-2.0
#include "local_first.cuh"
#include "rows.cuh"

namespace fm3::sm90 {

cudaError_t order_local_first(const MaskView& mask, void* blob, const LocalFirst& first,
                              cudaStream_t stream) {
  ScheduleView schedule;
  schedule_layout(mask, blob, &schedule);
  const int64_t num_lists = int64_t{mask.b} * mask.h_mask;
  if (num_lists == 0 || schedule.num_q_tiles == 0 || mask.s_k == 0) return cudaSuccess;
  local_first_kernel<<<static_cast<uint32_t>(2 * num_lists), kOrderLanes, 0, stream>>>(schedule,
                                                                                       first);
  return cudaGetLastError();
}

}  // namespace fm3::sm90
