// SPDX-License-Identifier: Apache-2.0
// Results that must not be used become NaN, on the stream, so that the host need not wait to know: of a mask that was
// prepared once and is no longer what it was, or of transfers that failed.
#include <cuda_runtime.h>

#include <algorithm>

#include "rows.cuh"

namespace fm3::sm90 {
namespace {

constexpr int kThreads = 256;
constexpr int kPerThread = 4;      // consecutive values, one vector where memory allows
constexpr int64_t kMaxCtas = 528;  // four on each multiprocessor of an H200

// Where value `idx` of the kept copy lies in the strided tensor.
__device__ __forceinline__ int64_t offset_of(const CheckSameParams& params, int64_t idx) {
  int64_t offset = 0;
#pragma unroll
  for (int axis = 3; axis >= 0; --axis) {
    offset += idx % params.sizes[axis] * params.stride_given[axis];
    idx /= params.sizes[axis];
  }
  return offset;
}

__device__ void fill_ones(void* memory, int64_t bytes) {  // NaN in every float format
  const int64_t num_vecs = bytes / 16;
  for (int64_t idx = threadIdx.x; idx < num_vecs; idx += kThreads) {
    static_cast<uint4*>(memory)[idx] = make_uint4(~0u, ~0u, ~0u, ~0u);
  }
  for (int64_t idx = num_vecs * 4 + threadIdx.x; idx < bytes / 4; idx += kThreads) {
    static_cast<uint32_t*>(memory)[idx] = ~0u;
  }
}

template <bool kIsDense>
__global__ void __launch_bounds__(kThreads)
    check_same_kernel(const __grid_constant__ CheckSameParams params, int64_t num_values) {
  bool is_different = false;
  const int64_t step = int64_t{gridDim.x} * kThreads * kPerThread;
  for (int64_t begin = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * kPerThread;
       begin < num_values; begin += step) {
    if (kIsDense && begin + kPerThread <= num_values) {
      const int4 given = *reinterpret_cast<const int4*>(params.given + begin);
      const int4 kept = *reinterpret_cast<const int4*>(params.kept + begin);
      is_different |=
          given.x != kept.x || given.y != kept.y || given.z != kept.z || given.w != kept.w;
    } else {
      for (int64_t idx = begin; idx < min(begin + kPerThread, num_values); ++idx) {
        is_different |= params.given[offset_of(params, idx)] != params.kept[idx];
      }
    }
  }
  const bool has_failed = blockIdx.x == 0 && threadIdx.x == 0 && params.failed != nullptr &&
                          *static_cast<const volatile uint32_t*>(params.failed) != 0;
  const bool is_stale = __syncthreads_or(is_different);
  if (!__syncthreads_or(has_failed) && !is_stale) return;
  __shared__ bool is_first;
  if (threadIdx.x == 0) {
    is_first = atomicMax(params.claim, params.number) < params.number;
    if (is_stale) *static_cast<volatile uint32_t*>(params.word) = params.number;
  }
  __syncthreads();
  if (!is_first) return;  // one CTA does it: nobody waits for this to be fast
  for (int idx = 0; idx < params.num_outputs; ++idx) {
    fill_ones(params.outputs[idx], params.output_bytes[idx]);
  }
}

}  // namespace

cudaError_t check_same(const CheckSameParams& params, cudaStream_t stream) {
  int64_t num_values = 1;
  bool is_dense = reinterpret_cast<uintptr_t>(params.given) % 16 == 0;
  for (int axis = 3; axis >= 0; --axis) {
    is_dense = is_dense && (params.sizes[axis] == 1 || params.stride_given[axis] == num_values);
    num_values *= params.sizes[axis];
  }
  if (num_values == 0 && params.failed == nullptr) return cudaSuccess;
  const int64_t per_cta = kThreads * kPerThread;
  const auto ctas =
      static_cast<uint32_t>(std::clamp((num_values + per_cta - 1) / per_cta, int64_t{1}, kMaxCtas));
  if (is_dense) {
    check_same_kernel<true><<<ctas, kThreads, 0, stream>>>(params, num_values);
  } else {
    check_same_kernel<false><<<ctas, kThreads, 0, stream>>>(params, num_values);
  }
  return cudaGetLastError();
}

}  // namespace fm3::sm90
