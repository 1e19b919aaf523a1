// SPDX-License-Identifier: Apache-2.0
// Host side of TMA: tensor maps of [b, s, h, d] tensors.
#pragma once

#include <cuda.h>

#include <string>

#include "fm3/params.h"

namespace fm3::sm90 {

// Map whose coordinates are (d, s, h, b), boxes of `box_rows` x 64 elements, 128-byte swizzle, zeros
// outside. Returns what TMA cannot take about the tensor, or "". No CUDA context is needed.
std::string make_tensor_map(CUtensorMap* map, const char* name, DType dtype, const void* data,
                            const Strides& stride, int64_t b, int64_t s, int64_t h, int64_t d,
                            int32_t box_rows);

// What 16-byte accesses cannot take about the tensor, or "".
std::string check_vector_access(const char* name, const void* data, const Strides& stride,
                                int64_t b, int64_t s, int64_t h);

}  // namespace fm3::sm90
