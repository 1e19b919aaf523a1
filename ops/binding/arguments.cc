// SPDX-License-Identifier: Apache-2.0
#include "arguments.h"

#include <limits>
#include <sstream>

#include "errors.h"

namespace fm3::binding {
namespace {

void check_rank4(const char* name, const paddle::Tensor& tensor, const char* wanted) {
  const std::vector<int64_t> dims = tensor.shape();
  if (dims.size() != 4) {
    fail(name, ".shape is ", dims_text(tensor), "; expected ", wanted);
  }
  for (const int64_t size : dims) {
    if (size > std::numeric_limits<int32_t>::max()) {
      fail(name, ".shape is ", dims_text(tensor), "; one axis holds at most 2^31 - 1 entries");
    }
  }
}

void check_same_place(const paddle::Tensor& tensor, const char* name, const paddle::Tensor& q) {
  if (tensor.place() != q.place()) {
    fail(name, " is on ", tensor.place(), " and q on ", q.place(), "; move them to one device");
  }
}

DType checked_dtype(const AttentionInputs& inputs) {
  const auto dtype = inputs.q.dtype();
  if (inputs.k.dtype() != dtype || inputs.v.dtype() != dtype) {
    fail("q, k, v have dtypes ", dtype, ", ", inputs.k.dtype(), ", ", inputs.v.dtype(),
         "; they must be the same");
  }
  switch (dtype) {
    case paddle::DataType::FLOAT32:
      return DType::kFloat32;
    case paddle::DataType::BFLOAT16:
      return DType::kBFloat16;
    case paddle::DataType::FLOAT16:
      return DType::kFloat16;
    default:
      fail("q.dtype is ", dtype, "; expected float32, bfloat16 or float16");
  }
}

Shape checked_shape(const AttentionInputs& inputs) {
  check_rank4("q", inputs.q, "[b, s_q, h_q, d_qk]");
  check_rank4("k", inputs.k, "[b, s_k, h_kv, d_qk]");
  check_rank4("v", inputs.v, "[b, s_k, h_kv, d_v]");
  const std::vector<int64_t> q = inputs.q.shape(), k = inputs.k.shape(), v = inputs.v.shape();
  if (k[0] != q[0] || v[0] != q[0]) {
    fail("q, k, v have b=", q[0], ", ", k[0], ", ", v[0], "; the batch sizes must be equal");
  }
  if (k[3] != q[3]) {
    fail("k.shape is ", dims_text(inputs.k), "; its last axis must be q's d_qk=", q[3]);
  }
  if (v[1] != k[1] || v[2] != k[2]) {
    fail("v.shape is ", dims_text(inputs.v), "; expected [b, s_k, h_kv, d_v] with s_k=", k[1],
         " and h_kv=", k[2], " as in k");
  }
  if (k[2] == 0 || q[2] % k[2] != 0) {
    fail("k.shape is ", dims_text(inputs.k), "; h_kv=", k[2], " must divide h_q=", q[2]);
  }
  const auto narrow = [](int64_t size) { return static_cast<int32_t>(size); };
  return {narrow(q[0]), narrow(q[1]), narrow(k[1]), narrow(q[2]),
          narrow(k[2]), narrow(q[3]), narrow(v[3])};
}

// Checks what bounds and block_mask share: dtype, device, [b, h_mask, ...].
int32_t checked_mask_heads(const char* name, const paddle::Tensor& mask, const Shape& shape,
                           const paddle::Tensor& q) {
  check_same_place(mask, name, q);
  if (mask.dtype() != paddle::DataType::INT32) {
    fail(name, ".dtype is ", mask.dtype(), "; expected int32");
  }
  if (mask.shape()[0] != shape.b) {
    fail(name, ".shape is ", dims_text(mask), "; its first axis must be b=", shape.b);
  }
  const int64_t h_mask = mask.shape()[1];
  if (h_mask != 1 && h_mask != shape.h_kv && h_mask != shape.h_q) {
    fail(name, ".shape is ", dims_text(mask), "; h_mask=", h_mask, " must be 1, h_kv=", shape.h_kv,
         " or h_q=", shape.h_q);
  }
  return static_cast<int32_t>(h_mask);
}

BoundForm checked_form(const paddle::Tensor& bounds, bool is_causal) {
  const int64_t num_bounds = bounds.shape()[3];
  if (is_causal && num_bounds == 1) return BoundForm::kLower1;
  if (is_causal && num_bounds == 2) return BoundForm::kLower2;
  if (!is_causal && num_bounds == 2) return BoundForm::kOuter2;
  if (!is_causal && num_bounds == 4) return BoundForm::kBoth4;
  fail("startend_row_indices.shape is ", dims_text(bounds),
       "; with causal=", is_causal ? "True" : "False", " its last axis must be ",
       is_causal ? "1 or 2" : "2 or 4");
}

MaskView checked_mask(const AttentionInputs& inputs, const Shape& shape) {
  MaskView mask = {};
  mask.is_causal = inputs.is_causal;
  mask.b = shape.b;
  mask.h_mask = 1;
  mask.s_q = shape.s_q;
  mask.s_k = shape.s_k;
  if (!is_absent(inputs.bounds)) {
    check_rank4("startend_row_indices", inputs.bounds, "[b, h_mask, s_k, n]");
    mask.h_mask = checked_mask_heads("startend_row_indices", inputs.bounds, shape, inputs.q);
    if (inputs.bounds.shape()[2] != shape.s_k) {
      fail("startend_row_indices.shape is ", dims_text(inputs.bounds),
           "; its third axis must be s_k=", shape.s_k);
    }
    mask.form = checked_form(inputs.bounds, inputs.is_causal);
    mask.bounds = inputs.bounds.data<int32_t>();
  }
  if (!is_absent(inputs.block_mask)) {
    check_rank4("block_mask", inputs.block_mask, "[b, h_mask, ceil(s_q/128), ceil(s_k/128)]");
    const int32_t h_mask = checked_mask_heads("block_mask", inputs.block_mask, shape, inputs.q);
    if (mask.form != BoundForm::kNone && h_mask != mask.h_mask) {
      fail("block_mask.shape is ", dims_text(inputs.block_mask),
           "; its second axis must be h_mask=", mask.h_mask, " as in startend_row_indices");
    }
    const int64_t num_q_tiles = (int64_t{shape.s_q} + kBlockMaskTile - 1) / kBlockMaskTile;
    const int64_t num_k_tiles = (int64_t{shape.s_k} + kBlockMaskTile - 1) / kBlockMaskTile;
    if (inputs.block_mask.shape()[2] != num_q_tiles ||
        inputs.block_mask.shape()[3] != num_k_tiles) {
      fail("block_mask.shape is ", dims_text(inputs.block_mask), "; expected [b, h_mask, ",
           num_q_tiles, ", ", num_k_tiles, "], one entry a 128 x 128 tile of s_q=", shape.s_q,
           " by s_k=", shape.s_k);
    }
    mask.h_mask = h_mask;
    mask.block_mask = inputs.block_mask.data<int32_t>();
  }
  return mask;
}

void check_dims(const char* name, const paddle::Tensor& tensor, const std::vector<int64_t>& dims) {
  if (tensor.shape() != dims) {
    std::ostringstream wanted;
    for (size_t axis = 0; axis < dims.size(); ++axis) wanted << (axis ? ", " : "") << dims[axis];
    fail(name, ".shape is ", dims_text(tensor), "; expected [", wanted.str(), "]");
  }
}

}  // namespace

std::string dims_text(const paddle::Tensor& tensor) {
  std::ostringstream text;
  text << "[";
  const char* separator = "";
  for (const int64_t size : tensor.shape()) {
    text << separator << size;
    separator = ", ";
  }
  text << "]";
  return text.str();
}

CheckedInputs check_inputs(const AttentionInputs& inputs) {
  CheckedInputs checked = {};
  checked.shape = checked_shape(inputs);
  checked.dtype = checked_dtype(inputs);
  check_same_place(inputs.k, "k", inputs.q);
  check_same_place(inputs.v, "v", inputs.q);
  checked.mask = checked_mask(inputs, checked.shape);
  return checked;
}

void check_gradient_inputs(const CheckedInputs& checked, const paddle::Tensor& out,
                           const paddle::Tensor& lse, const paddle::Tensor& maybe_dout,
                           const paddle::Tensor& maybe_dlse) {
  const Shape& shape = checked.shape;
  const std::vector<int64_t> out_dims = {shape.b, shape.s_q, shape.h_q, shape.d_v};
  const std::vector<int64_t> lse_dims = {shape.b, shape.h_q, shape.s_q};
  check_dims("out", out, out_dims);
  check_dims("lse", lse, lse_dims);
  if (maybe_dout.initialized()) {
    check_dims("dout", maybe_dout, out_dims);
    if (maybe_dout.dtype() != out.dtype()) {
      fail("dout.dtype is ", maybe_dout.dtype(), "; expected out's ", out.dtype());
    }
  }
  if (maybe_dlse.initialized()) {
    check_dims("dlse", maybe_dlse, lse_dims);
    if (maybe_dlse.dtype() != paddle::DataType::FLOAT32) {
      fail("dlse.dtype is ", maybe_dlse.dtype(), "; expected float32");
    }
  }
}

}  // namespace fm3::binding
