// SPDX-License-Identifier: Apache-2.0
// Included once by each parts_<target>.cc, after FM3_TARGET, FM3_PARTS, FM3_VECTOR_BYTES and
// FM3_IS_SUPPORTED are set and every other header is in.
namespace {
using namespace fm3;
using namespace fm3::cpu;
// clang-format off: each of these uses the ones above it
#include "ops/cpu/simd-inl.h"
#include "ops/cpu/gemm-inl.h"
#include "ops/cpu/pack-inl.h"
// clang-format on

void exp2_many(const float* x, int count, float* y) {
  for (int i = 0; i < count; i += kLanes) store(y + i, exp2_nonpositive(load(x + i)));
}

constexpr int kMaxSide = 160;
alignas(64) float a_packed[kMaxSide * kMaxSide], b_packed[kMaxSide * kMaxSide], b_row[kMaxSide];
alignas(64) float c_padded[kMaxSide * kMaxSide];

template <Order kOrder>
void gemm_reference_call(int rows, int cols, int depth, const float* a, const float* b, float* c) {
  const int cols_padded = round_up(cols, kLanes);
  for (float& x : c_padded) x = -1.0f;
  for (int row = 0; row < rows; ++row) {
    for (int k = 0; k < depth; ++k) {
      a_packed[kOrder == Order::kKMajor ? k * kMaxSide + row : row * kMaxSide + k] =
          a[row * depth + k];
    }
  }
  std::memset(b_row, 0, sizeof(b_row));
  for (int k = 0; k < depth; ++k) {
    std::memcpy(b_row, b + k * cols, sizeof(float) * cols);
    scatter_to_panels(b_row, k, depth, cols_padded, b_packed);
  }
  const Panels panels = {b_packed, depth, cols_padded};
  const Range all_rows = {0, round_up(rows, kMicroRows)}, all_cols = {0, cols_padded};
  // In two parts of the depth: the second adds to the first.
  gemm<kOrder, Into::kOverwrite>(all_rows, all_cols, {0, depth / 2}, a_packed, kMaxSide, panels,
                                 c_padded, kMaxSide);
  gemm<kOrder, Into::kAdd>(all_rows, all_cols, {depth / 2, depth}, a_packed, kMaxSide, panels,
                           c_padded, kMaxSide);
  for (int row = 0; row < rows; ++row)
    std::memcpy(c + row * cols, c_padded + row * kMaxSide, sizeof(float) * cols);
}

bool is_supported() { return FM3_IS_SUPPORTED; }
uint16_t to_bf16(float x) { return f32_to_bf16(x); }
float from_bf16(uint16_t x) { return bf16_to_f32(x); }
uint16_t to_f16(float x) { return f32_to_f16(x); }
float from_f16(uint16_t x) { return f16_to_f32(x); }
}  // namespace

const KernelParts FM3_PARTS = {FM3_STRINGIFY(FM3_TARGET),
                               is_supported,
                               kLanes,
                               exp2_many,
                               to_bf16,
                               from_bf16,
                               to_f16,
                               from_f16,
                               gemm_reference_call<Order::kRowMajor>,
                               gemm_reference_call<Order::kKMajor>};
