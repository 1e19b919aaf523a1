// SPDX-License-Identifier: Apache-2.0
// Included by each file of instantiations/, once.
#pragma once

#include "kernel.cuh"

namespace fm3::sm90_bwd {
// NOTE: the unnamed namespace is needed. The host stub of a kernel is private to its object file; a
// launch helper merged across objects would set the attribute of one stub and launch another.
namespace {

template <class C>
cudaError_t launch(const KernelArgs& args, int32_t num_ctas, cudaStream_t stream) {
  constexpr int32_t kSmemBytes = sizeof(Smem<C>);
  static_assert(kSmemBytes <= 227 * 1024, "more than one CTA can have");
  const cudaError_t error =
      cudaFuncSetAttribute(bwd_kernel<C>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmemBytes);
  if (error != cudaSuccess) return error;
  bwd_kernel<C><<<num_ctas, kNumThreads, kSmemBytes, stream>>>(args);
  return cudaGetLastError();
}

template <class C>
constexpr BwdKernel make_kernel(DType dtype) {
  static_assert(has_lists(C::kBlockK), "prepared schedules have lists of kBlockKs (lists.h) only");
  return {dtype,
          C::kDim,
          C::kDimV,
          C::kBlockK,
          C::kDqParts,
          !C::kSplitsColumns,
          C::kPacksRows,
          !C::kSplitsColumns,
          kServesRemote<C>,
          launch<C>};
}

}  // namespace
}  // namespace fm3::sm90_bwd
