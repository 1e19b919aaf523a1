// SPDX-License-Identifier: Apache-2.0
// The row kernels behind the C ABI.
#include <cuda_runtime_api.h>

#include <string>

#include "fm3/device_api.h"
#include "ops/cuda/rows/rows.cuh"
#include "ops/cuda/tensor_map.h"
#include "ops/dispatch/sm90_error.h"

namespace {

using fm3::DType;
using fm3::Status;
using fm3::sm90::fail;

std::string check_dtype(DType dtype) {
  if (dtype == DType::kBFloat16 || dtype == DType::kFloat16) return "";
  return "dtype=" + std::to_string(static_cast<int32_t>(dtype)) +
         "; sm90 serves bfloat16 (1) and float16 (2)";
}

std::string check_parts(int32_t num_parts, const void* const* parts) {
  if (num_parts < 1 || num_parts > fm3::kMaxParts) {
    return "num_parts=" + std::to_string(num_parts) + "; expected 1 to " +
           std::to_string(fm3::kMaxParts);
  }
  for (int32_t part_idx = 0; part_idx < num_parts; ++part_idx) {
    if (reinterpret_cast<uintptr_t>(parts[part_idx]) % 16 != 0 || parts[part_idx] == nullptr) {
      return "part " + std::to_string(part_idx) + " is nullptr or not at a multiple of 16 bytes";
    }
  }
  return "";
}

std::string check_multiple_of_8(const char* name, int64_t value) {
  if (value >= 0 && value % 8 == 0) return "";
  return std::string(name) + "=" + std::to_string(value) + "; expected a multiple of 8";
}

// b batch entries of `rows` (named) of row_elems elements each.
std::string check_size(int32_t b, const char* name, int64_t rows, int64_t row_elems) {
  using fm3::sm90::kMostRowBatch, fm3::sm90::kMostRowVecs;
  if (b < 0 || b > kMostRowBatch) {
    return "b=" + std::to_string(b) + "; expected 0 to " + std::to_string(kMostRowBatch);
  }
  const int64_t row_vecs = row_elems / 8;
  if (rows >= 0 && (row_vecs == 0 || rows <= kMostRowVecs / row_vecs)) return "";
  return std::string(name) + "=" + std::to_string(rows) + " with " + std::to_string(row_elems) +
         " elements each; expected 0 to " + std::to_string(kMostRowVecs / row_vecs) +
         " a batch entry";
}

std::string check_words(const fm3::PackWords& words) {
  if (words.num_ready < 0 || words.num_ready > fm3::kMostReadyWords) {
    return "num_ready=" + std::to_string(words.num_ready) + "; expected 0 to " +
           std::to_string(fm3::kMostReadyWords);
  }
  if (words.num_ready > 0 && words.num_done == nullptr) return "ready words without num_done";
  for (int32_t idx = 0; idx < words.num_ready; ++idx) {
    if (words.ready[idx] == nullptr) return "ready word " + std::to_string(idx) + " is nullptr";
  }
  return "";
}

std::string check_outputs(const fm3::CheckSameParams& params) {
  if (params.num_outputs < 0 || params.num_outputs > fm3::kMaxCheckedOutputs) {
    return "num_outputs=" + std::to_string(params.num_outputs) + "; expected 0 to " +
           std::to_string(fm3::kMaxCheckedOutputs);
  }
  for (int32_t idx = 0; idx < params.num_outputs; ++idx) {
    const int64_t bytes = params.output_bytes[idx];
    if (reinterpret_cast<uintptr_t>(params.outputs[idx]) % 16 != 0 || bytes < 0 || bytes % 4 != 0) {
      return "output " + std::to_string(idx) + " of " + std::to_string(bytes) +
             " bytes; expected a multiple of 4 bytes at a multiple of 16";
    }
  }
  return "";
}

std::string check_count(const void* params, int32_t count) {
  if (params == nullptr) return "params is nullptr";
  if (count >= 1 && count <= fm3::kMostRowTensors) return "";
  return "count=" + std::to_string(count) + "; expected 1 to " +
         std::to_string(fm3::kMostRowTensors);
}

template <class Launch>
int32_t finish(const char* function, const std::string& error, const Launch& launch, void* stream) {
  if (!error.empty()) return fail(Status::kInvalidArgument, function, error);
  const cudaError_t status = launch(static_cast<cudaStream_t>(stream));
  if (status == cudaSuccess) return static_cast<int32_t>(Status::kOk);
  return fail(Status::kBackendError, function, cudaGetErrorString(status));
}

}  // namespace

