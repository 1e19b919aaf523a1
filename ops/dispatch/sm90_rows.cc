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

int32_t finish(const char* function, const std::string& error,
               cudaError_t (*launch)(const void*, cudaStream_t), const void* params, void* stream) {
  if (!error.empty()) return fail(Status::kInvalidArgument, function, error);
  const cudaError_t status = launch(params, static_cast<cudaStream_t>(stream));
  if (status == cudaSuccess) return static_cast<int32_t>(Status::kOk);
  return fail(Status::kBackendError, function, cudaGetErrorString(status));
}

template <class Params, cudaError_t (*kLaunch)(const Params&, cudaStream_t)>
cudaError_t launch_erased(const void* params, cudaStream_t stream) {
  return kLaunch(*static_cast<const Params*>(params), stream);
}

}  // namespace

int32_t fm3_sm90_sum_parts(const fm3::SumPartsParams* params, void* stream) {
  std::string error = params == nullptr ? "params is nullptr" : check_dtype(params->dtype);
  if (error.empty()) error = check_multiple_of_8("num_elems", params->num_elems);
  if (error.empty() && params->num_elems > 0) error = check_parts(params->num_parts, params->parts);
  return finish("fm3_sm90_sum_parts", error,
                launch_erased<fm3::SumPartsParams, fm3::sm90::sum_parts>, params, stream);
}

int32_t fm3_sm90_sum_rows(const fm3::SumRowsParams* params, void* stream) {
  std::string error = params == nullptr ? "params is nullptr" : check_dtype(params->dtype);
  if (error.empty()) error = check_multiple_of_8("row_elems", params->row_elems);
  if (error.empty()) error = check_size(params->b, "num_rows", params->num_rows, params->row_elems);
  return finish("fm3_sm90_sum_rows", error, launch_erased<fm3::SumRowsParams, fm3::sm90::sum_rows>,
                params, stream);
}

int32_t fm3_sm90_pack(const fm3::PackParams* params, void* stream) {
  std::string error = params == nullptr ? "params is nullptr" : check_multiple_of_8("d", params->d);
  if (error.empty()) {
    error = fm3::sm90::check_vector_access("from", params->from, params->stride_from, params->b,
                                           params->s, params->h);
  }
  if (error.empty()) {
    error = check_size(params->b, "s", params->s, int64_t{params->h} * params->d);
  }
  return finish("fm3_sm90_pack", error, launch_erased<fm3::PackParams, fm3::sm90::pack>, params,
                stream);
}

int32_t fm3_sm90_merge(const fm3::MergeParams* params, void* stream) {
  std::string error = params == nullptr ? "params is nullptr" : check_dtype(params->dtype);
  if (error.empty()) error = check_multiple_of_8("d_v", params->d_v);
  if (error.empty()) {
    error = check_size(params->b, "s_q", params->s_q, int64_t{params->h_q} * params->d_v);
  }
  if (error.empty()) error = check_parts(params->num_parts, params->parts);
  return finish("fm3_sm90_merge", error, launch_erased<fm3::MergeParams, fm3::sm90::merge>, params,
                stream);
}

int32_t fm3_sm90_check_same(const fm3::CheckSameParams* params, void* stream) {
  std::string error = params == nullptr ? "params is nullptr" : check_outputs(*params);
  return finish("fm3_sm90_check_same", error,
                launch_erased<fm3::CheckSameParams, fm3::sm90::check_same>, params, stream);
}

int32_t fm3_sm90_order_local_first(const fm3::MaskView* mask, void* schedule, int32_t k_end,
                                   void* stream) {
  constexpr const char* kName = "fm3_sm90_order_local_first";
  if (mask == nullptr || schedule == nullptr) {
    return fail(Status::kInvalidArgument, kName, "mask or schedule is nullptr");
  }
  const cudaError_t status =
      fm3::sm90::order_local_first(*mask, schedule, k_end, static_cast<cudaStream_t>(stream));
  if (status == cudaSuccess) return static_cast<int32_t>(Status::kOk);
  return fail(Status::kBackendError, kName, cudaGetErrorString(status));
}
