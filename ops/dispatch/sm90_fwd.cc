// SPDX-License-Identifier: Apache-2.0
// Hopper forward and schedule behind the C ABI: which kernel serves a call, its tensor maps, its
// workspace. Nothing here allocates, synchronises or keeps state, so calls can be captured.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "fm3/c_api.h"
#include "ops/cuda/schedule/build.cuh"
#include "ops/cuda/schedule/fill.cuh"
#include "ops/cuda/sm90_fwd/args.h"
#include "ops/cuda/tensor_map.h"
#include "ops/dispatch/check_params.h"
#include "ops/dispatch/sm90_device.h"
#include "ops/dispatch/sm90_error.h"

namespace fm3::sm90 {
namespace {

thread_local std::string last_error;

// Smallest first: a call takes the first kernel that covers its head dims.
const FwdKernel* const kKernels[] = {
    &kFwdD64Bf16, &kFwdD96Bf16, &kFwdD128Bf16, &kFwdD192V128Bf16, &kFwdD192Bf16, &kFwdD256Bf16,
    &kFwdD64Fp16, &kFwdD96Fp16, &kFwdD128Fp16, &kFwdD192V128Fp16, &kFwdD192Fp16, &kFwdD256Fp16};

const FwdKernel* find_kernel(const FwdParams& params) {
  for (const FwdKernel* kernel : kKernels) {
    if (kernel->dtype == params.dtype && params.shape.d_qk <= kernel->head_qk &&
        params.shape.d_v <= kernel->head_v) {
      return kernel;
    }
  }
  return nullptr;
}

bool is_empty(const Shape& shape) { return int64_t{shape.b} * shape.s_q * shape.h_q == 0; }

// Empty if this backend has a kernel for the call, else why not and what would serve it.
std::string check_served(const FwdParams& params) {
  const Shape& shape = params.shape;
  const std::string elsewhere = "; the cpu backend serves it";
  if (params.dtype == DType::kFloat32) {
    return "dtype=float32; sm90 serves bfloat16 and float16" + elsewhere;
  }
  if (shape.d_qk % 8 != 0 || shape.d_v % 8 != 0 || shape.d_qk == 0) {
    return "d_qk=" + std::to_string(shape.d_qk) + ", d_v=" + std::to_string(shape.d_v) +
           "; sm90 serves positive multiples of 8" + elsewhere;
  }
  if (find_kernel(params) == nullptr) {
    return "d_qk=" + std::to_string(shape.d_qk) + ", d_v=" + std::to_string(shape.d_v) +
           "; sm90 serves head dims up to 256" + elsewhere;
  }
  if (int64_t{params.mask.b} * params.mask.h_mask > kMaxLists) {
    return "b * h_mask=" + std::to_string(int64_t{params.mask.b} * params.mask.h_mask) +
           "; sm90 serves up to " + std::to_string(kMaxLists);
  }
  if (shape.s_k > kMaxKeyCols) {
    return "s_k=" + std::to_string(shape.s_k) + "; sm90 serves up to " +
           std::to_string(kMaxKeyCols);
  }
  const int64_t num_tiles = int64_t{shape.b} * shape.h_q * ((shape.s_q + kTileQ - 1) / kTileQ);
  if (num_tiles > INT32_MAX / 16) {  // lists have room for up to twice as many
    return "b * h_q * ceil(s_q / 128)=" + std::to_string(num_tiles) +
           "; sm90 serves fewer than 2^27";
  }
  return "";
}

// --- Workspace: [PPT counter | schedule, unless the caller brings one] ----------------------------
constexpr int64_t kCounterBytes = 256;

// 16-row blocks of all tiles, one link each.
int64_t revisit_bytes(const FwdParams& params) {
  ScheduleView schedule;
  schedule_layout(params.mask, nullptr, &schedule);
  const int64_t num_tiles = int64_t{params.shape.b} * params.shape.h_q * schedule.tiles.count;
  return align_up(num_tiles * 8 * int64_t{sizeof(int32_t)}, 256);
}
int64_t workspace_bytes(const FwdParams& params) {
  if (is_empty(params.shape) || params.shape.s_k == 0 || params.shape.d_v == 0) return 0;
  return kCounterBytes + revisit_bytes(params) +
         (params.schedule == nullptr ? schedule_bytes(params.mask) : 0);
}

// Query heads worked on side by side: as many as have their K and V in 8 MB, which stay in L2 beside
// everything that streams through it.
int32_t heads_per_group(const Shape& shape) {
  constexpr int64_t kL2Bytes = 8 << 20;
  const int64_t kv_bytes = int64_t{shape.s_k} * (shape.d_qk + shape.d_v) * 2;
  const int64_t kv_heads =
      std::clamp<int64_t>(kL2Bytes / std::max<int64_t>(kv_bytes, 1), 1, shape.h_kv);
  return static_cast<int32_t>(kv_heads) * (shape.h_q / shape.h_kv);
}

int32_t run(const FwdParams& params, cudaStream_t stream) {
  constexpr const char* kName = "fm3_sm90_fwd";
  const Shape& shape = params.shape;
  if (is_empty(shape)) return static_cast<int32_t>(Status::kOk);
  int32_t num_sms = 0;
  const std::string device_error = check_device(&num_sms);
  if (!device_error.empty()) return fail(Status::kUnsupported, kName, device_error);

  if (shape.s_k == 0 || shape.d_v == 0) {  // no key to see, or nothing to write but lse
    if (shape.s_k != 0) {
      return fail(Status::kUnsupported, kName, "d_v=0; sm90 serves positive multiples of 8");
    }
    const cudaError_t error = fill_empty_rows(params, stream);
    if (error != cudaSuccess) return fail(Status::kBackendError, kName, cudaGetErrorString(error));
    return static_cast<int32_t>(Status::kOk);
  }
  const FwdKernel& kernel = *find_kernel(params);

  const int64_t needed = workspace_bytes(params);
  if (params.workspace == nullptr || params.workspace_bytes < needed) {
    return fail(Status::kInvalidArgument, kName,
                "workspace_bytes=" + std::to_string(params.workspace_bytes) +
                    "; fm3_sm90_fwd_workspace_bytes asks for " + std::to_string(needed));
  }
  auto* workspace = static_cast<char*>(params.workspace);

  FwdArgs args{};
  std::string error = make_tensor_map(&args.map_q, "q", params.dtype, params.q, params.stride_q,
                                      shape.b, shape.s_q, shape.h_q, shape.d_qk, kRowsPerQBox);
  for (const bool is_pair : {false, true}) {
    const int32_t rows = is_pair ? kernel.pair_step_cols : kernel.step_cols;
    if (error.empty()) {
      error = make_tensor_map(&args.map_k[is_pair], "k", params.dtype, params.k, params.stride_k,
                              shape.b, shape.s_k, shape.h_kv, shape.d_qk, rows);
    }
    if (error.empty()) {
      error = make_tensor_map(&args.map_v[is_pair], "v", params.dtype, params.v, params.stride_v,
                              shape.b, shape.s_k, shape.h_kv, shape.d_v, rows);
    }
  }
  if (error.empty()) {
    error =
        check_vector_access("out", params.out, params.stride_out, shape.b, shape.s_q, shape.h_q);
  }
  if (!error.empty()) return fail(Status::kUnsupported, kName, error);

  void* schedule = const_cast<void*>(params.schedule);
  cudaError_t status = cudaSuccess;
  args.next_tile = params.tile_counter;
  if (args.next_tile == nullptr) {
    args.next_tile = reinterpret_cast<int32_t*>(workspace);
    status = cudaMemsetAsync(workspace, 0, kCounterBytes, stream);
  }
  if (status == cudaSuccess && schedule == nullptr) {
    schedule = workspace + kCounterBytes + revisit_bytes(params);
    status = build_schedule(params.mask, schedule, stream);
  }
  if (status != cudaSuccess) return fail(Status::kBackendError, kName, cudaGetErrorString(status));

  args.mask = params.mask;
  schedule_layout(params.mask, schedule, &args.schedule);
  args.out = params.out;
  args.lse = params.lse;
  args.revisit_next = reinterpret_cast<int32_t*>(workspace + kCounterBytes);
  args.q = params.q, args.k = params.k, args.v = params.v;
  args.stride_q = params.stride_q, args.stride_k = params.stride_k;
  args.stride_v = params.stride_v, args.stride_out = params.stride_out;
  args.b = shape.b, args.s_q = shape.s_q, args.s_k = shape.s_k;
  args.h_q = shape.h_q, args.h_kv = shape.h_kv;
  args.d_qk = shape.d_qk, args.d_v = shape.d_v;
  args.heads_per_group = heads_per_group(shape);
  args.num_tiles = shape.b * shape.h_q * args.schedule.num_q_tiles;
  const float scale = params.softmax_scale;
  args.needs_prescale = scale <= 0.0f;
  args.prescale = scale < 0.0f ? -1.0f : 0.0f;
  args.scale = scale == 0.0f ? 1.0f : std::fabs(scale);
  args.scale_log2 = args.scale * 1.4426950408889634f;
  args.ready_rows = params.ready_rows;
  args.ready_status = params.ready_status;
  args.ready_polls = static_cast<uint32_t>(std::min<int64_t>(params.ready_timeout_us, INT32_MAX));

  status = kernel.launch(args, std::min(num_sms / 2 * 2, (args.num_tiles + 1) / 2 * 2), stream);
  if (status != cudaSuccess) return fail(Status::kBackendError, kName, cudaGetErrorString(status));
  return static_cast<int32_t>(Status::kOk);
}

}  // namespace

int32_t fail(Status status, const char* function, const std::string& message) {
  last_error = std::string(function) + ": " + message;
  return static_cast<int32_t>(status);
}

}  // namespace fm3::sm90

