// SPDX-License-Identifier: Apache-2.0
#include "backend.h"

#include <cstring>
#include <sstream>

#include "errors.h"
#include "fm3/c_api.h"
#include "fm3/struct_bytes.h"

#if defined(PADDLE_WITH_CUDA) && defined(FM3_WITH_SM90)
#define FM3_BINDING_SM90 1
#include <cuda_runtime_api.h>
#endif

namespace fm3::binding {
namespace {

const Backend kCpu = {
    "cpu",
    [](const FwdParams* params, void*) { return fm3_cpu_fwd(params); },
    [](const BwdParams* params, void*) { return fm3_cpu_bwd(params); },
    fm3_cpu_fwd_workspace_bytes,
    fm3_cpu_bwd_workspace_bytes,
    [](void* data, size_t num_bytes, void*) { std::memset(data, 0, num_bytes); },
    fm3_cpu_last_error,
};

#ifdef FM3_BINDING_SM90
void fill_zero_on_stream(void* data, size_t num_bytes, void* stream) {
  const cudaError_t error = cudaMemsetAsync(data, 0, num_bytes, static_cast<cudaStream_t>(stream));
  if (error != cudaSuccess) {
    fail("cudaMemsetAsync failed: ", cudaGetErrorString(error));
  }
}

const Backend kSm90 = {
    "sm90",
    fm3_sm90_fwd,
    fm3_sm90_bwd,
    fm3_sm90_fwd_workspace_bytes,
    fm3_sm90_bwd_workspace_bytes,
    fill_zero_on_stream,
    fm3_sm90_last_error,
};
#endif

}  // namespace

const Backend& backend_for(const paddle::Tensor& tensor) {
  if (tensor.is_cpu()) return kCpu;
#ifdef FM3_BINDING_SM90
  if (tensor.is_gpu()) return kSm90;
#endif
  std::ostringstream text;
  text << "no kernels are built for tensors on " << tensor.place() << "; this build serves cpu"
#ifdef FM3_BINDING_SM90
       << " and gpu"
#else
       << ". For a Hopper GPU build with -DFM3_CUDA=ON against a GPU build of Paddle"
#endif
      ;
  fail(text.str());
}

#ifdef FM3_BINDING_SM90
DeviceGuard::DeviceGuard(const paddle::Tensor& tensor) {
  if (!tensor.is_gpu()) return;
  const int wanted = tensor.place().GetDeviceId();
  int current = wanted;
  cudaError_t error = cudaGetDevice(&current);
  if (error == cudaSuccess && current != wanted) {
    error = cudaSetDevice(wanted);
    restore_ = current;
  }
  if (error != cudaSuccess) fail("cannot use ", tensor.place(), ": ", cudaGetErrorString(error));
}

DeviceGuard::~DeviceGuard() {
  if (restore_ >= 0) cudaSetDevice(restore_);
}
#else
DeviceGuard::DeviceGuard(const paddle::Tensor&) {}
DeviceGuard::~DeviceGuard() = default;
#endif

void* stream_of(const paddle::Tensor& tensor) {
#ifdef FM3_BINDING_SM90
  if (tensor.is_gpu()) return reinterpret_cast<void*>(tensor.stream());
#endif
  (void)tensor;
  return nullptr;
}

void check_status(const Backend& backend, const char* what, int32_t status) {
  if (status == static_cast<int32_t>(Status::kOk)) return;
  fail("the ", backend.name, " ", what, " refused: ", backend.last_error());
}

void check_served(const Backend& backend, const char* what, int64_t workspace_bytes) {
  if (workspace_bytes >= 0) return;
  fail("the ", backend.name, " ", what, " refused: ", backend.last_error());
}

paddle::Tensor workspace(int64_t num_bytes, const paddle::Tensor& like) {
  if (num_bytes == 0) return paddle::Tensor();
  return paddle::empty({num_bytes}, paddle::DataType::UINT8, like.place());
}

}  // namespace fm3::binding

int64_t fm3_op_struct_bytes(const char* name) { return fm3::bytes_of(fm3::kStructBytes, name); }
