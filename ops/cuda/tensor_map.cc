// SPDX-License-Identifier: Apache-2.0
#include "tensor_map.h"

#include <cuda_runtime_api.h>

namespace fm3::sm90 {
namespace {

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

// Through the runtime, so that the library does not link against the driver.
EncodeTiled encode_function() {
  static const EncodeTiled function = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult result;
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry,
                                                               12000, cudaEnableDefault, &result);
    const bool is_found = error == cudaSuccess && result == cudaDriverEntryPointSuccess;
    return is_found ? reinterpret_cast<EncodeTiled>(entry) : nullptr;
  }();
  return function;
}

}  // namespace

std::string check_vector_access(const char* name, const void* data, const Strides& stride,
                                int64_t b, int64_t s, int64_t h) {
  if (reinterpret_cast<uintptr_t>(data) % 16 != 0) {
    return std::string(name) + " does not start at a multiple of 16 bytes; pass a contiguous copy";
  }
  const struct {
    const char* axis;
    int64_t stride, size;
  } axes[] = {{"b", stride.b, b}, {"s", stride.s, s}, {"h", stride.h, h}};
  for (const auto& axis : axes) {
    if (axis.size > 1 && (axis.stride % 8 != 0 || axis.stride < 0)) {
      return std::string("stride_") + name + "." + axis.axis + "=" + std::to_string(axis.stride) +
             " elements; sm90 needs a multiple of 8, not negative; pass a contiguous copy";
    }
  }
  return "";
}

std::string make_tensor_map(CUtensorMap* map, const char* name, DType dtype, const void* data,
                            const Strides& stride, int64_t b, int64_t s, int64_t h, int64_t d,
                            int32_t box_rows) {
  const std::string error = check_vector_access(name, data, stride, b, s, h);
  if (!error.empty()) return error;
  const EncodeTiled encode = encode_function();
  if (encode == nullptr)
    return "the CUDA driver has no cuTensorMapEncodeTiled (needs CUDA >= 12.0)";
  constexpr int64_t kBytes = 2, kBoxCols = 64;
  // The stride of an axis of one element is never used; TMA still wants it legal.
  const auto bytes = [&](int64_t size, int64_t elements) {
    return static_cast<cuuint64_t>(size > 1 ? elements * kBytes : (d * kBytes + 15) / 16 * 16);
  };
  const cuuint64_t sizes[4] = {static_cast<cuuint64_t>(d), static_cast<cuuint64_t>(s),
                               static_cast<cuuint64_t>(h), static_cast<cuuint64_t>(b)};
  const cuuint64_t strides[3] = {bytes(s, stride.s), bytes(h, stride.h), bytes(b, stride.b)};
  const cuuint32_t box[4] = {kBoxCols, static_cast<cuuint32_t>(box_rows), 1, 1};
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  const CUresult result =
      encode(map,
             dtype == DType::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                       : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
             4, const_cast<void*>(data), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result == CUDA_SUCCESS) return "";
  return std::string(name) + " cannot be described to TMA (CUresult " + std::to_string(result) +
         "): strides in bytes b=" + std::to_string(stride.b * kBytes) +
         " s=" + std::to_string(stride.s * kBytes) + " h=" + std::to_string(stride.h * kBytes) +
         "; pass a contiguous copy";
}

}  // namespace fm3::sm90
