// SPDX-License-Identifier: Apache-2.0
// Included by each file of instantiations/, once.
#pragma once

#include "kernel.cuh"

namespace fm3::sm90 {
// NOTE: the unnamed namespace is needed. The host stub of a kernel is private to its object file; a
// launch helper merged across objects would set the attribute of one stub and launch another.
namespace {

template <class Config>
cudaError_t launch(const FwdArgs& args, int32_t num_ctas, cudaStream_t stream) {
  const cudaError_t error = cudaFuncSetAttribute(
      fwd_kernel<Config>, cudaFuncAttributeMaxDynamicSharedMemorySize, Config::kSmemBytes);
  if (error != cudaSuccess) return error;
  fwd_kernel<Config><<<num_ctas, Config::kThreads, Config::kSmemBytes, stream>>>(args);
  return cudaGetLastError();
}

template <class Config>
constexpr FwdKernel make_kernel(DType dtype) {
  return {dtype, Config::kHeadQk, Config::kHeadV, Config::kCols, launch<Config>};
}

}  // namespace
}  // namespace fm3::sm90
