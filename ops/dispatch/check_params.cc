// SPDX-License-Identifier: Apache-2.0
#include "ops/dispatch/check_params.h"

#include <cmath>
#include <cstdlib>
#include <initializer_list>
#include <type_traits>

namespace fm3 {
namespace {

template <typename... Parts>
std::string join(const Parts&... parts) {
  std::string text;
  const auto append = [&](const auto& part) {
    if constexpr (std::is_convertible_v<decltype(part), std::string>) {
      text += part;
    } else {
      text += std::to_string(part);
    }
  };
  (append(parts), ...);
  return text;
}

std::string check_sizes(const Shape& shape) {
  const struct {
    const char* name;
    int32_t value;
  } sizes[] = {{"b", shape.b},       {"s_q", shape.s_q},   {"s_k", shape.s_k}, {"h_q", shape.h_q},
               {"h_kv", shape.h_kv}, {"d_qk", shape.d_qk}, {"d_v", shape.d_v}};
  for (const auto& size : sizes) {
    if (size.value < 0) return join(size.name, "=", size.value, "; a size must be >= 0");
  }
  constexpr int32_t kMaxLength = INT32_MAX - kBlockMaskTile;  // tile ends stay 32-bit row numbers
  if (shape.s_q > kMaxLength || shape.s_k > kMaxLength) {
    return join("s_q=", shape.s_q, ", s_k=", shape.s_k, "; a length must be <= ", kMaxLength);
  }
  constexpr int32_t kMaxHeadDim = 1 << 20;
  if (shape.d_qk > kMaxHeadDim || shape.d_v > kMaxHeadDim) {
    return join("d_qk=", shape.d_qk, ", d_v=", shape.d_v,
                "; a head dimension must be <= ", kMaxHeadDim);
  }
  if (shape.h_q > 0 && (shape.h_kv == 0 || shape.h_q % shape.h_kv != 0)) {
    return join("h_q=", shape.h_q, ", h_kv=", shape.h_kv, "; h_kv must divide h_q");
  }
  return "";
}

std::string check_mask_fits(const MaskView& mask, const Shape& shape) {
  if (mask.b != shape.b) return join("mask.b=", mask.b, "; the tensors have b=", shape.b);
  if (mask.s_q != shape.s_q) return join("mask.s_q=", mask.s_q, "; q has s_q=", shape.s_q);
  if (mask.s_k != shape.s_k) return join("mask.s_k=", mask.s_k, "; k has s_k=", shape.s_k);
  const bool is_legal = mask.h_mask == 1 || mask.h_mask == shape.h_kv || mask.h_mask == shape.h_q;
  if (!is_legal) {
    return join("mask.h_mask=", mask.h_mask, "; must be 1, h_kv=", shape.h_kv,
                " or h_q=", shape.h_q);
  }
  return check_mask(mask);
}

// A tensor with elements needs a pointer and strides that keep its rows apart.
std::string check_tensor(const char* name, const void* data, const Strides& stride, int64_t b,
                         int64_t s, int64_t h, int64_t d, bool is_written) {
  if (b == 0 || s == 0 || h == 0 || d == 0) return "";
  if (data == nullptr)
    return join(name, " is nullptr but has ", b, "x", s, "x", h, "x", d, " elements");
  const struct {
    const char* axis;
    int64_t stride, size;
  } axes[] = {{"b", stride.b, b}, {"s", stride.s, s}, {"h", stride.h, h}};
  for (const auto& axis : axes) {
    if (is_written && axis.size > 1 && std::llabs(axis.stride) < d) {
      return join("stride_", name, ".", axis.axis, "=", axis.stride,
                  " elements; an output's rows of ", d, " elements would overlap");
    }
  }
  return "";
}

std::string check_common(const Shape& shape, DType dtype, float softmax_scale, const MaskView& mask,
                         int64_t workspace_bytes) {
  std::string error = check_sizes(shape);
  if (!error.empty()) return error;
  if (dtype != DType::kFloat32 && dtype != DType::kBFloat16 && dtype != DType::kFloat16) {
    return join("dtype=", static_cast<int32_t>(dtype),
                "; must be 0 (float32), 1 (bfloat16) or 2 (float16)");
  }
  if (!std::isfinite(softmax_scale))
    return join("softmax_scale=", softmax_scale, "; must be finite");
  if (workspace_bytes < 0) return join("workspace_bytes=", workspace_bytes, "; must be >= 0");
  return check_mask_fits(mask, shape);
}

std::string first_of(std::initializer_list<std::string> errors) {
  for (const std::string& error : errors) {
    if (!error.empty()) return error;
  }
  return "";
}

// What both directions read: q, k, v, out and lse.
template <typename Params>
std::string check_forward_tensors(const Params& params, bool is_out_written) {
  const Shape& shape = params.shape;
  std::string error =
      check_common(shape, params.dtype, params.softmax_scale, params.mask, params.workspace_bytes);
  if (!error.empty()) return error;
  const int64_t b = shape.b, s_q = shape.s_q, s_k = shape.s_k, h_q = shape.h_q, h_kv = shape.h_kv;
  error = first_of({
      check_tensor("q", params.q, params.stride_q, b, s_q, h_q, shape.d_qk, false),
      check_tensor("k", params.k, params.stride_k, b, s_k, h_kv, shape.d_qk, false),
      check_tensor("v", params.v, params.stride_v, b, s_k, h_kv, shape.d_v, false),
      check_tensor("out", params.out, params.stride_out, b, s_q, h_q, shape.d_v, is_out_written),
  });
  if (error.empty() && params.lse == nullptr && b * s_q * h_q > 0) {
    error =
        join("lse is nullptr; it must hold [b, h_q, s_q]=[", b, ", ", h_q, ", ", s_q, "] float32");
  }
  return error;
}

// Whoever waits for keys on their way must be able to give up, and to say so.
template <typename Params>
std::string check_ready(const Params& params) {
  if (params.ready_rows == nullptr) return "";
  if (params.ready_status != nullptr && params.ready_timeout_us > 0) return "";
  return join("ready_rows is set with ready_timeout_us=", params.ready_timeout_us,
              params.ready_status == nullptr ? " and ready_status=nullptr" : "",
              "; it needs a positive time and a ready_status word");
}

}  // namespace

std::string check_mask(const MaskView& mask) {
  if (mask.b < 0 || mask.h_mask < 0 || mask.s_q < 0 || mask.s_k < 0) {
    return join("mask has b=", mask.b, " h_mask=", mask.h_mask, " s_q=", mask.s_q,
                " s_k=", mask.s_k, "; a size must be >= 0");
  }
  const int32_t form = static_cast<int32_t>(mask.form);
  if (form < 0 || form > static_cast<int32_t>(BoundForm::kBoth4)) {
    return join("mask.form=", form, "; must be 0 (none) to 4 (both intervals)");
  }
  if (mask.is_causal != 0 && mask.is_causal != 1) {
    return join("mask.is_causal=", mask.is_causal, "; must be 0 or 1");
  }
  const bool has_columns = int64_t{mask.b} * mask.h_mask > 0 && mask.s_k > 0;
  if (mask.form != BoundForm::kNone && mask.bounds == nullptr && has_columns) {
    return join("mask.bounds is nullptr; mask.form=", form, " needs ", num_bounds(mask.form),
                " bounds a key column");
  }
  if (mask.form == BoundForm::kNone && mask.bounds != nullptr) {
    return "mask.bounds is set but mask.form=0 (none) reads no bounds";
  }
  return "";
}

std::string check_params(const FwdParams& params) {
  const std::string error = check_forward_tensors(params, true);
  return error.empty() ? check_ready(params) : error;
}

std::string check_params(const BwdParams& params) {
  const std::string error = check_forward_tensors(params, false);
  if (!error.empty()) return error;
  const Shape& shape = params.shape;
  const int64_t b = shape.b, s_q = shape.s_q, s_k = shape.s_k, h_q = shape.h_q, h_kv = shape.h_kv;
  return first_of({
      check_tensor("dout", params.dout, params.stride_dout, b, s_q, h_q, shape.d_v, false),
      check_tensor("dq", params.dq, params.stride_dq, b, s_q, h_q, shape.d_qk, true),
      check_tensor("dk", params.dk, params.stride_dk, b, s_k, h_kv, shape.d_qk, true),
      check_tensor("dv", params.dv, params.stride_dv, b, s_k, h_kv, shape.d_v, true),
      check_ready(params),
  });
}

}  // namespace fm3
