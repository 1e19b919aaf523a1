// SPDX-License-Identifier: Apache-2.0
#include "ops/cpu/attention.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "ops/cpu/thread_pool.h"
#include "ops/schedule/build_schedule.h"

namespace fm3::cpu {
namespace {

const KernelTable* const kTargets[] = {  // best first
#if defined(__x86_64__) && !defined(FM3_BASELINE_ONLY)
    &kAvx512Kernels, &kAvx2Kernels,
#endif
    &kBaselineKernels};

std::atomic<const KernelTable*> chosen_kernels{nullptr};

// Bytes on a cache line each, freed on scope exit.
class AlignedBytes {
 public:
  explicit AlignedBytes(int64_t bytes)
      : data_(static_cast<char*>(
            std::aligned_alloc(64, std::max<int64_t>(64, (bytes + 63) / 64 * 64)))) {
    if (data_ == nullptr) throw std::bad_alloc();
  }
  ~AlignedBytes() { std::free(data_); }
  AlignedBytes(const AlignedBytes&) = delete;
  AlignedBytes& operator=(const AlignedBytes&) = delete;
  char* data() const { return data_; }

 private:
  char* data_;
};

// The caller's prepared summaries, or ones built here.
class Summaries {
 public:
  Summaries(const MaskView& mask, const void* maybe_schedule) {
    if (maybe_schedule != nullptr) {
      summaries_ = static_cast<const KeyTileSummary*>(maybe_schedule);
      return;
    }
    built_.resize(int64_t{mask.b} * mask.h_mask * num_tiles(mask.s_k, kBlockK));
    build_schedule(mask, kBlockK, built_.data());
    summaries_ = built_.data();
  }
  const KeyTileSummary* get() const { return summaries_; }

