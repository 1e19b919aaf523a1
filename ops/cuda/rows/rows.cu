// SPDX-License-Identifier: Apache-2.0
// Memory-bound kernels: 16 bytes at a time, several under way in a thread, float32 sums in a fixed order.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>

#include "../ptx.cuh"
#include "divisor.h"
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

// Vectors of a thread, kThreads apart: more where each costs few registers. (H200, 8K rows, 64/8 heads, us: own sums with
// 1, 2, 4: 12.6, 11.9, 14.2; pack 7.3, a merge of two parts 60. With 64-bit divisions and one vector: 14.6, 9.4, 82.)
constexpr int kSumEach = 2, kPackEach = 4, kMergeEach = 4;

// What pack and sum_rows do to K does the same launch to V: a launch costs 1 to 3 us. blockIdx.z is the tensor.
template <class Params>
struct Tensors {
  Params params[kMostRowTensors];
  uint32_t num_vecs[kMostRowTensors];
  Divisor row_vecs[kMostRowTensors], heads[kMostRowTensors];
};

// The first of them; blockIdx.y is a batch entry.
template <int kEach>
__device__ __forceinline__ uint32_t first_vec() {
  return blockIdx.x * (kThreads * kEach) + threadIdx.x;
}

// Threads of a row read its entries together.
template <class T, class Out>
__global__ void __launch_bounds__(kThreads)
    sum_rows_kernel(const __grid_constant__ Tensors<SumRowsParams> tensors) {
  const SumRowsParams& params = tensors.params[blockIdx.z];
  const Divisor& row_vecs = tensors.row_vecs[blockIdx.z];
  const uint32_t num_vecs = tensors.num_vecs[blockIdx.z];
  const int64_t b_idx = blockIdx.y;
  const T* const part = static_cast<const T*>(params.part) + b_idx * params.part_stride_b;
  const T* const narrow = static_cast<const T*>(params.narrow) + b_idx * params.narrow_stride_b;
  const float* const wide = params.wide + b_idx * params.wide_stride_b;
  Out* const out = static_cast<Out*>(params.out) + b_idx * params.out_stride_b;
  SumRow row[kSumEach];
  int32_t elem[kSumEach];
#pragma unroll
  for (int each = 0; each < kSumEach; ++each) {
    const uint32_t vec_idx = first_vec<kSumEach>() + each * kThreads;
    row[each] = {0, 0, 0, 0};
    if (vec_idx >= num_vecs) continue;
    const uint32_t row_idx = row_vecs.quotient(vec_idx);
    elem[each] = static_cast<int32_t>(row_vecs.remainder(vec_idx, row_idx)) * kVec;
    row[each] = params.rows[row_idx];
  }
  Vec sum[kSumEach];
#pragma unroll
  for (int each = 0; each < kSumEach; ++each) {
    if (first_vec<kSumEach>() + each * kThreads >= num_vecs) break;
    sum[each] = load(part + int64_t{row[each].part} * params.row_elems + elem[each]);
  }
#pragma unroll
  for (int each = 0; each < kSumEach; ++each) {
    if (first_vec<kSumEach>() + each * kThreads >= num_vecs) break;
    for (int32_t entry_idx = row[each].entry_begin; entry_idx < row[each].entry_end; ++entry_idx) {
      const int32_t entry = __ldg(&params.entries[entry_idx]);
      add(sum[each], entry >= 0 ? load(narrow + int64_t{entry} * params.row_elems + elem[each])
                                : load(wide + int64_t{-1 - entry} * params.row_elems + elem[each]));
    }
    store(out + int64_t{row[each].out} * params.row_elems + elem[each], sum[each]);
  }
}

