// SPDX-License-Identifier: Apache-2.0
#include "ops/dispatch/sm90_device.h"

#include <cuda_runtime_api.h>

#include <algorithm>

#include "fm3/device_api.h"
#include "fm3/struct_bytes.h"
#include "ops/dispatch/sm90_error.h"

namespace fm3::sm90 {
namespace {

thread_local int32_t reserved_sms = 0;

}  // namespace

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
  *num_sms = std::max(2, (sms - reserved_sms) & ~1);  // even: the forward runs pairs of blocks
  return "";
}

int32_t reserve_sms(int32_t count) {
  if (count < 0) {
    return fail(Status::kInvalidArgument, "fm3_sm90_reserve_sms",
                "count=" + std::to_string(count) + "; at least 0");
  }
  reserved_sms = count;
  return static_cast<int32_t>(Status::kOk);
}

}  // namespace fm3::sm90

int32_t fm3_sm90_reserve_sms(int32_t count) { return fm3::sm90::reserve_sms(count); }

int64_t fm3_sm90_struct_bytes(const char* name) {
  constexpr fm3::NamedBytes kRows[] = {
      FM3_NAMED_BYTES(SumPartsParams), FM3_NAMED_BYTES(SumRowsParams),
      FM3_NAMED_BYTES(PackParams),     FM3_NAMED_BYTES(PackWords),
      FM3_NAMED_BYTES(MergeParams),    FM3_NAMED_BYTES(CheckSameParams),
      FM3_NAMED_BYTES(LocalFirst)};
  const int64_t bytes = fm3::bytes_of(fm3::kStructBytes, name);
  return bytes >= 0 ? bytes : fm3::bytes_of(kRows, name);
}
