// SPDX-License-Identifier: Apache-2.0
// Included by each file of instantiations/, once.
#pragma once

#include "kernel.cuh"

namespace fm3::sm90 {
// NOTE: the unnamed namespace is needed. The host stub of a kernel is private to its object file; a
// launch helper merged across objects would set the attribute of one stub and launch another.
namespace {

template <class Single, class Pair>
cudaError_t launch(const FwdArgs& args, int32_t num_ctas, cudaStream_t stream) {
  constexpr int kSmemBytes =
      Single::kSmemBytes > Pair::kSmemBytes ? Single::kSmemBytes : Pair::kSmemBytes;
  const cudaError_t error = cudaFuncSetAttribute(
      fwd_kernel<Single, Pair>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmemBytes);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute cluster;
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {Pair::kTeam, 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = num_ctas, config.blockDim = Single::kThreads;
  config.dynamicSmemBytes = kSmemBytes, config.stream = stream;
  config.attrs = &cluster, config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, fwd_kernel<Single, Pair>, args);
}

// Heads up to 128 take an item in one step; wider ones lack the shared memory, take the items of
// single tiles in two, and never pair.
template <int kHeadQk, int kHeadV, class T>
constexpr FwdKernel make_kernel(DType dtype) {
  if constexpr (kHeadQk <= 128) {
    return {dtype,
            kHeadQk,
            kHeadV,
            kTileItemCols,
            kPairItemCols,
            launch<FwdConfig<kHeadQk, kHeadV, kTileItemCols, false, T>,
                   FwdConfig<kHeadQk, kHeadV, kPairItemCols, true, T>>};
  } else {
    using Single = FwdConfig<kHeadQk, kHeadV, kTileItemCols / 2, false, T>;
    return {dtype, kHeadQk, kHeadV, Single::kCols, Single::kCols, launch<Single, Single>};
  }
}

}  // namespace
}  // namespace fm3::sm90
