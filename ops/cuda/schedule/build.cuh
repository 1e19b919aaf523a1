// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime.h>

#include "device_schedule.cuh"

namespace fm3::sm90 {

int64_t schedule_bytes(const MaskView& mask);

// Enqueues the build on `stream`; the blob holds the schedule when the stream reaches that point.
cudaError_t build_schedule(const MaskView& mask, void* schedule, cudaStream_t stream);

// The first of its passes alone; of `schedule` it takes totals, hulls, granules and num_hulls.
cudaError_t scan_bounds(const MaskView& mask, const ScheduleView& schedule, cudaStream_t stream);
cudaError_t scan_bounds(const MaskView& mask, void* schedule, cudaStream_t stream);

}  // namespace fm3::sm90
