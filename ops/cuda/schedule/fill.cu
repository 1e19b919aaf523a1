// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime.h>

#include <algorithm>

#include "fill.cuh"

namespace fm3::sm90 {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads)
    fill_kernel(Shape shape, uint16_t* out, Strides stride, float* lse, int64_t num_rows) {
  for (int64_t row = int64_t{blockIdx.x} * kThreads + threadIdx.x; row < num_rows;
       row += int64_t{gridDim.x} * kThreads) {
    const int64_t q_idx = row % shape.s_q, h_idx = row / shape.s_q % shape.h_q;
    const int64_t b_idx = row / shape.s_q / shape.h_q;
    uint16_t* values = out + b_idx * stride.b + q_idx * stride.s + h_idx * stride.h;  // [d_v]
    for (int32_t col = 0; col < shape.d_v; ++col) values[col] = 0;
    lse[row] = -INFINITY;
  }
}

}  // namespace

cudaError_t fill_empty_rows(const FwdParams& params, cudaStream_t stream) {
  const Shape& shape = params.shape;
  const int64_t num_rows = int64_t{shape.b} * shape.h_q * shape.s_q;
  const auto num_ctas =
      static_cast<uint32_t>(std::min<int64_t>((num_rows + kThreads - 1) / kThreads, 4096));
  fill_kernel<<<num_ctas, kThreads, 0, stream>>>(shape, static_cast<uint16_t*>(params.out),
                                                 params.stride_out, params.lse, num_rows);
  return cudaGetLastError();
}

}  // namespace fm3::sm90
