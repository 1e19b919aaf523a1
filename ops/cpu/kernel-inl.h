// SPDX-License-Identifier: Apache-2.0
// The kernels of one SIMD target. No include guard: a target's .cc includes it once, after setting
// FM3_TARGET (namespace), FM3_TABLE, FM3_VECTOR_BYTES and FM3_IS_SUPPORTED.
namespace fm3::cpu {
namespace FM3_TARGET {
namespace {
// clang-format off: each of these uses the ones above it
#include "ops/cpu/simd-inl.h"
#include "ops/cpu/gemm-inl.h"
#include "ops/cpu/pack-inl.h"
#include "ops/cpu/tile_mask-inl.h"
#include "ops/cpu/forward-inl.h"
#include "ops/cpu/backward-inl.h"
// clang-format on

bool is_supported() { return FM3_IS_SUPPORTED; }
}  // namespace
}  // namespace FM3_TARGET

const KernelTable FM3_TABLE = {
    FM3_STRINGIFY(FM3_TARGET),         FM3_TARGET::is_supported,
    FM3_TARGET::forward_scratch_bytes, FM3_TARGET::backward_scratch_bytes,
    FM3_TARGET::forward_query_tile,    FM3_TARGET::backward_delta,
    FM3_TARGET::backward_key_tile,     FM3_TARGET::backward_store_dq,
};

}  // namespace fm3::cpu