__global__ void __launch_bounds__(kThreads)
    pack_kernel(const __grid_constant__ Tensors<PackParams> tensors,
                const __grid_constant__ PackWords words) {
  if (blockIdx.x == 0 && blockIdx.y == 0 && blockIdx.z == 0 && threadIdx.x < kMostBeginWords) {
    if (words.begins[threadIdx.x] != nullptr) {
      ptx::store_release_system(words.begins[threadIdx.x], words.begin_values[threadIdx.x]);
    }
  }
  const PackParams& params = tensors.params[blockIdx.z];
  const Divisor &head_vecs = tensors.row_vecs[blockIdx.z], &heads = tensors.heads[blockIdx.z];
  const uint32_t num_vecs = tensors.num_vecs[blockIdx.z];
  const auto* const from =
      static_cast<const uint16_t*>(params.from) + blockIdx.y * params.stride_from.b;
  auto* const to = static_cast<uint16_t*>(params.to) + blockIdx.y * params.to_stride_b;
  uint4 raw[kPackEach];
#pragma unroll
  for (int each = 0; each < kPackEach; ++each) {
    const uint32_t vec_idx = first_vec<kPackEach>() + each * kThreads;
    if (vec_idx >= num_vecs) break;
    const uint32_t head_idx = head_vecs.quotient(vec_idx), s_idx = heads.quotient(head_idx);
    raw[each] = __ldg(
        reinterpret_cast<const uint4*>(from + s_idx * params.stride_from.s +
                                       heads.remainder(head_idx, s_idx) * params.stride_from.h +
                                       head_vecs.remainder(vec_idx, head_idx) * kVec));
  }
#pragma unroll
  for (int each = 0; each < kPackEach; ++each) {
    const uint32_t vec_idx = first_vec<kPackEach>() + each * kThreads;
    if (vec_idx >= num_vecs) break;
    *reinterpret_cast<uint4*>(to + int64_t{vec_idx} * kVec) = raw[each];
  }
  if (words.num_ready == 0) return;
  // Claim:      who sees a ready word sees all rows.
  // Because:    a block's rows come before its barrier, that before its first thread's fence and count; the block that
  //             counts last sees all others', and its release to the system comes after them. (With a fence to the system
  //             in every block, and two waits and a memset more before the forward, this took 3 us longer at 8/1 heads, 6
  //             at 64/8: H200, 2026-11-30, tools/bench_cp.py, 8K rows.)
  // Breaks if:  a block leaves before the barrier.
  // Tested by:  test/gpu/test_rows.py
  __syncthreads();
  if (threadIdx.x != 0) return;
  __threadfence();
  const uint32_t num_blocks = gridDim.x * gridDim.y * gridDim.z;
  if (atomicAdd(words.num_done, 1) != num_blocks - 1) return;
  *words.num_done = 0;
  __threadfence_system();
  for (int idx = 0; idx < words.num_ready; ++idx) {
    ptx::store_release_system(words.ready[idx], words.ready_value + idx);
  }
}

// One thread a vector of an output row: weights exp(lse_p - top) of the parts, normalised. A row
// that no part sees stays 0 with lse -inf, a NaN in any lse makes the row NaN.
template <class T>
__global__ void __launch_bounds__(kThreads)
    merge_kernel(const __grid_constant__ MergeParams params, Divisor row_vecs, Divisor heads,
                 uint32_t num_vecs) {
  const int64_t b_idx = blockIdx.y;
#pragma unroll 1
  for (int each = 0; each < kMergeEach; ++each) {
    const uint32_t vec_idx = first_vec<kMergeEach>() + each * kThreads;
    if (vec_idx >= num_vecs) return;
    const uint32_t row_idx = row_vecs.quotient(vec_idx), q_idx = heads.quotient(row_idx);
    const uint32_t h_idx = heads.remainder(row_idx, q_idx);
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
      const Vec part =
          load(static_cast<const T*>(params.parts[part_idx]) + (b_idx * num_vecs + vec_idx) * kVec);
#pragma unroll
      for (int idx = 0; idx < kVec; ++idx) sum.x[idx] = fmaf(weight, part.x[idx], sum.x[idx]);
    }
    const float inverse = total == 0.f ? 0.f : 1.f / total;
#pragma unroll
    for (int idx = 0; idx < kVec; ++idx) sum.x[idx] *= inverse;
    const uint32_t elem = row_vecs.remainder(vec_idx, row_idx) * kVec;
    store(static_cast<T*>(params.out) + b_idx * params.stride_out.b + q_idx * params.stride_out.s +
              h_idx * params.stride_out.h + elem,
          sum);
    if (elem == 0) params.lse[lse_at] = total == 0.f ? -INFINITY : safe + logf(total);
  }
}