 private:
  std::vector<KeyTileSummary> built_;
  const KeyTileSummary* summaries_;
};

int32_t num_threads_for(int64_t num_items) {
  return static_cast<int32_t>(std::max<int64_t>(1, std::min<int64_t>(num_threads(), num_items)));
}

void zero_rows(float* base, const Strides& stride, int32_t b, int32_t s, int32_t h, int32_t d) {
  for (int64_t b_idx = 0; b_idx < b; ++b_idx) {
    for (int64_t s_idx = 0; s_idx < s; ++s_idx) {
      for (int64_t h_idx = 0; h_idx < h; ++h_idx) {
        std::memset(base + b_idx * stride.b + s_idx * stride.s + h_idx * stride.h, 0,
                    sizeof(float) * d);
      }
    }
  }
}

}  // namespace

const KernelTable& kernels() {
  const KernelTable* table = chosen_kernels;
  if (table == nullptr) {
    set_simd_target("");
    table = chosen_kernels;
  }
  return *table;
}

bool set_simd_target(const char* target) {
  for (const KernelTable* table : kTargets) {
    const bool is_wanted = target[0] == '\0' || std::strcmp(target, table->name) == 0;
    if (is_wanted && table->is_supported()) {
      chosen_kernels = table;
      return true;
    }
  }
  return false;
}

void run_forward(const FwdParams& params) {
  const Shape& shape = params.shape;
  const KernelTable& table = kernels();
  const Summaries summaries(params.mask, params.schedule);
  const MaskContext mask{params.mask, summaries.get(), shape.h_q};
  const int64_t num_q_tiles = num_tiles(shape.s_q, kBlockQ);
  const int64_t num_items = int64_t{shape.b} * shape.h_q * num_q_tiles;
  const int32_t threads = num_threads_for(num_items);
  const int64_t scratch_bytes = table.forward_scratch_bytes(shape);
  const AlignedBytes scratch(threads * scratch_bytes);
  // Last query tiles first: under a causal mask they are the longest.
  parallel_for(threads, num_items, [&](int64_t item_idx, int32_t thread_idx) {
    const int64_t head = item_idx / num_q_tiles;
    table.forward_query_tile(params, mask, static_cast<int32_t>(head / shape.h_q),
                             static_cast<int32_t>(head % shape.h_q),
                             static_cast<int32_t>(num_q_tiles - 1 - item_idx % num_q_tiles),
                             scratch.data() + thread_idx * scratch_bytes);
  });
}

void run_backward(const BwdParams& params) {
  const Shape& shape = params.shape;
  const KernelTable& table = kernels();
  const Summaries summaries(params.mask, params.schedule);
  const int64_t num_q_tiles = num_tiles(shape.s_q, kBlockQ);
  const int64_t num_k_tiles = num_tiles(shape.s_k, kBlockK);
  const int64_t num_q_heads = int64_t{shape.b} * shape.h_q;
  const int64_t num_kv_heads = int64_t{shape.b} * shape.h_kv;
  const int64_t num_query_items = num_q_heads * num_q_tiles;
  const int32_t threads = num_threads_for(std::max(num_query_items, num_kv_heads * num_k_tiles));
  const int64_t scratch_bytes = table.backward_scratch_bytes(shape);
  const AlignedBytes scratch(threads * scratch_bytes);
  const auto scratch_of = [&](int32_t thread_idx) {
    return scratch.data() + thread_idx * scratch_bytes;
  };

  std::vector<float> delta(num_q_heads * shape.s_q);
  std::vector<std::atomic<int32_t>> dq_turn(num_query_items);
  for (std::atomic<int32_t>& turn : dq_turn) turn.store(-1, std::memory_order_relaxed);
  BackwardContext context;
  context.mask = {params.mask, summaries.get(), shape.h_q};
  context.delta = delta.data();
  context.dq_turn = dq_turn.data();
  context.dq_acc_f32 = static_cast<float*>(params.dq);
  context.stride_dq_acc = params.stride_dq;
  context.dq_acc_offset = 0;

  // fp32 tensors: dq is summed in place. Others need fp32 sums on the side, so heads are taken in
  // groups that just keep the threads apart; neither changes any result.
  const bool sums_in_place = params.dtype == DType::kFloat32;
  const int64_t heads_at_once =
      sums_in_place ? num_kv_heads : std::min<int64_t>(num_kv_heads, 2 * int64_t{threads});
  const int64_t group = shape.h_kv == 0 ? 0 : shape.h_q / shape.h_kv;
  const int64_t acc_floats_a_head = int64_t{shape.s_q} * shape.d_qk;
  std::vector<float> dq_acc_f32;
  if (sums_in_place) {
    zero_rows(context.dq_acc_f32, params.stride_dq, shape.b, shape.s_q, shape.h_q, shape.d_qk);
  } else {
    dq_acc_f32.resize(heads_at_once * group * acc_floats_a_head);
    context.dq_acc_f32 = dq_acc_f32.data();
    context.stride_dq_acc = {shape.h_q * acc_floats_a_head, shape.d_qk, acc_floats_a_head};
  }

  const auto query_tile_of = [&](int64_t item_idx, const auto& body) {
    const int64_t head = item_idx / num_q_tiles;
    body(static_cast<int32_t>(head / shape.h_q), static_cast<int32_t>(head % shape.h_q),
         static_cast<int32_t>(item_idx % num_q_tiles));
  };
  parallel_for(threads, num_query_items, [&](int64_t item_idx, int32_t thread_idx) {
    query_tile_of(item_idx, [&](int32_t b_idx, int32_t h_q_idx, int32_t q_tile_idx) {
      table.backward_delta(params, b_idx, h_q_idx, q_tile_idx, delta.data(),
                           scratch_of(thread_idx));
    });
  });
  for (int64_t first_head = 0; first_head < num_kv_heads; first_head += heads_at_once) {
    const int64_t num_heads = std::min(heads_at_once, num_kv_heads - first_head);
    if (!sums_in_place) {
      std::fill(dq_acc_f32.begin(), dq_acc_f32.end(), 0.0f);
      context.dq_acc_offset = first_head * group * acc_floats_a_head;
    }
    // Key tiles ascend, heads vary fastest: threads meet on the same dq as late as possible.
    parallel_for(threads, num_heads * num_k_tiles, [&](int64_t item_idx, int32_t thread_idx) {
      const int64_t head = first_head + item_idx % num_heads;
      table.backward_key_tile(params, context, static_cast<int32_t>(head / shape.h_kv),
                              static_cast<int32_t>(head % shape.h_kv),
                              static_cast<int32_t>(item_idx / num_heads), scratch_of(thread_idx));
    });
    if (sums_in_place) continue;
    const int64_t first_item = first_head * group * num_q_tiles;
    parallel_for(threads, num_heads * group * num_q_tiles, [&](int64_t item_idx, int32_t) {
      query_tile_of(first_item + item_idx, [&](int32_t b_idx, int32_t h_q_idx, int32_t q_tile_idx) {
        table.backward_store_dq(params, context, b_idx, h_q_idx, q_tile_idx);
      });
    });
  }
}

}  // namespace fm3::cpu