int32_t fm3_sm90_sum_parts(const fm3::SumPartsParams* params, void* stream) {
  std::string error = params == nullptr ? "params is nullptr" : check_dtype(params->dtype);
  if (error.empty()) error = check_multiple_of_8("num_elems", params->num_elems);
  if (error.empty() && params->num_elems > 0) error = check_parts(params->num_parts, params->parts);
  return finish(
      "fm3_sm90_sum_parts", error,
      [&](cudaStream_t on) { return fm3::sm90::sum_parts(*params, on); }, stream);
}

int32_t fm3_sm90_sum_rows(const fm3::SumRowsParams* params, int32_t count, void* stream) {
  std::string error = check_count(params, count);
  for (int32_t idx = 0; error.empty() && idx < count; ++idx) {
    const fm3::SumRowsParams& one = params[idx];
    error = check_dtype(one.dtype);
    if (error.empty()) error = check_multiple_of_8("row_elems", one.row_elems);
    if (error.empty()) error = check_size(one.b, "num_rows", one.num_rows, one.row_elems);
    if (error.empty() && (one.b != params->b || one.dtype != params->dtype ||
                          one.is_out_float32 != params->is_out_float32)) {
      error = "tensors of one call differ in b, dtype or is_out_float32";
    }
  }
  return finish(
      "fm3_sm90_sum_rows", error,
      [&](cudaStream_t on) { return fm3::sm90::sum_rows(params, count, on); }, stream);
}

int32_t fm3_sm90_pack(const fm3::PackParams* params, int32_t count, const fm3::PackWords* words,
                      void* stream) {
  std::string error = check_count(params, count);
  for (int32_t idx = 0; error.empty() && idx < count; ++idx) {
    const fm3::PackParams& one = params[idx];
    error = check_multiple_of_8("d", one.d);
    if (error.empty()) {
      error =
          fm3::sm90::check_vector_access("from", one.from, one.stride_from, one.b, one.s, one.h);
    }
    if (error.empty()) error = check_size(one.b, "s", one.s, int64_t{one.h} * one.d);
    if (error.empty() && one.b != params->b) error = "tensors of one call differ in b";
  }
  if (error.empty() && words != nullptr) error = check_words(*words);
  return finish(
      "fm3_sm90_pack", error,
      [&](cudaStream_t on) { return fm3::sm90::pack(params, count, words, on); }, stream);
}

int32_t fm3_sm90_merge(const fm3::MergeParams* params, void* stream) {
  std::string error = params == nullptr ? "params is nullptr" : check_dtype(params->dtype);
  if (error.empty()) error = check_multiple_of_8("d_v", params->d_v);
  if (error.empty()) {
    error = check_size(params->b, "s_q", params->s_q, int64_t{params->h_q} * params->d_v);
  }
  if (error.empty()) error = check_parts(params->num_parts, params->parts);
  return finish(
      "fm3_sm90_merge", error, [&](cudaStream_t on) { return fm3::sm90::merge(*params, on); },
      stream);
}

int32_t fm3_sm90_check_same(const fm3::CheckSameParams* params, void* stream) {
  std::string error = params == nullptr ? "params is nullptr" : check_outputs(*params);
  return finish(
      "fm3_sm90_check_same", error,
      [&](cudaStream_t on) { return fm3::sm90::check_same(*params, on); }, stream);
}

int32_t fm3_sm90_order_local_first(const fm3::MaskView* mask, void* schedule,
                                   const fm3::LocalFirst* first, void* stream) {
  constexpr const char* kName = "fm3_sm90_order_local_first";
  if (mask == nullptr || schedule == nullptr || first == nullptr) {
    return fail(Status::kInvalidArgument, kName, "mask, schedule or first is nullptr");
  }
  if (first->num_ends < 1 || first->num_ends > fm3::kMostKeyEnds) {
    return fail(Status::kInvalidArgument, kName,
                "num_ends=" + std::to_string(first->num_ends) + "; 1 to " +
                    std::to_string(fm3::kMostKeyEnds));
  }
  const cudaError_t status =
      fm3::sm90::order_local_first(*mask, schedule, *first, static_cast<cudaStream_t>(stream));
  if (status == cudaSuccess) return static_cast<int32_t>(Status::kOk);
  return fail(Status::kBackendError, kName, cudaGetErrorString(status));
}