uint32_t num_ctas(int64_t num_vecs) {
  return static_cast<uint32_t>(std::min<int64_t>((num_vecs + kThreads - 1) / kThreads, kMaxCtas));
}

// Of num_vecs vectors, each thread taking kEach.
template <int kEach>
uint32_t num_blocks(int64_t num_vecs) {
  static_assert(kMostRowVecs + kThreads * kEach <= INT32_MAX);
  return static_cast<uint32_t>((num_vecs + kThreads * kEach - 1) / (kThreads * kEach));
}

// Blocks over `count` tensors of b batch entries; the dispatch has checked sizes. None: 0 in x.
template <int kEach, class Params>
dim3 grid_of(const Tensors<Params>& tensors, int32_t count, int32_t b) {
  const int64_t most_vecs = *std::max_element(tensors.num_vecs, tensors.num_vecs + count);
  return dim3(b == 0 ? 0 : num_blocks<kEach>(most_vecs), static_cast<uint32_t>(std::max(b, 1)),
              static_cast<uint32_t>(count));
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

cudaError_t sum_rows(const SumRowsParams* params, int32_t count, cudaStream_t stream) {
  Tensors<SumRowsParams> tensors = {};
  for (int32_t idx = 0; idx < count; ++idx) {
    const int32_t row_vecs = params[idx].row_elems / kVec;
    tensors.params[idx] = params[idx];
    tensors.row_vecs[idx] = Divisor(std::max(row_vecs, 1));
    tensors.num_vecs[idx] = static_cast<uint32_t>(int64_t{params[idx].num_rows} * row_vecs);
  }
  const dim3 grid = grid_of<kSumEach>(tensors, count, params->b);
  if (grid.x == 0) return cudaSuccess;
  const auto launch = [&](auto* kernel) {
    kernel<<<grid, kThreads, 0, stream>>>(tensors);
    return cudaGetLastError();
  };
  if (params->dtype == DType::kBFloat16) {
    return params->is_out_float32 ? launch(sum_rows_kernel<__nv_bfloat16, float>)
                                  : launch(sum_rows_kernel<__nv_bfloat16, __nv_bfloat16>);
  }
  return params->is_out_float32 ? launch(sum_rows_kernel<__half, float>)
                                : launch(sum_rows_kernel<__half, __half>);
}

cudaError_t pack(const PackParams* params, int32_t count, const PackWords* words,
                 cudaStream_t stream) {
  Tensors<PackParams> tensors = {};
  for (int32_t idx = 0; idx < count; ++idx) {
    const PackParams& one = params[idx];
    const int32_t head_vecs = one.d / kVec;
    tensors.params[idx] = one;
    tensors.row_vecs[idx] = Divisor(std::max(head_vecs, 1));
    tensors.heads[idx] = Divisor(std::max(one.h, 1));
    tensors.num_vecs[idx] = static_cast<uint32_t>(int64_t{one.s} * one.h * head_vecs);
  }
  dim3 grid = grid_of<kPackEach>(tensors, count, params->b);
  if (grid.x == 0 && words == nullptr) return cudaSuccess;
  if (grid.x == 0) grid = dim3(1);  // nothing to wait for
  pack_kernel<<<grid, kThreads, 0, stream>>>(tensors, words == nullptr ? PackWords{} : *words);
  return cudaGetLastError();
}

cudaError_t merge(const MergeParams& params, cudaStream_t stream) {
  const int32_t row_vecs = params.d_v / kVec;
  if (row_vecs == 0 || params.h_q == 0) return cudaSuccess;
  const int64_t num_vecs = int64_t{params.s_q} * params.h_q * row_vecs;
  if (params.b == 0 || num_vecs == 0) return cudaSuccess;
  const dim3 grid(num_blocks<kMergeEach>(num_vecs), static_cast<uint32_t>(params.b));
  const auto launch = [&](auto* kernel) {
    kernel<<<grid, kThreads, 0, stream>>>(params, Divisor(row_vecs), Divisor(params.h_q),
                                          static_cast<uint32_t>(num_vecs));
    return cudaGetLastError();
  };
  return params.dtype == DType::kBFloat16 ? launch(merge_kernel<__nv_bfloat16>)
                                          : launch(merge_kernel<__half>);
}

}  // namespace fm3::sm90
