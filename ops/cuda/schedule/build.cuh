// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime.h>

#include "fm3/mask.h"

namespace fm3::sm90 {

int64_t schedule_bytes(const MaskView& mask);

// Enqueues the build on `stream`; the blob holds the schedule when the stream reaches that point.
cudaError_t build_schedule(const MaskView& mask, void* schedule, cudaStream_t stream);

// The first of its passes alone.
cudaError_t scan_bounds(const MaskView& mask, void* schedule, cudaStream_t stream);

}  // namespace fm3::sm90
