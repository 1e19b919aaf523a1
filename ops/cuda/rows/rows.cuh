// SPDX-License-Identifier: Apache-2.0
// Launchers of the row kernels. Plain C++: included by the dispatch as well.
#pragma once

#include <cuda_runtime_api.h>

#include "fm3/rows.h"

namespace fm3::sm90 {

// Of one launch of sum_rows, pack or merge: batch entries, and vectors of 8 elements in each (32 GB; a thread counts
// them in 32 bits).
constexpr int32_t kMostRowBatch = 65535;
constexpr int64_t kMostRowVecs = 2'000'000'000;

cudaError_t sum_parts(const SumPartsParams& params, cudaStream_t stream);
// `count` tensors, up to kMostRowTensors, of the same b, dtype and is_out_float32.
cudaError_t sum_rows(const SumRowsParams* params, int32_t count, cudaStream_t stream);
cudaError_t pack(const PackParams* params, int32_t count, const PackWords* words,
                 cudaStream_t stream);
cudaError_t merge(const MergeParams& params, cudaStream_t stream);
cudaError_t check_same(const CheckSameParams& params, cudaStream_t stream);
cudaError_t order_local_first(const MaskView& mask, void* schedule, const LocalFirst& first,
                              cudaStream_t stream);

}  // namespace fm3::sm90
