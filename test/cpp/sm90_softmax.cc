// SPDX-License-Identifier: Apache-2.0
// The forward's online softmax on the host, for test/unit/test_sm90_softmax.py: one warp, 16 rows.
#include <cmath>

#include "cuda_on_host.h"

struct __nv_bfloat16 {};
struct __half {};
inline bool __all_sync(uint32_t lanes, bool value) { return __ballot_sync(lanes, value) == ~0u; }

namespace fm3::ptx {
inline float exp2_approx(float x) { return std::exp2(x); }
inline float log2_approx(float x) { return std::log2(x); }
inline void pin(float&) {}
template <class T>
uint32_t pack2(float low, float high) {  // bf16, towards zero
  uint32_t bits[2];
  std::memcpy(&bits[0], &low, 4), std::memcpy(&bits[1], &high, 4);
  return bits[0] >> 16 | (bits[1] & 0xFFFF0000);
}
}  // namespace fm3::ptx
using std::fmaf;

#include "ops/cuda/softmax.cuh"

namespace {

// One value column: O += P v, as the consumer has it.
template <int kCols>
void attend(const float* scores, const float* values, int steps, float scale, bool is_slow,
            float* out, float* lse, int* slow_steps) {
  constexpr int kRegs = kCols / 2;
  const int lane = static_cast<int>(threadIdx.x), row = lane / 4;
  fm3::sm90::RowSoftmax softmax(scale * 1.4426950408889634f);
  bool has_reference = false;
  float acc[4] = {0.0f, 0.0f, 0.0f, 0.0f};  // as two accumulator blocks of one column
  for (int step = 0; step < steps; ++step) {
    auto column = [](int reg) { return reg / 4 * 8 + threadIdx.x % 4 * 2 + reg % 2; };
    float regs[kRegs];
    uint32_t packed[kRegs / 2];
    auto load = [&] {
      for (int reg = 0; reg < kRegs; ++reg) {
        regs[reg] = scores[(step * 16 + row + 8 * (reg / 2 % 2)) * kCols + column(reg)];
      }
    };
    load();
    const bool is_search = !has_reference;
    if (is_search) softmax.follow_maximum(regs), has_reference = softmax.has_reference();
    if (is_slow) {
      if (is_search) softmax.rescale(acc);
      softmax.exponentiate_any<__nv_bfloat16>(regs, packed);
    } else if (!softmax.exponentiate<__nv_bfloat16>(regs, packed, is_search, 1, [&] {
                 if (is_search) softmax.rescale(acc);
               })) {
      load();
      softmax.follow_maximum(regs);
      softmax.rescale(acc);
      softmax.exponentiate_any<__nv_bfloat16>(regs, packed);
      if (lane == 0) ++*slow_steps;
    }
    for (int reg = 0; reg < kRegs; ++reg) {
      const uint32_t bits = reg % 2 ? packed[reg / 2] & 0xFFFF0000 : packed[reg / 2] << 16;
      acc[reg % 4] += cuda_on_host::as<float>(bits) * values[step * kCols + column(reg)];
    }
  }
  for (int half = 0; half < 2; ++half) {
    float sum = acc[2 * half] + acc[2 * half + 1];
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    const float row_sum = softmax.row_sum(half);
    out[row + 8 * half] = sum / row_sum;
    lse[row + 8 * half] = softmax.lse(half, row_sum, scale);
  }
}

}  // namespace

// scores [steps, 16, cols], values [steps, cols]; out, lse [16]; the number of steps that were computed again.
// `is_slow`: by exponentiate_any alone.
extern "C" int softmax_rows(int cols, int steps, float scale, int is_slow, const float* scores,
                            const float* values, float* out, float* lse) {
  int slow_steps = 0;
  auto run = [&](auto kernel) {
    cuda_on_host::launch(1, 32, kernel, scores, values, steps, scale, is_slow != 0, out, lse,
                         &slow_steps);
  };
  if (cols == 80) run(attend<80>);
  if (cols == 160) run(attend<160>);
  if (cols == 176) run(attend<176>);
  return slow_steps;
}
