// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include "fm3/params.h"

namespace fm3::sm90 {

// The answer of a call without keys: out 0, lse -inf.
cudaError_t fill_empty_rows(const FwdParams& params, cudaStream_t stream);

}  // namespace fm3::sm90