using fm3::Status;

int32_t fm3_sm90_fwd(const fm3::FwdParams* params, void* stream) {
  constexpr const char* kName = "fm3_sm90_fwd";
  std::string error = params == nullptr ? "params is nullptr" : fm3::check_params(*params);
  if (!error.empty()) return fm3::sm90::fail(Status::kInvalidArgument, kName, error);
  error = fm3::sm90::check_served(*params);
  if (!error.empty()) return fm3::sm90::fail(Status::kUnsupported, kName, error);
  return fm3::sm90::run(*params, static_cast<cudaStream_t>(stream));
}

int64_t fm3_sm90_fwd_workspace_bytes(const fm3::FwdParams* params) {
  constexpr const char* kName = "fm3_sm90_fwd_workspace_bytes";
  const std::string error =
      params == nullptr ? "params is nullptr" : fm3::sm90::check_served(*params);
  if (!error.empty()) {
    fm3::sm90::fail(Status::kUnsupported, kName, error);
    return -1;
  }
  return fm3::sm90::workspace_bytes(*params);
}

int64_t fm3_sm90_schedule_bytes(const fm3::MaskView* mask) {
  return mask == nullptr ? 0 : fm3::sm90::schedule_bytes(*mask);
}

namespace {

int32_t prepare(const char* name, const fm3::MaskView* mask, void* schedule, void* stream,
                cudaError_t (*launch)(const fm3::MaskView&, void*, cudaStream_t)) {
  std::string error = mask == nullptr ? "mask is nullptr" : fm3::check_mask(*mask);
  if (error.empty() && schedule == nullptr) error = "schedule is nullptr";
  if (error.empty() && mask->s_k > fm3::sm90::kMaxKeyCols) {
    error =
        "s_k=" + std::to_string(mask->s_k) + "; at most " + std::to_string(fm3::sm90::kMaxKeyCols);
  }
  if (error.empty() && int64_t{mask->b} * mask->h_mask > fm3::sm90::kMaxLists) {
    error = "b * h_mask=" + std::to_string(int64_t{mask->b} * mask->h_mask) + "; at most " +
            std::to_string(fm3::sm90::kMaxLists);
  }
  if (!error.empty()) return fm3::sm90::fail(Status::kInvalidArgument, name, error);
  const cudaError_t status = launch(*mask, schedule, static_cast<cudaStream_t>(stream));
  if (status == cudaSuccess) return static_cast<int32_t>(Status::kOk);
  return fm3::sm90::fail(Status::kBackendError, name, cudaGetErrorString(status));
}

}  // namespace

int32_t fm3_sm90_build_schedule(const fm3::MaskView* mask, void* schedule, void* stream) {
  return prepare("fm3_sm90_build_schedule", mask, schedule, stream, fm3::sm90::build_schedule);
}

int32_t fm3_sm90_scan_bounds(const fm3::MaskView* mask, void* schedule, void* stream) {
  return prepare("fm3_sm90_scan_bounds", mask, schedule, stream, fm3::sm90::scan_bounds);
}

const char* fm3_sm90_last_error() { return fm3::sm90::last_error.c_str(); }
