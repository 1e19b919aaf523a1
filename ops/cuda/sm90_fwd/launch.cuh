// SPDX-License-Identifier: Apache-2.0
// Included by each file of instantiations/, once.
#pragma once

#include "kernel.cuh"

namespace fm3::sm90 {
// NOTE: the unnamed namespace is needed. The host stub of a kernel is private to its object file; a
// launch helper merged across objects would set the attribute of one stub and launch another.
namespace {

template <class Own, class Pair>
cudaError_t launch_one(const FwdArgs& args, int32_t num_ctas, cudaStream_t stream) {
  constexpr int kSmemBytes =
      Own::kSmemBytes > Pair::kSmemBytes ? Own::kSmemBytes : Pair::kSmemBytes;
  const cudaError_t error = cudaFuncSetAttribute(
      fwd_kernel<Own, Pair>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmemBytes);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute cluster;
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {Pair::kTeam, 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = num_ctas, config.blockDim = Own::kThreads;
  config.dynamicSmemBytes = kSmemBytes, config.stream = stream;
  config.attrs = &cluster, config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, fwd_kernel<Own, Pair>, args);
}

// Where query tiles may leave the grid, two kernels are launched, of which one ends at once: whether they do is on the
// device only (is_cut). In one kernel both would get other registers and spill; tiles on the grid taken by the kernel for
// any tiles cost 1.5 % more cycles on 8K windows, 1.1 with grouped heads.
template <class Own, class Pair>
cudaError_t launch_kernel(const FwdArgs& args, int32_t num_ctas, cudaStream_t stream) {
  const cudaError_t error = launch_one<Own, Pair>(args, num_ctas, stream);
  if (error != cudaSuccess || args.schedule.q_begins == nullptr) return error;
  return launch_one<typename Own::Cut, typename Pair::Cut>(args, num_ctas, stream);
}

// Whether query heads 2 i and 2 i + 1 always have one key head and one row of masks.
inline bool has_head_pairs(const FwdArgs& args) {
  return args.h_q / args.h_kv % 2 == 0 && args.h_q / args.mask.h_mask % 2 == 0;
}

// Two heads share each step where they can. Masks without bounds are best in pairs of tiles, whose lists
// are nearly equal and whose steps are wider.
template <int kHeadQk, int kHeadV, class T>
cudaError_t launch(const FwdArgs& args, int32_t num_ctas, cudaStream_t stream) {
  if (has_head_pairs(args) && args.mask.form != BoundForm::kNone) {
    using Heads = FwdConfig<kHeadQk, kHeadV, kTileItemCols, Team::kHeads, T>;
    return launch_kernel<Heads, Heads>(args, num_ctas, stream);
  }
  using Single = FwdConfig<kHeadQk, kHeadV, kTileItemCols, Team::kNone, T>;
  using Pair = FwdConfig<kHeadQk, kHeadV, kPairItemCols, Team::kTiles, T>;
  return launch_kernel<Single, Pair>(args, num_ctas, stream);
}

// Heads up to 128 take an item in one step. Wider ones lack the shared memory to pair, and all but 192/128
// take an item in two.
template <int kHeadQk, int kHeadV, class T>
constexpr FwdKernel make_kernel(DType dtype) {
  if constexpr (kHeadQk <= 128) {
    return {dtype, kHeadQk, kHeadV, kTileItemCols, kPairItemCols, launch<kHeadQk, kHeadV, T>};
  } else {
    constexpr int kCols = kHeadQk + kHeadV <= 320 ? kTileItemCols : kTileItemCols / 2;
    using Single = FwdConfig<kHeadQk, kHeadV, kCols, Team::kNone, T>;
    return {dtype, kHeadQk, kHeadV, Single::kCols, Single::kCols, launch_kernel<Single, Single>};
  }
}

}  // namespace
}  // namespace fm3::sm90
