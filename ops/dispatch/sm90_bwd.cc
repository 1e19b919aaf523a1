// SPDX-License-Identifier: Apache-2.0
// Hopper backward behind the C ABI: which kernel serves a call, its tensor maps, its workspace.
// Nothing here allocates, synchronises or keeps state, so calls can be captured. A prepared schedule
// is not read: the backward's own lists (by key tile) take 8 us a call at 128K tokens.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <string>

#include "fm3/c_api.h"
#include "ops/cuda/sm90_bwd/args.h"
#include "ops/cuda/tensor_map.h"
#include "ops/dispatch/check_params.h"
#include "ops/dispatch/sm90_device.h"
#include "ops/dispatch/sm90_error.h"

namespace fm3::sm90_bwd {
namespace {

using sm90::fail;

// Smallest first: a call takes the first kernel that covers its head dims.
const BwdKernel* const kKernels[] = {
    &kBwdD64Bf16, &kBwdD128Bf16, &kBwdD192V128Bf16, &kBwdD192Bf16, &kBwdD256Bf16,
    &kBwdD64Fp16, &kBwdD128Fp16, &kBwdD192V128Fp16, &kBwdD192Fp16, &kBwdD256Fp16};

const BwdKernel* find_kernel(const BwdParams& params) {
  for (const BwdKernel* kernel : kKernels) {
    if (kernel->dtype == params.dtype && params.shape.d_qk <= kernel->dim_qk &&
        params.shape.d_v <= kernel->dim_v) {
      return kernel;
    }
  }
  return nullptr;
}

int64_t div_up(int64_t value, int64_t divisor) { return (value + divisor - 1) / divisor; }

bool is_empty(const Shape& shape) {
  return int64_t{shape.b} * shape.h_q == 0 || shape.s_q == 0 || shape.s_k == 0;
}

// Empty if this backend has a kernel for the call, else why not and what would serve it.
std::string check_served(const BwdParams& params) {
  const Shape& shape = params.shape;
  const std::string elsewhere = "; the cpu backend serves it";
  const std::string dims =
      "d_qk=" + std::to_string(shape.d_qk) + ", d_v=" + std::to_string(shape.d_v);
  if (params.dtype == DType::kFloat32) {
    return "dtype=float32; sm90 serves bfloat16 and float16" + elsewhere;
  }
  if (shape.d_qk % 8 != 0 || shape.d_v % 8 != 0 || shape.d_qk == 0 || shape.d_v == 0) {
    return dims + "; sm90 serves positive multiples of 8" + elsewhere;
  }
  const BwdKernel* kernel = find_kernel(params);
  if (kernel == nullptr) return dims + "; sm90 serves head dims up to 256" + elsewhere;
  if (params.mask.is_causal &&
      (params.mask.form == BoundForm::kOuter2 || params.mask.form == BoundForm::kBoth4)) {
    return "is_causal=1 with upper bounds; sm90 serves the causal rule with lower bounds only" +
           elsewhere;
  }
  // Grid axes of the passes before the kernel.
  const int64_t num_masks = int64_t{params.mask.b} * params.mask.h_mask;
  if (num_masks > UINT16_MAX || shape.b > UINT16_MAX) {
    return "b=" + std::to_string(shape.b) + ", h_mask=" + std::to_string(params.mask.h_mask) +
           "; the sm90 backward serves up to 65535 masks" + elsewhere;
  }
  if (div_up(shape.s_q, kBlockQ) > UINT16_MAX) {
    return "s_q=" + std::to_string(shape.s_q) + "; the sm90 backward serves up to " +
           std::to_string(int64_t{UINT16_MAX} * kBlockQ);
  }
  const int64_t num_k_tiles = div_up(shape.s_k, kernel->block_k);
  if (num_k_tiles > UINT16_MAX) {
    return "s_k=" + std::to_string(shape.s_k) + "; the sm90 backward serves up to " +
           std::to_string(int64_t{UINT16_MAX} * kernel->block_k);
  }
  if (num_k_tiles * shape.b * shape.h_q > INT32_MAX / 2) {
    return "b * h_q * ceil(s_k / " + std::to_string(kernel->block_k) +
           ")=" + std::to_string(num_k_tiles * shape.b * shape.h_q) +
           "; sm90 serves fewer than 2^30";
  }
  return "";
}

// Items' heads whose dQ sums are open at a time. Work is claimed head by head, and a head's slot is free
// when its last sum was converted; no CTA should wait for that. Measured on an H200 at 8K (64 key tiles a
// head; window, causal, causal document; TFLOP/s): 8 slots 272, 450, 276; 14 slots 288, 495, 363; 25
// slots 286, 495, 364; a global window, one of whose tiles every row sees: 17 slots 226, 48 slots 325.
// So the slots hold 2560 key tiles, and three heads at least; of grouped heads, whose slots are larger and
// which may be cut instead, a thousand.
int64_t ring_slots(int64_t num_k_tiles, int32_t group) {
  const int64_t open_tiles = group > 1 ? 1024 : 2560;
  return std::max<int64_t>(3, 1 + div_up(open_tiles, num_k_tiles));
}

// What choose_plan may choose from. A slot holds the heads of one item: the whole group, or as many as
// take 128 MiB where a group may be cut.
PlanInput plan_input(const BwdParams& params, const BwdKernel& kernel) {
  constexpr int64_t kSlotBytes = 128 << 20;
  const Shape& shape = params.shape;
  const int64_t head_bytes =
      div_up(shape.s_q, kBlockQ) * kBlockQ * kernel.dim_qk * int64_t{sizeof(float)};
  PlanInput in{};
  in.group = shape.h_q / shape.h_kv;
  in.num_kv_heads = shape.b * shape.h_kv;
  in.num_k_tiles = static_cast<int32_t>(div_up(shape.s_k, kernel.block_k));
  in.can_cut = kernel.sums_parts && in.group > 1;
  in.max_part_heads = in.group;
  while (in.can_cut && in.max_part_heads > 1 &&
         (in.group % in.max_part_heads != 0 || in.max_part_heads * head_bytes > kSlotBytes)) {
    --in.max_part_heads;
  }
  const int64_t num_parts = int64_t{shape.b} * shape.h_q / in.max_part_heads;
  in.ring_heads = static_cast<int32_t>(std::min(num_parts, ring_slots(in.num_k_tiles, in.group)) *
                                       in.max_part_heads);
  in.step_bytes = kBlockQ * (2 * kernel.dim_qk + 2 * kernel.dim_v + 4 * kernel.dim_qk);
  in.is_deterministic = params.is_deterministic;
  in.num_q_tiles = static_cast<int32_t>(div_up(shape.s_q, kBlockQ));
  constexpr int64_t kTurnBytes = 16 << 20;
  in.can_order = in.is_deterministic || int64_t{params.mask.b} * params.mask.h_mask *
                                                in.num_k_tiles * in.num_q_tiles * 2 <=
                                            kTurnBytes;
  return in;
}

// Key/value heads whose parts may be summed at a time: two at least, so that none waits.
int64_t kv_sum_heads(const PlanInput& in, int64_t tile_bytes) {
  constexpr int64_t kSumBytes = 64 << 20;
  if (!in.can_cut) return 0;
  return std::min<int64_t>(in.num_kv_heads,
                           std::max<int64_t>(2, kSumBytes / (in.num_k_tiles * tile_bytes)));
}

// Lays the workspace out from `base` (may be nullptr); returns its bytes.
int64_t layout(const BwdParams& params, const BwdKernel& kernel, char* base, KernelArgs* args,
               PrepareArgs* in) {
  const Shape& shape = params.shape;
  const int64_t num_masks = int64_t{params.mask.b} * params.mask.h_mask;
  const int64_t num_q_tiles = div_up(shape.s_q, kBlockQ);
  const int64_t num_k_tiles = div_up(shape.s_k, kernel.block_k);
  const int64_t num_hulls = div_up(shape.s_k, kHullK);
  const int64_t num_q_chunks = div_up(num_q_tiles, 32);
  const PlanInput plan_in = plan_input(params, kernel);
  const int64_t ring_tiles = plan_in.ring_heads * num_q_tiles;
  const int64_t kv_tile_floats = int64_t{kernel.block_k} * (kernel.dim_qk + kernel.dim_v);
  const int64_t kv_sum_tiles = kv_sum_heads(plan_in, kv_tile_floats * 4) * num_k_tiles;
  const int64_t num_items =
      int64_t{shape.b} * num_k_tiles * (plan_in.can_cut ? shape.h_q : shape.h_kv);
  const int64_t num_rows = int64_t{shape.b} * shape.h_q * num_q_tiles * kBlockQ;
  int64_t offset = 0;
  const auto take = [&](auto** pointer, int64_t count) {
    using Element = std::remove_reference_t<decltype(**pointer)>;
    *pointer = reinterpret_cast<Element*>(base + offset);
    offset = sm90::align_up(offset + count * int64_t{sizeof(Element)}, 256);
  };
  take(&args->hulls, num_masks * num_hulls);
  take(&args->bounds, num_masks * num_hulls * kHullK);
  take(&args->tile_order, num_masks * num_k_tiles);
  take(&args->tile_steps, num_masks * num_k_tiles);
  take(&args->step_bits, num_masks * num_k_tiles * num_q_chunks);
  take(&args->step_chunks, num_masks * num_k_tiles);
  take(&args->sample_rows, num_masks * num_k_tiles);
  take(&args->walks, num_masks);
  take(&args->plan, 1);
  take(&args->items, num_items);
  take(&args->turns, plan_in.can_order ? num_masks * num_k_tiles * num_q_tiles : 0);
  take(&args->lse_log2, num_rows);
  take(&args->minus_delta, num_rows);
  const int64_t ring_floats = ring_tiles * kBlockQ * kernel.dim_qk;
  // In a fixed order the first part of a sum is stored, not added.
  if (params.is_deterministic) take(&args->dq_ring, ring_floats);
  const int64_t zeroed_begin = offset;
  take(&args->next_work, 1);
  take(&args->next_finished, 1);
  take(&args->next_conversion, 1);
  take(&args->finished, int64_t{shape.b} * shape.h_q * num_q_tiles * kernel.dq_parts);
  take(&args->visits, num_masks * num_q_tiles);
  take(&args->shared_rows, num_masks);
  take(&args->head_done, int64_t{shape.b} * shape.h_q);
  take(&args->kv_counts, kv_sum_tiles * 8);
  take(&args->ring_counts, ring_tiles * kernel.dq_parts);
  if (!params.is_deterministic) take(&args->dq_ring, ring_floats);
  take(&args->kv_sums, kv_sum_tiles * kv_tile_floats);
  in->zeroed = base + zeroed_begin;
  in->zeroed_bytes = offset - zeroed_begin;
  args->plan_input = plan_in;
  args->max_items = static_cast<int32_t>(num_items);
  args->kv_sum_heads = static_cast<int32_t>(kv_sum_tiles / num_k_tiles);
  args->num_q_tiles = static_cast<int32_t>(num_q_tiles);
  args->num_k_tiles = static_cast<int32_t>(num_k_tiles);
  args->num_hulls = static_cast<int32_t>(num_hulls);
  args->num_q_chunks = static_cast<int32_t>(num_q_chunks);
  in->block_k = kernel.block_k;
  in->dq_parts = kernel.dq_parts;
  return offset;
}

int64_t workspace_bytes(const BwdParams& params) {
  if (is_empty(params.shape)) return 0;
  KernelArgs args{};
  PrepareArgs in{};
  return layout(params, *find_kernel(params), nullptr, &args, &in);
}

std::string make_tensor_maps(const BwdParams& params, const BwdKernel& kernel, KernelArgs* args) {
  const Shape& shape = params.shape;
  const struct {
    CUtensorMap* map;
    const char* name;
    const void* data;
    const Strides& stride;
    int32_t s, h, d, rows;
  } mapped[] = {
      {&args->map_q, "q", params.q, params.stride_q, shape.s_q, shape.h_q, shape.d_qk, kBlockQ},
      {&args->map_k, "k", params.k, params.stride_k, shape.s_k, shape.h_kv, shape.d_qk,
       kernel.block_k},
      {&args->map_v, "v", params.v, params.stride_v, shape.s_k, shape.h_kv, shape.d_v,
       kernel.block_k},
      {&args->map_dout, "dout", params.dout, params.stride_dout, shape.s_q, shape.h_q, shape.d_v,
       kBlockQ},
      {&args->map_dq, "dq", params.dq, params.stride_dq, shape.s_q, shape.h_q, shape.d_qk, 16},
      {&args->map_dk, "dk", params.dk, params.stride_dk, shape.s_k, shape.h_kv, shape.d_qk, 64},
      {&args->map_dv, "dv", params.dv, params.stride_dv, shape.s_k, shape.h_kv, shape.d_v, 64},
  };
  for (const auto& input : mapped) {
    const std::string error =
        sm90::make_tensor_map(input.map, input.name, params.dtype, input.data, input.stride,
                              shape.b, input.s, input.h, input.d, input.rows);
    if (!error.empty()) return error;
  }
  return sm90::check_vector_access("out", params.out, params.stride_out, shape.b, shape.s_q,
                                   shape.h_q);
}

// Without queries or keys every gradient is zero.
cudaError_t fill_zeros(const BwdParams& params, cudaStream_t stream) {
  const Shape& shape = params.shape;
  cudaError_t error =
      fill_zero(params.dq, params.stride_dq, shape.b, shape.s_q, shape.h_q, shape.d_qk, stream);
  if (error == cudaSuccess) {
    error =
        fill_zero(params.dk, params.stride_dk, shape.b, shape.s_k, shape.h_kv, shape.d_qk, stream);
  }
  if (error == cudaSuccess) {
    error =
        fill_zero(params.dv, params.stride_dv, shape.b, shape.s_k, shape.h_kv, shape.d_v, stream);
  }
  return error;
}

int32_t run(const BwdParams& params, cudaStream_t stream) {
  constexpr const char* kName = "fm3_sm90_bwd";
  const Shape& shape = params.shape;
  if (int64_t{shape.b} * shape.h_q == 0 || (shape.s_q == 0 && shape.s_k == 0)) {
    return static_cast<int32_t>(Status::kOk);
  }
  int32_t num_sms = 0;
  std::string error = sm90::check_device(&num_sms);
  if (!error.empty()) return fail(Status::kUnsupported, kName, error);
  if (is_empty(shape)) {
    const cudaError_t status = fill_zeros(params, stream);
    if (status != cudaSuccess)
      return fail(Status::kBackendError, kName, cudaGetErrorString(status));
    return static_cast<int32_t>(Status::kOk);
  }
  const BwdKernel& kernel = *find_kernel(params);

  const int64_t needed = workspace_bytes(params);
  if (params.workspace == nullptr || params.workspace_bytes < needed) {
    return fail(Status::kInvalidArgument, kName,
                "workspace_bytes=" + std::to_string(params.workspace_bytes) +
                    "; fm3_sm90_bwd_workspace_bytes asks for " + std::to_string(needed));
  }
  KernelArgs args{};
  PrepareArgs in{};
  layout(params, kernel, static_cast<char*>(params.workspace), &args, &in);
  error = make_tensor_maps(params, kernel, &args);
  if (!error.empty()) return fail(Status::kUnsupported, kName, error);

  args.shape = shape;
  args.mask = params.mask;
  args.group = shape.h_q / shape.h_kv;
  args.plan_input.num_sms = num_sms;
  args.is_deterministic = params.is_deterministic;
  args.softmax_scale = params.softmax_scale;
  args.dq = params.dq, args.dk = params.dk, args.dv = params.dv;
  args.stride_dq = params.stride_dq;
  args.stride_dk = params.stride_dk;
  args.stride_dv = params.stride_dv;
  in.dtype = params.dtype;
  in.out = params.out, in.dout = params.dout, in.lse = params.lse, in.dlse = params.dlse;
  in.stride_out = params.stride_out;
  in.stride_dout = params.stride_dout;

  cudaError_t status = prepare(args, in, stream);
  if (status == cudaSuccess && params.keys_ready != nullptr) {
    status = cudaStreamWaitEvent(stream, static_cast<cudaEvent_t>(params.keys_ready), 0);
  }
  if (status == cudaSuccess) {
    status = kernel.launch(args, std::min(num_sms, args.max_items), stream);
  }
  if (status != cudaSuccess) return fail(Status::kBackendError, kName, cudaGetErrorString(status));
  return static_cast<int32_t>(Status::kOk);
}

}  // namespace
}  // namespace fm3::sm90_bwd

using fm3::Status;

int32_t fm3_sm90_bwd(const fm3::BwdParams* params, void* stream) {
  constexpr const char* kName = "fm3_sm90_bwd";
  std::string error = params == nullptr ? "params is nullptr" : fm3::check_params(*params);
  if (!error.empty()) return fm3::sm90::fail(Status::kInvalidArgument, kName, error);
  error = fm3::sm90_bwd::check_served(*params);
  if (!error.empty()) return fm3::sm90::fail(Status::kUnsupported, kName, error);
  return fm3::sm90_bwd::run(*params, static_cast<cudaStream_t>(stream));
}

int64_t fm3_sm90_bwd_workspace_bytes(const fm3::BwdParams* params) {
  constexpr const char* kName = "fm3_sm90_bwd_workspace_bytes";
  const std::string error =
      params == nullptr ? "params is nullptr" : fm3::sm90_bwd::check_served(*params);
  if (error.empty()) return fm3::sm90_bwd::workspace_bytes(*params);
  fm3::sm90::fail(Status::kUnsupported, kName, error);
  return -1;
}
