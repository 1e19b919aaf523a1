// SPDX-License-Identifier: Apache-2.0
// Memory-bound kernels: 16 bytes a thread, float32 sums in a fixed order.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>

#include "rows.cuh"

namespace fm3::sm90 {
namespace {

constexpr int kThreads = 256;
constexpr int kVec = 8;  // elements a thread handles at a time
constexpr int64_t kMaxCtas = 132 * 16;

struct Vec {
  float x[kVec];
};

template <class T>
__device__ __forceinline__ Vec load(const T* from) {
  const uint4 raw = __ldg(reinterpret_cast<const uint4*>(from));
  const T* const values = reinterpret_cast<const T*>(&raw);
  Vec result;
#pragma unroll
  for (int idx = 0; idx < kVec; ++idx) result.x[idx] = static_cast<float>(values[idx]);
  return result;
}
template <>
__device__ __forceinline__ Vec load<float>(const float* from) {
  Vec result;
  *reinterpret_cast<float4*>(result.x) = __ldg(reinterpret_cast<const float4*>(from));
  *reinterpret_cast<float4*>(result.x + 4) = __ldg(reinterpret_cast<const float4*>(from) + 1);
  return result;
}

template <class T>
__device__ __forceinline__ void store(T* to, const Vec& vec) {
  uint4 raw;
  T* const values = reinterpret_cast<T*>(&raw);
#pragma unroll
  for (int idx = 0; idx < kVec; ++idx) values[idx] = static_cast<T>(vec.x[idx]);
  *reinterpret_cast<uint4*>(to) = raw;
}
template <>
__device__ __forceinline__ void store<float>(float* to, const Vec& vec) {
  *reinterpret_cast<float4*>(to) = *reinterpret_cast<const float4*>(vec.x);
  *(reinterpret_cast<float4*>(to) + 1) = *reinterpret_cast<const float4*>(vec.x + 4);
}

__device__ __forceinline__ void add(Vec& sum, const Vec& vec) {
#pragma unroll
  for (int idx = 0; idx < kVec; ++idx) sum.x[idx] += vec.x[idx];
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    sum_parts_kernel(const __grid_constant__ SumPartsParams params) {
  const int64_t num_vecs = params.num_elems / kVec;
  for (int64_t vec_idx = int64_t{blockIdx.x} * kThreads + threadIdx.x; vec_idx < num_vecs;
       vec_idx += int64_t{gridDim.x} * kThreads) {
    Vec sum = load(static_cast<const T*>(params.parts[0]) + vec_idx * kVec);
#pragma unroll 4
    for (int32_t part_idx = 1; part_idx < params.num_parts; ++part_idx) {
      add(sum, load(static_cast<const T*>(params.parts[part_idx]) + vec_idx * kVec));
    }
    store(static_cast<T*>(params.out) + vec_idx * kVec, sum);
  }
}

// One thread a vector of a row; threads of a row read its entries together.
template <class T, class Out>
__global__ void __launch_bounds__(kThreads)
    sum_rows_kernel(const __grid_constant__ SumRowsParams params) {
  const int64_t vecs_per_row = params.row_elems / kVec;
  const int64_t num_vecs = int64_t{params.b} * params.num_rows * vecs_per_row;
  for (int64_t vec_idx = int64_t{blockIdx.x} * kThreads + threadIdx.x; vec_idx < num_vecs;
       vec_idx += int64_t{gridDim.x} * kThreads) {
    const int64_t row_idx = vec_idx / vecs_per_row % params.num_rows;
    const int64_t b_idx = vec_idx / vecs_per_row / params.num_rows;
    const int64_t elem = vec_idx % vecs_per_row * kVec;
    const auto at = [&](int64_t stride_b, int64_t row) {
      return b_idx * stride_b + row * params.row_elems + elem;
    };
    const SumRow row = params.rows[row_idx];
    Vec sum = load(static_cast<const T*>(params.part) + at(params.part_stride_b, row.part));
    for (int32_t entry_idx = row.entry_begin; entry_idx < row.entry_end; ++entry_idx) {
      const int32_t entry = __ldg(&params.entries[entry_idx]);
      add(sum, entry >= 0
                   ? load(static_cast<const T*>(params.narrow) + at(params.narrow_stride_b, entry))
                   : load(params.wide + at(params.wide_stride_b, -1 - entry)));
    }
    store(static_cast<Out*>(params.out) + at(params.out_stride_b, row.out), sum);
  }
}

__global__ void __launch_bounds__(kThreads) pack_kernel(const __grid_constant__ PackParams params) {
  const int64_t vecs_per_head = params.d / kVec;
  const int64_t num_vecs = int64_t{params.b} * params.s * params.h * vecs_per_head;
  for (int64_t vec_idx = int64_t{blockIdx.x} * kThreads + threadIdx.x; vec_idx < num_vecs;
       vec_idx += int64_t{gridDim.x} * kThreads) {
    const int64_t elem = vec_idx % vecs_per_head * kVec;
    const int64_t h_idx = vec_idx / vecs_per_head % params.h;
    const int64_t s_idx = vec_idx / vecs_per_head / params.h % params.s;
    const int64_t b_idx = vec_idx / vecs_per_head / params.h / params.s;
    const auto* from = static_cast<const uint16_t*>(params.from) + b_idx * params.stride_from.b +
                       s_idx * params.stride_from.s + h_idx * params.stride_from.h + elem;
    auto* to = static_cast<uint16_t*>(params.to) + b_idx * params.to_stride_b +
               (s_idx * params.h + h_idx) * params.d + elem;
    *reinterpret_cast<uint4*>(to) = __ldg(reinterpret_cast<const uint4*>(from));
  }
}

// One thread a vector of an output row: weights exp(lse_p - top) of the parts, normalised. A row
// that no part sees stays 0 with lse -inf, a NaN in any lse makes the row NaN.
template <class T>
__global__ void __launch_bounds__(kThreads)
    merge_kernel(const __grid_constant__ MergeParams params) {
  const int64_t vecs_per_row = params.d_v / kVec;
  const int64_t num_vecs = int64_t{params.b} * params.s_q * params.h_q * vecs_per_row;
  for (int64_t vec_idx = int64_t{blockIdx.x} * kThreads + threadIdx.x; vec_idx < num_vecs;
       vec_idx += int64_t{gridDim.x} * kThreads) {
    const int64_t h_idx = vec_idx / vecs_per_row % params.h_q;
    const int64_t q_idx = vec_idx / vecs_per_row / params.h_q % params.s_q;
    const int64_t b_idx = vec_idx / vecs_per_row / params.h_q / params.s_q;
    const int64_t lse_at = (b_idx * params.h_q + h_idx) * params.s_q + q_idx;
    float top = -INFINITY;
    for (int32_t part_idx = 0; part_idx < params.num_parts; ++part_idx) {
      const float lse = __ldg(&params.lses[part_idx][lse_at]);
      top = lse != lse ? lse : fmaxf(top, lse);
      if (lse != lse) break;
    }
    const float safe = top == -INFINITY ? 0.f : top;  // all empty: exp(-inf - 0) = 0
    float total = 0.f;
    Vec sum = {};
    for (int32_t part_idx = 0; part_idx < params.num_parts; ++part_idx) {
      const float weight = expf(__ldg(&params.lses[part_idx][lse_at]) - safe);
      if (weight == 0.f) continue;  // a part that saw nothing
      total += weight;
      const Vec part = load(static_cast<const T*>(params.parts[part_idx]) + vec_idx * kVec);
#pragma unroll
      for (int idx = 0; idx < kVec; ++idx) sum.x[idx] = fmaf(weight, part.x[idx], sum.x[idx]);
    }
    const float inverse = total == 0.f ? 0.f : 1.f / total;
#pragma unroll
    for (int idx = 0; idx < kVec; ++idx) sum.x[idx] *= inverse;
    const int64_t elem = vec_idx % vecs_per_row * kVec;
    store(static_cast<T*>(params.out) + b_idx * params.stride_out.b + q_idx * params.stride_out.s +
              h_idx * params.stride_out.h + elem,
          sum);
    if (elem == 0) params.lse[lse_at] = total == 0.f ? -INFINITY : safe + logf(total);
  }
}

uint32_t num_ctas(int64_t num_vecs) {
  return static_cast<uint32_t>(std::min<int64_t>((num_vecs + kThreads - 1) / kThreads, kMaxCtas));
}

}  // namespace

cudaError_t sum_parts(const SumPartsParams& params, cudaStream_t stream) {
  if (params.num_elems == 0) return cudaSuccess;
  const uint32_t ctas = num_ctas(params.num_elems / kVec);
  if (params.dtype == DType::kBFloat16) {
    sum_parts_kernel<__nv_bfloat16><<<ctas, kThreads, 0, stream>>>(params);
  } else {
    sum_parts_kernel<__half><<<ctas, kThreads, 0, stream>>>(params);
  }
  return cudaGetLastError();
}

cudaError_t sum_rows(const SumRowsParams& params, cudaStream_t stream) {
  const int64_t num_vecs = int64_t{params.b} * params.num_rows * (params.row_elems / kVec);
  if (num_vecs == 0) return cudaSuccess;
  const uint32_t ctas = num_ctas(num_vecs);
  if (params.dtype == DType::kBFloat16 && params.is_out_float32) {
    sum_rows_kernel<__nv_bfloat16, float><<<ctas, kThreads, 0, stream>>>(params);
  } else if (params.dtype == DType::kBFloat16) {
    sum_rows_kernel<__nv_bfloat16, __nv_bfloat16><<<ctas, kThreads, 0, stream>>>(params);
  } else if (params.is_out_float32) {
    sum_rows_kernel<__half, float><<<ctas, kThreads, 0, stream>>>(params);
  } else {
    sum_rows_kernel<__half, __half><<<ctas, kThreads, 0, stream>>>(params);
  }
  return cudaGetLastError();
}

cudaError_t pack(const PackParams& params, cudaStream_t stream) {
  const int64_t num_vecs = int64_t{params.b} * params.s * params.h * (params.d / kVec);
  if (num_vecs == 0) return cudaSuccess;
  pack_kernel<<<num_ctas(num_vecs), kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

cudaError_t merge(const MergeParams& params, cudaStream_t stream) {
  const int64_t num_vecs = int64_t{params.b} * params.s_q * params.h_q * (params.d_v / kVec);
  if (num_vecs == 0) return cudaSuccess;
  if (params.dtype == DType::kBFloat16) {
    merge_kernel<__nv_bfloat16><<<num_ctas(num_vecs), kThreads, 0, stream>>>(params);
  } else {
    merge_kernel<__half><<<num_ctas(num_vecs), kThreads, 0, stream>>>(params);
  }
  return cudaGetLastError();
}

}  // namespace fm3::sm90
