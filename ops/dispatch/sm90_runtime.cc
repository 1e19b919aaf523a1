// SPDX-License-Identifier: Apache-2.0
// Streams, events, copies and memory shared between processes, behind the C ABI: what the transport
// of context parallelism orders its copies with.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstring>
#include <string>
#include <vector>

#include "fm3/device_api.h"
#include "ops/dispatch/sm90_error.h"

namespace {

using fm3::Status;
using fm3::sm90::fail;

static_assert(sizeof(cudaIpcMemHandle_t) == fm3::kIpcHandleBytes);

int32_t done(const char* function, cudaError_t error) {
  if (error == cudaSuccess) return static_cast<int32_t>(Status::kOk);
  return fail(Status::kBackendError, function, cudaGetErrorString(error));
}

cudaStream_t stream_of(void* stream) { return static_cast<cudaStream_t>(stream); }
cudaEvent_t event_of(void* event) { return static_cast<cudaEvent_t>(event); }

// Through the runtime, so that the library does not link against the driver.
template <class Function>
Function driver_function(const char* name, unsigned int version) {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult result;
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion(name, &entry, version, cudaEnableDefault, &result);
  const bool is_found = error == cudaSuccess && result == cudaDriverEntryPointSuccess;
  return is_found ? reinterpret_cast<Function>(entry) : nullptr;
}

using StreamWord = CUresult (*)(CUstream, CUdeviceptr, cuuint32_t, unsigned int);

int32_t word_done(const char* function, StreamWord call, void* stream, void* word, uint32_t value,
                  unsigned int flags) {
  if (call == nullptr) {
    return fail(Status::kUnsupported, function, "the CUDA driver has no stream memory operations");
  }
  const CUresult result =
      call(static_cast<CUstream>(stream), reinterpret_cast<CUdeviceptr>(word), value, flags);
  if (result == CUDA_SUCCESS) return static_cast<int32_t>(Status::kOk);
  return fail(Status::kBackendError, function, "CUDA driver error " + std::to_string(result));
}

}  // namespace

int32_t fm3_sm90_device_name(char* name, int64_t bytes) {
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetPCIBusId(name, static_cast<int>(bytes), device);
  return done("fm3_sm90_device_name", error);
}

int32_t fm3_sm90_malloc(int64_t bytes, void** pointer) {
  return done("fm3_sm90_malloc", cudaMalloc(pointer, static_cast<size_t>(bytes)));
}
int32_t fm3_sm90_free(void* pointer) { return done("fm3_sm90_free", cudaFree(pointer)); }

int32_t fm3_sm90_host_register(void* host, int64_t bytes, void** device_pointer) {
  cudaError_t error = cudaHostRegister(host, static_cast<size_t>(bytes),
                                       cudaHostRegisterMapped | cudaHostRegisterPortable);
  if (error == cudaSuccess) error = cudaHostGetDevicePointer(device_pointer, host, 0);
  return done("fm3_sm90_host_register", error);
}
int32_t fm3_sm90_host_unregister(void* host) {
  return done("fm3_sm90_host_unregister", cudaHostUnregister(host));
}

int32_t fm3_sm90_ipc_export(void* pointer, void* handle) {
  cudaIpcMemHandle_t exported;
  const cudaError_t error = cudaIpcGetMemHandle(&exported, pointer);
  if (error == cudaSuccess) std::memcpy(handle, &exported, sizeof(exported));
  return done("fm3_sm90_ipc_export", error);
}
int32_t fm3_sm90_ipc_open(const void* handle, void** pointer) {
  cudaIpcMemHandle_t exported;
  std::memcpy(&exported, handle, sizeof(exported));
  return done("fm3_sm90_ipc_open",
              cudaIpcOpenMemHandle(pointer, exported, cudaIpcMemLazyEnablePeerAccess));
}
int32_t fm3_sm90_ipc_close(void* pointer) {
  return done("fm3_sm90_ipc_close", cudaIpcCloseMemHandle(pointer));
}

int32_t fm3_sm90_stream_create(void** stream) {
  int least = 0, greatest = 0;
  cudaError_t error = cudaDeviceGetStreamPriorityRange(&least, &greatest);
  if (error == cudaSuccess) {
    error = cudaStreamCreateWithPriority(reinterpret_cast<cudaStream_t*>(stream),
                                         cudaStreamNonBlocking, greatest);
  }
  return done("fm3_sm90_stream_create", error);
}
int32_t fm3_sm90_stream_destroy(void* stream) {
  return done("fm3_sm90_stream_destroy", cudaStreamDestroy(stream_of(stream)));
}
int32_t fm3_sm90_stream_is_done(void* stream, int32_t* is_done) {
  const cudaError_t error = cudaStreamQuery(stream_of(stream));
  *is_done = error == cudaSuccess;
  return done("fm3_sm90_stream_is_done", error == cudaErrorNotReady ? cudaSuccess : error);
}

int32_t fm3_sm90_event_create(int32_t has_time, void** event) {
  return done("fm3_sm90_event_create",
              cudaEventCreateWithFlags(reinterpret_cast<cudaEvent_t*>(event),
                                       has_time ? cudaEventDefault : cudaEventDisableTiming));
}
int32_t fm3_sm90_event_destroy(void* event) {
  return done("fm3_sm90_event_destroy", cudaEventDestroy(event_of(event)));
}
int32_t fm3_sm90_event_record(void* event, void* stream) {
  return done("fm3_sm90_event_record", cudaEventRecord(event_of(event), stream_of(stream)));
}
int32_t fm3_sm90_event_wait(void* event, void* stream) {
  return done("fm3_sm90_event_wait", cudaStreamWaitEvent(stream_of(stream), event_of(event), 0));
}
int32_t fm3_sm90_event_elapsed(void* begin, void* end, float* ms) {
  cudaError_t error = cudaEventSynchronize(event_of(end));
  if (error == cudaSuccess) error = cudaEventElapsedTime(ms, event_of(begin), event_of(end));
  return done("fm3_sm90_event_elapsed", error);
}

int32_t fm3_sm90_copy(void* const* to, const void* const* from, const int64_t* bytes, int64_t count,
                      void* stream) {
  constexpr const char* kName = "fm3_sm90_copy";
  if (count == 0) return static_cast<int32_t>(Status::kOk);
  if (stream == nullptr) {
    return fail(Status::kInvalidArgument, kName,
                "the default stream cannot take batches of copies");
  }
  // A plain copy inside one device may run on multiprocessors; this flag asks for copy engines.
  cudaMemcpyAttributes attributes{};
  attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
  attributes.flags = cudaMemcpyFlagPreferOverlapWithCompute;
  size_t first_copy = 0;
  const std::vector<size_t> sizes(bytes, bytes + count);
  return done(kName, cudaMemcpyBatchAsync(to, from, sizes.data(), static_cast<size_t>(count),
                                          &attributes, &first_copy, 1, stream_of(stream)));
}

int32_t fm3_sm90_write_word(void* stream, void* word, uint32_t value) {
  static const auto call = driver_function<StreamWord>("cuStreamWriteValue32", 12000);
  return word_done("fm3_sm90_write_word", call, stream, word, value, CU_STREAM_WRITE_VALUE_DEFAULT);
}
int32_t fm3_sm90_wait_word(void* stream, void* word, uint32_t value) {
  static const auto call = driver_function<StreamWord>("cuStreamWaitValue32", 12000);
  return word_done("fm3_sm90_wait_word", call, stream, word, value, CU_STREAM_WAIT_VALUE_GEQ);
}
