// SPDX-License-Identifier: Apache-2.0
// Online softmax of the two score rows a thread holds of a wgmma accumulator (wgmma.cuh).
#pragma once

#include "ptx.cuh"

namespace fm3::sm90 {

// The reference m of a row need not be its maximum: it cancels in O / sum. It only has to keep
// exp2(scale * (score - m)) in range. So
//   * m lags behind the maximum by up to 2^kSlackLog2 and O is rescaled only in the few steps where
//     the maximum really grows (P stays below 256, fine for bf16 and fp16);
//   * once a row has an m, the search for the maximum may be left out (`exponentiate_as_is`): a
//     quarter of the softmax's time. If the sums then show that a score was far above m, the caller
//     computes the scores again and takes the first way.
constexpr float kSlackLog2 = 8.0f;
// Of one thread's part of a row in one step, and so of each P: what T holds with room to spare.
template <class T>
constexpr float kSumLimit = 1048576.0f;
template <>
inline constexpr float kSumLimit<__half> = 32768.0f;

class RowSoftmax {
 public:
  __device__ __forceinline__ explicit RowSoftmax(float scale_log2) : scale_log2_(scale_log2) {
    start_tile();
  }

  __device__ __forceinline__ void start_tile() {
#pragma unroll
    for (int half = 0; half < 2; ++half) max_[half] = -INFINITY, sum_[half] = 0.0f;
  }

  // scores -> exp2(scale_log2 * (scores - m)), updating m and the thread's part of the row sums.
  // `rescale` must follow before O is added to again.
  template <int kCount>
  __device__ __forceinline__ void exponentiate(float (&scores)[kCount]) {
    static_assert(kCount >= 16);
    float new_max[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float parts[4];  // independent chains
#pragma unroll
      for (int idx = 2 * half; idx < kCount; idx += 4) {
        const float pair = fmaxf(scores[idx], scores[idx + 1]);
        float& part = parts[idx / 4 % 4];
        part = idx < 16 ? pair : fmaxf(part, pair);
      }
      new_max[half] = fmaxf(fmaxf(parts[0], parts[1]), fmaxf(parts[2], parts[3]));
      new_max[half] = fmaxf(new_max[half], __shfl_xor_sync(0xFFFFFFFF, new_max[half], 1));
      new_max[half] = fmaxf(new_max[half], __shfl_xor_sync(0xFFFFFFFF, new_max[half], 2));
    }
    needs_rescale_ = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // -inf - -inf is NaN: the comparison is false and m stays -inf.
      const bool grows = (new_max[half] - max_[half]) * scale_log2_ > kSlackLog2;
      factor_[half] = 1.0f;
      if (grows) {
        factor_[half] = ptx::exp2_approx((max_[half] - new_max[half]) * scale_log2_);
        max_[half] = new_max[half];
        sum_[half] *= factor_[half];
      }
      needs_rescale_ |= grows;
    }
    float step_sum[2];
    exponentiate_rows(scores, step_sum);
    sum_[0] += step_sum[0];
    sum_[1] += step_sum[1];
  }

  // True (for the whole warp) if every row has a finite m, so that `exponentiate_as_is` may be tried.
  __device__ __forceinline__ bool has_reference() const {
    return __all_sync(0xFFFFFFFF, max_[0] > -INFINITY && max_[1] > -INFINITY);
  }

  // As `exponentiate` with m as it is. False (for the whole warp), with nothing updated and the
  // scores lost, if a row's part exceeds kSumLimit<T> or is NaN.
  template <class T, int kCount>
  __device__ __forceinline__ bool exponentiate_as_is(float (&scores)[kCount]) {
    float step_sum[2];
    exponentiate_rows(scores, step_sum);
    const bool is_good = step_sum[0] <= kSumLimit<T> && step_sum[1] <= kSumLimit<T>;
    if (!__all_sync(0xFFFFFFFF, is_good)) return false;
    sum_[0] += step_sum[0];
    sum_[1] += step_sum[1];
    factor_[0] = factor_[1] = 1.0f;  // not kept in registers from the step before
    return true;
  }

  // Uniform in the warp.
  __device__ __forceinline__ bool any_needs_rescale() const {
    return __any_sync(0xFFFFFFFF, needs_rescale_);
  }

  template <int kCount>
  __device__ __forceinline__ void rescale(float (&acc)[kCount]) const {
#pragma unroll
    for (int idx = 0; idx < kCount; ++idx) acc[idx] *= factor_[idx / 2 % 2];
  }

  // Row sum over the four lanes of a row. All lanes must call.
  __device__ __forceinline__ float row_sum(int half) const {
    float sum = sum_[half];
    sum += __shfl_xor_sync(0xFFFFFFFF, sum, 1);
    sum += __shfl_xor_sync(0xFFFFFFFF, sum, 2);
    return sum;
  }

  // Natural log of sum(exp(scale * score)); -inf if no key was visible.
  __device__ __forceinline__ float lse(int half, float row_sum, float softmax_scale) const {
    return row_sum == 0.0f ? -INFINITY : fmaf(max_[half], softmax_scale, logf(row_sum));
  }

 private:
  template <int kCount>
  __device__ __forceinline__ void exponentiate_rows(float (&scores)[kCount], float (&step_sum)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float offset = max_[half] == -INFINITY ? 0.0f : max_[half] * scale_log2_;
      float parts[2] = {0.0f, 0.0f};
#pragma unroll
      for (int idx = 2 * half; idx < kCount; idx += 4) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          scores[idx + e] = ptx::exp2_approx(fmaf(scores[idx + e], scale_log2_, -offset));
          parts[e] += scores[idx + e];
        }
      }
      step_sum[half] = parts[0] + parts[1];
    }
  }

  float scale_log2_;
  float max_[2], sum_[2], factor_[2];
  bool needs_rescale_ = false;
};

}  // namespace fm3::sm90
