// SPDX-License-Identifier: Apache-2.0
#include "ops/dispatch/sm90_device.h"

#include <cuda_runtime_api.h>

namespace fm3::sm90 {

std::string check_device(int32_t* num_sms) {
  int device = 0, major = 0, minor = 0, sms = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  }
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  }
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
  }
  if (error != cudaSuccess)
    return std::string("no usable CUDA device: ") + cudaGetErrorString(error);
  if (major != 9 || minor != 0) {
    return "device " + std::to_string(device) + " has compute capability " + std::to_string(major) +
           "." + std::to_string(minor) + "; these kernels are for 9.0 (H100, H200)";
  }
  *num_sms = sms;
  return "";
}

}  // namespace fm3::sm90
