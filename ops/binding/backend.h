// SPDX-License-Identifier: Apache-2.0
// Which compiled kernels serve a tensor: CPU memory goes to fm3_cpu_*, GPU memory to fm3_sm90_*.
#pragma once

#include "fm3/params.h"
#include "paddle/extension.h"

namespace fm3::binding {

struct Backend {
  const char* name;
  int32_t (*fwd)(const FwdParams* params, void* stream);
  int32_t (*bwd)(const BwdParams* params, void* stream);
  int64_t (*fwd_workspace_bytes)(const FwdParams* params);
  int64_t (*bwd_workspace_bytes)(const BwdParams* params);
  void (*fill_zero)(void* data, size_t num_bytes, void* stream);
  const char* (*last_error)();
};

// Raises if no compiled backend serves the tensor's device; the message says how to build one.
const Backend& backend_for(const paddle::Tensor& tensor);

// Makes the tensor's GPU the current device for as long as it lives; nothing for other memory. Several
// GPUs can be in use in one process, and launches, streams and fills go to the current one.
class DeviceGuard {
 public:
  explicit DeviceGuard(const paddle::Tensor& tensor);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int restore_ = -1;  // the device to go back to, if any
};

// cudaStream_t that Paddle uses for the tensor's GPU now (a stream guard counts), else nullptr.
void* stream_of(const paddle::Tensor& tensor);

// Raises with the backend's message unless `status` is fm3::Status::kOk.
void check_status(const Backend& backend, const char* what, int32_t status);

// Raises with the backend's message if it answered a workspace query with -1: it does not serve this.
void check_served(const Backend& backend, const char* what, int64_t workspace_bytes);

// Uninitialised scratch memory beside `like`, or an undefined tensor if num_bytes is 0.
paddle::Tensor workspace(int64_t num_bytes, const paddle::Tensor& like);

}  // namespace fm3::binding
