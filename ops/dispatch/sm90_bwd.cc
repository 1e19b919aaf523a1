// SPDX-License-Identifier: Apache-2.0
// Hopper backward behind the C ABI: which kernel serves a call, its tensor maps, its workspace.
// Nothing here allocates, synchronises or keeps state, so calls can be captured.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <sstream>
#include <string>
#include <tuple>

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

std::string check_mask_served(const MaskView& mask) {
  const bool has_upper = mask.form == BoundForm::kOuter2 || mask.form == BoundForm::kBoth4;
  if (!mask.is_causal || !has_upper) return "";
  return "is_causal=1 with upper bounds; sm90 serves the causal rule with lower bounds only";
}

// Empty if the mask can have lists of key tiles of block_k keys.
std::string check_lists(const MaskView& mask, int32_t block_k) {
  const auto at_most = [](const char* name, int64_t value, int64_t most) {
    return std::string(name) + "=" + std::to_string(value) + "; the sm90 backward serves up to " +
           std::to_string(most);
  };
  constexpr int64_t kMost = kMostTiles;
  const int64_t num_masks = int64_t{mask.b} * mask.h_mask;
  if (num_masks > kMost || mask.b > kMost) return at_most("b * h_mask", num_masks, kMost);
  if (div_up(mask.s_q, kBlockQ) > kMost) return at_most("s_q", mask.s_q, kMost * kBlockQ);
  if (max_k_tiles(mask, block_k) > kMost) return at_most("s_k", mask.s_k, kMost * block_k);
  return "";
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
  const int64_t num_k_tiles = max_k_tiles(params.mask, kernel->block_k);
  std::string error = check_mask_served(params.mask);
  if (error.empty()) error = check_lists(params.mask, kernel->block_k);
  if (!error.empty()) return error + elsewhere;
  if (params.ready_rows != nullptr && !kernel->serves_remote) {
    return dims + " with ready_rows; sm90 serves keys on their way at head dims up to 128";
  }
  if (num_k_tiles * shape.b * shape.h_q > INT32_MAX / 2) {
    return "b * h_q * (key tiles of " + std::to_string(kernel->block_k) +
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
  return in;
}

// Key/value heads whose parts may be summed at a time: two at least, so that none waits.
int64_t kv_sum_heads(const PlanInput& in, int64_t tile_bytes) {
  constexpr int64_t kSumBytes = 64 << 20;
  if (!in.can_cut) return 0;
  return std::min<int64_t>(in.num_kv_heads,
                           std::max<int64_t>(2, kSumBytes / (in.num_k_tiles * tile_bytes)));
}

// Lays the workspace out from `base` (may be nullptr); returns its bytes. `lists`: the part of them, if the
// call makes them.
int64_t layout(const BwdParams& params, const BwdKernel& kernel, char* base, KernelArgs* args,
               PrepareArgs* in, MaskLists* lists) {
  const Shape& shape = params.shape;
  const int64_t num_k_tiles = max_k_tiles(params.mask, kernel.block_k);
  // Room for any mask's tiles: zeros that a call leaves lie where those of another mask are looked for.
  const int64_t all_q_tiles = most_q_tiles(shape.s_q);
  const int64_t all_k_tiles = most_k_tiles(shape.s_k, kernel.block_k);
  const PlanInput plan_in = plan_input(params, kernel);
  const int64_t ring_tiles = plan_in.ring_heads * all_q_tiles;
  const int64_t kv_tile_floats = int64_t{kernel.block_k} * (kernel.dim_qk + kernel.dim_v);
  const int64_t num_kv_sum_heads = kv_sum_heads(plan_in, kv_tile_floats * 4);
  const int64_t kv_sum_tiles = num_kv_sum_heads * all_k_tiles;
  const int64_t tile_heads = int64_t{shape.b} * (plan_in.can_cut ? shape.h_q : shape.h_kv);
  const int64_t num_rows = int64_t{shape.b} * shape.h_q * all_q_tiles * kBlockQ;
  int64_t offset = 0;
  const auto take = [&](auto** pointer, int64_t count) {
    using Element = std::remove_reference_t<decltype(**pointer)>;
    *pointer = reinterpret_cast<Element*>(base + offset);
    offset = sm90::align_up(offset + count * int64_t{sizeof(Element)}, 256);
  };
  const auto take_bytes = [&](void** pointer, int64_t bytes) {
    *pointer = base + offset;
    offset = sm90::align_up(offset + bytes, 256);
  };
  take(&args->walks, int64_t{shape.b} * shape.h_q);  // of any mask, as above
  take(&args->plan, 1);
  take(&args->items, tile_heads * all_k_tiles);
  const int64_t row_bytes = num_rows * (kernel.packs_rows ? sizeof(RowPieces) : sizeof(float));
  take_bytes(&args->lse, row_bytes);
  take_bytes(&args->minus_delta, row_bytes);
  const int64_t ring_floats = ring_tiles * kBlockQ * kernel.dim_qk;
  // In a fixed order the first part of a sum is stored, not added.
  if (params.is_deterministic) take(&args->dq_ring, ring_floats);
  const int64_t zeroed_begin = offset;
  take(&args->next_work, 1);
  take(&args->next_finished, 1);
  take(&args->next_conversion, 1);
  take(&args->sent_count, 1);
  take(&args->finished, int64_t{shape.b} * shape.h_q * all_q_tiles * kernel.dq_parts);
  take(&args->head_done, int64_t{shape.b} * shape.h_q);
  take(&args->kv_counts, kv_sum_tiles * 8);
  take(&args->ring_counts, ring_tiles * kernel.dq_parts);
  const int64_t sums_begin = offset;
  if (!params.is_deterministic) take(&args->dq_ring, ring_floats);
  take(&args->kv_sums, kv_sum_tiles * kv_tile_floats);
  in->zeroed = base + zeroed_begin;
  const bool are_zeros = params.zero_sums == 2 && kernel.leaves_zeros;
  in->zeroed_bytes = (are_zeros ? sums_begin : offset) - zeroed_begin;
  args->plan_input = plan_in;
  args->max_items = static_cast<int32_t>(tile_heads * num_k_tiles);
  args->kv_sum_heads = static_cast<int32_t>(num_kv_sum_heads);
  args->num_q_tiles = max_q_tiles(params.mask);
  args->num_k_tiles = static_cast<int32_t>(num_k_tiles);
  in->dq_parts = kernel.dq_parts;
  in->packs_rows = kernel.packs_rows;
  // Behind what is kept: their size depends on the mask.
  if (params.bwd_schedule == nullptr) {
    offset += lists_layout(params.mask, &kernel.block_k, 1, base + offset, lists);
  }
  return offset;
}

int64_t workspace_bytes(const BwdParams& params) {
  if (is_empty(params.shape)) return 0;
  KernelArgs args{};
  PrepareArgs in{};
  MaskLists lists{};
  return layout(params, *find_kernel(params), nullptr, &args, &in, &lists);
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

// Empty if what the call says of keys of other ranks makes sense.
std::string check_remote(const BwdParams& params) {
  if (params.ready_rows == nullptr && params.sent_word == nullptr) return "";
  if (params.remote_begin < 0 || params.remote_begin > params.shape.s_k) {
    return "remote_begin=" + std::to_string(params.remote_begin) +
           "; expected 0 to s_k=" + std::to_string(params.shape.s_k);
  }
  if (params.sent_lead_us < 0) {
    return "sent_lead_us=" + std::to_string(params.sent_lead_us) + "; expected 0 or more";
  }
  const struct {
    const char* name;
    const void* word;
  } words[] = {{"ready_rows", params.ready_rows},
               {"ready_status", params.ready_status},
               {"sent_word", params.sent_word}};
  for (const auto& [name, word] : words) {
    if (reinterpret_cast<uintptr_t>(word) % 4 == 0) continue;
    std::ostringstream text;
    text << name << "=" << word << "; expected a multiple of 4 bytes";
    return text.str();
  }
  return "";
}

// Tells the kernel of keys of other ranks. False: the caller sets the word that says that their gradients are written.
bool set_remote(const BwdParams& params, const BwdKernel& kernel, KernelArgs* args) {
  // Of a step at head dims 128, on an H200 at the clock that its power allows.
  constexpr float kStepUs = 2.2f;
  const int64_t most_warps = int64_t{8} * args->num_k_tiles * params.shape.b * params.shape.h_kv;
  const bool is_told = params.sent_word != nullptr && most_warps <= INT32_MAX;
  args->remote_begin = INT32_MAX;
  args->lead_steps = -1;
  if (!kernel.serves_remote || params.remote_begin == params.shape.s_k ||
      (!is_told && params.ready_rows == nullptr)) {
    return false;
  }
  args->remote_begin = params.remote_begin;
  args->ready_rows = params.ready_rows;
  args->ready_status = params.ready_status;
  args->ready_polls = static_cast<uint32_t>(std::min<int64_t>(params.ready_timeout_us, INT32_MAX));
  if (!is_told) return false;
  args->lead_steps = 256.f * params.sent_lead_us / (kStepUs * (kernel.dim_qk + kernel.dim_v));
  args->sent_word = params.sent_word;
  args->sent_value = params.sent_value;
  return true;
}

std::string text_of(const MaskView& mask) {
  std::ostringstream text;
  text << "b=" << mask.b << ", h_mask=" << mask.h_mask << ", s_q=" << mask.s_q
       << ", s_k=" << mask.s_k << ", form=" << static_cast<int32_t>(mask.form)
       << ", is_causal=" << mask.is_causal << ", bounds=" << static_cast<const void*>(mask.bounds)
       << ", block_mask=" << static_cast<const void*>(mask.block_mask);
  return text.str();
}

int64_t schedule_bytes(const MaskView& mask) {
  if (int64_t{mask.b} * mask.h_mask == 0 || mask.s_q == 0 || mask.s_k == 0) return 0;
  return lists_layout(mask, kBlockKs, kNumBlockKs, nullptr, nullptr);
}

// Empty if the memory can hold the schedule of its mask.
std::string check_schedule(const BwdSchedule& schedule) {
  const int64_t needed = schedule_bytes(schedule.mask);
  if (needed > 0 && schedule.data == nullptr) return "bwd_schedule.data is nullptr";
  if (reinterpret_cast<uintptr_t>(schedule.data) % 16 != 0) {
    std::ostringstream text;
    text << "bwd_schedule.data=" << schedule.data << "; expected a multiple of 16 bytes";
    return text.str();
  }
  if (schedule.bytes < needed) {
    return "bwd_schedule.bytes=" + std::to_string(schedule.bytes) +
           "; fm3_sm90_bwd_schedule_bytes asks for " + std::to_string(needed);
  }
  return "";
}

// Empty if the schedule that the call brings was made for the call's mask.
std::string check_schedule_fits(const BwdParams& params) {
  if (params.bwd_schedule == nullptr) return "";
  const MaskView &made_for = params.bwd_schedule->mask, &mask = params.mask;
  const auto fields = [](const MaskView& view) {
    return std::tie(view.bounds, view.block_mask, view.form, view.is_causal, view.b, view.h_mask,
                    view.s_q, view.s_k);
  };
  if (fields(made_for) == fields(mask)) return check_schedule(*params.bwd_schedule);
  return "bwd_schedule was made for a mask with " + text_of(made_for) + "; the call's has " +
         text_of(mask) + "; a schedule serves one mask";
}

int32_t run(const BwdParams& params, cudaStream_t stream) {
  constexpr const char* kName = "fm3_sm90_bwd";
  const Shape& shape = params.shape;
  const bool is_nothing = int64_t{shape.b} * shape.h_q == 0 || (shape.s_q == 0 && shape.s_k == 0);
  if (is_nothing && params.sent_word == nullptr) return static_cast<int32_t>(Status::kOk);
  int32_t num_sms = 0;
  std::string error = sm90::check_device(&num_sms);
  if (!error.empty()) return fail(Status::kUnsupported, kName, error);
  if (is_empty(shape)) {
    cudaError_t status = is_nothing ? cudaSuccess : fill_zeros(params, stream);
    if (status == cudaSuccess && params.sent_word != nullptr) {
      status = set_word(params.sent_word, params.sent_value, stream);
    }
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
  MaskLists lists{};
  layout(params, kernel, static_cast<char*>(params.workspace), &args, &in, &lists);
  if (params.bwd_schedule != nullptr) {
    lists_layout(params.mask, kBlockKs, kNumBlockKs, params.bwd_schedule->data, &lists);
  }
  for (int32_t idx = 0; idx < lists.num_tile_lists; ++idx) {
    if (lists.tiles[idx].block_k == kernel.block_k) args.lists = lists.tiles[idx];
  }
  args.bounds = reinterpret_cast<const int4*>(args.lists.bounds);
  args.num_hulls = args.lists.num_hulls;
  args.num_q_chunks = lists.num_q_chunks;
  args.q_rows = lists.q_rows;
  args.q_tiles = lists.q_tiles;
  args.row_places = lists.row_places;
  error = make_tensor_maps(params, kernel, &args);
  if (!error.empty()) return fail(Status::kUnsupported, kName, error);

  args.shape = shape;
  args.mask = params.mask;
  args.group = shape.h_q / shape.h_kv;
  args.plan_input.num_sms = num_sms;
  args.is_deterministic = params.is_deterministic;
  args.leaves_zeros = params.zero_sums != 0 && !params.is_deterministic;
  args.softmax_scale = params.softmax_scale;
  args.dq = params.dq, args.dk = params.dk, args.dv = params.dv;
  args.stride_dq = params.stride_dq;
  args.stride_dk = params.stride_dk;
  args.stride_dv = params.stride_dv;
  in.dtype = params.dtype;
  in.out = params.out, in.dout = params.dout, in.lse = params.lse, in.dlse = params.dlse;
  in.stride_out = params.stride_out;
  in.stride_dout = params.stride_dout;
  const bool kernel_sets_word = set_remote(params, kernel, &args);

  cudaError_t status = cudaSuccess;
  if (params.bwd_schedule == nullptr) status = make_lists(params.mask, lists, stream);
  if (status == cudaSuccess) status = prepare(args, in, stream);
  if (status == cudaSuccess && params.keys_ready != nullptr) {
    status = cudaStreamWaitEvent(stream, static_cast<cudaEvent_t>(params.keys_ready), 0);
  }
  if (status == cudaSuccess) {
    status = kernel.launch(args, std::min(num_sms, args.max_items), stream);
  }
  if (status == cudaSuccess && params.sent_word != nullptr && !kernel_sets_word) {
    status = set_word(params.sent_word, params.sent_value, stream);
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
  error = fm3::sm90_bwd::check_schedule_fits(*params);
  if (error.empty()) error = fm3::sm90_bwd::check_remote(*params);
  if (error.empty() && (params->zero_sums < 0 || params->zero_sums > 2)) {
    error = "zero_sums=" + std::to_string(params->zero_sums) + "; expected 0, 1 or 2";
  }
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

int64_t fm3_sm90_bwd_schedule_bytes(const fm3::MaskView* mask) {
  return mask == nullptr ? 0 : fm3::sm90_bwd::schedule_bytes(*mask);
}

int32_t fm3_sm90_build_bwd_schedule(const fm3::BwdSchedule* bwd_schedule, void* stream) {
  constexpr const char* kName = "fm3_sm90_build_bwd_schedule";
  using namespace fm3::sm90_bwd;
  std::string error =
      bwd_schedule == nullptr ? "bwd_schedule is nullptr" : fm3::check_mask(bwd_schedule->mask);
  if (error.empty()) error = check_schedule(*bwd_schedule);
  if (!error.empty()) return fm3::sm90::fail(Status::kInvalidArgument, kName, error);
  const fm3::MaskView& mask = bwd_schedule->mask;
  error = check_mask_served(mask);
  if (error.empty()) error = check_lists(mask, *std::min_element(kBlockKs, kBlockKs + kNumBlockKs));
  if (!error.empty()) return fm3::sm90::fail(Status::kUnsupported, kName, error);
  if (schedule_bytes(mask) == 0) return static_cast<int32_t>(Status::kOk);
  MaskLists lists;
  lists_layout(mask, kBlockKs, kNumBlockKs, bwd_schedule->data, &lists);
  const cudaError_t status = make_lists(mask, lists, static_cast<cudaStream_t>(stream));
  if (status == cudaSuccess) return static_cast<int32_t>(Status::kOk);
  return fm3::sm90::fail(Status::kBackendError, kName, cudaGetErrorString(status));
}
