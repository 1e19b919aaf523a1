// SPDX-License-Identifier: Apache-2.0
// Online softmax of the two score rows a thread holds of a wgmma accumulator (wgmma.cuh).
#pragma once

#ifdef __CUDACC__
#include "ptx.cuh"
#endif  // else a test on the host, which brings its own

namespace fm3::sm90 {

// The reference m of a row need not be its maximum: it cancels in O / sum. It only has to keep
// exp2(scale * (score - m)) in range. So
//   * m lags behind the maximum by up to 2^kSlackLog2 and O is rescaled only in the few steps where
//     the maximum really grows (P stays below 256, fine for bf16 and fp16);
//   * once a row has an m, the search for the maximum may be left out: a quarter of the softmax's
//     time. If the sums then show that a score was far above m, the caller computes the scores again
//     and searches.
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

  // m follows the maximum of the scores where that is far above. `rescale` must follow before O is added to again.
  template <int kCount>
  __device__ __forceinline__ void follow_maximum(const float (&scores)[kCount]) {
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
    }
  }

  // True (for the whole warp) if every row has a finite m, so that the search may be left out.
  __device__ __forceinline__ bool has_reference() const {
    return __all_sync(0xFFFFFFFF, max_[0] > -INFINITY && max_[1] > -INFINITY);
  }

  // scores -> P = exp2(scale_log2 * (scores - m)), in pairs of T; the thread's part of the row sums grows. False
  // (for the whole warp), with the sums as they were and the scores lost, if a row's part exceeds
  // kSumLimit<T> or is NaN and m has not just followed the maximum (`is_sure`).
  // `middle` runs before the first pair is written, while exponentials are under way.
  //
  // NOTE: bits 1 to 7 of `never` are 0, which the compiler must not know. ptxas keeps to the order of basic
  // blocks; within one it moves a wait in `middle` ahead of everything, and adds an exponential when it
  // counts on its result, too early, so that one is begun every 13 cycles instead of 8. So blocks of 16 end
  // in a branch that is not taken and changes what both sides use; each asks for another bit, or they
  // become one. Exponentials and packing of a step of 160 columns: 1,645 cycles in one block, 1,331 so.
  // kHoldsBlocks: the branch changes all values of its block and the next. Without that ptxas still moves those it
  // leaves alone, some 50 of 80 into one block.
  template <class T, bool kHoldsBlocks = false, int kCount, class Middle>
  __device__ __forceinline__ bool exponentiate(float (&scores)[kCount],
                                               uint32_t (&packed)[kCount / 2], bool is_sure,
                                               int32_t never, Middle middle) {
    constexpr int kLast = (kCount - 1) / kBlock * kBlock;
    constexpr int kMiddle = kCount * 4 / 5 / kBlock * kBlock;          // O takes about as long
    float shift[2], parts[4] = {0.0f, 0.0f, 0.0f, 0.0f}, step_sum[2];  // sums of idx % 4
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      shift[half] = max_[half] == -INFINITY ? 0.0f : -max_[half] * scale_log2_;
    }
#pragma unroll
    for (int begin = -kBlock; begin < kCount; begin += kBlock) {
      if (never & (2 << (begin / kBlock + 1))) {
        constexpr int kFrom = kHoldsBlocks ? 0 : -8, kTo = kHoldsBlocks ? 2 * kBlock : 4;
#pragma unroll
        for (int idx = begin + kFrom; idx < begin + kTo; ++idx) {
          if (idx >= 0 && idx < kCount) scores[idx] *= scale_log2_;
        }
#pragma unroll
        for (float& part : parts) part *= scale_log2_;
      }
      if (begin == kMiddle) middle();
#pragma unroll
      for (int idx = begin; idx < begin + kBlock; ++idx) {
        const int next = idx + kBlock, last = idx - kBlock;
        if (next < kCount) scores[next] = fmaf(scores[next], scale_log2_, shift[next / 2 % 2]);
        if (idx >= 0 && idx < kCount) scores[idx] = ptx::exp2_approx(scores[idx]);
        if (last >= 0) parts[last % 4] += scores[last];
        if (begin == kMiddle && idx % 2 == 0) {  // all blocks before, spread over this one
          constexpr int kBlocks = kMiddle / kBlock;
#pragma unroll
          for (int at = (idx - begin) * kBlocks; at < (idx - begin + 2) * kBlocks; at += 2) {
            packed[at / 2] = ptx::pack2<T>(scores[at], scores[at + 1]);
          }
        } else if (begin > kMiddle && idx % 2 == 0) {
          packed[last / 2] = ptx::pack2<T>(scores[last], scores[last + 1]);
        }
      }
#pragma unroll
      for (int idx = begin + kBlock; idx < begin + 2 * kBlock && idx < kCount; ++idx) {
        ptx::pin(scores[idx]);
      }
#pragma unroll
      for (float& part : parts) ptx::pin(part);
    }
#pragma unroll
    for (int idx = kLast; idx < kCount; ++idx) {
      parts[idx % 4] += scores[idx];
      if (idx % 2 == 0) packed[idx / 2] = ptx::pack2<T>(scores[idx], scores[idx + 1]);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) step_sum[half] = parts[2 * half] + parts[2 * half + 1];
    const bool is_good = step_sum[0] <= kSumLimit<T> && step_sum[1] <= kSumLimit<T>;
    if (!__all_sync(0xFFFFFFFF, is_good || is_sure)) return false;
    sum_[0] += step_sum[0];
    sum_[1] += step_sum[1];
    return true;
  }

  // The same without `middle`, slower, whatever the sums are; to the last bit, so that a row does not depend on
  // which of the two it met.
  template <class T, int kCount>
  __device__ __forceinline__ void exponentiate_any(float (&scores)[kCount],
                                                   uint32_t (&packed)[kCount / 2]) {
    float parts[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int idx = 0; idx < kCount; ++idx) {
      const float max = max_[idx / 2 % 2];
      const float shift = max == -INFINITY ? 0.0f : -max * scale_log2_;
      scores[idx] = ptx::exp2_approx(fmaf(scores[idx], scale_log2_, shift));
      parts[idx % 4] += scores[idx];
      if (idx % 2 == 1) packed[idx / 2] = ptx::pack2<T>(scores[idx - 1], scores[idx]);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) sum_[half] += parts[2 * half] + parts[2 * half + 1];
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
    return row_sum == 0.0f
               ? -INFINITY
               : fmaf(max_[half], softmax_scale, 0.6931472f * ptx::log2_approx(row_sum));
  }

 private:
  static constexpr int kBlock = 16;

  float scale_log2_;
  float max_[2], sum_[2], factor_[2];
};

}  // namespace fm3::sm90
