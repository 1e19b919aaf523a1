// SPDX-License-Identifier: Apache-2.0
// Arguments of the custom op as the framework hands them over, checked once, with their sizes.
#pragma once

#include <cstdint>
#include <string>

#include "fm3/params.h"
#include "paddle/extension.h"

namespace fm3::binding {

// The inputs shared by the forward and the gradient op. An absent mask is a tensor of shape [0]:
// a real tensor, because a missing optional input together with dist tensors ends the process.
struct AttentionInputs {
  const paddle::Tensor& q;           // [b, s_q, h_q, d_qk]
  const paddle::Tensor& k;           // [b, s_k, h_kv, d_qk]
  const paddle::Tensor& v;           // [b, s_k, h_kv, d_v]
  const paddle::Tensor& bounds;      // [b, h_mask, s_k, n] int32, or [0]
  const paddle::Tensor& block_mask;  // [b, h_mask, ceil(s_q/128), ceil(s_k/128)] int32, or [0]
  float softmax_scale;
  bool is_causal;
};

// What the checks derive from the inputs. Pointers live as long as the tensors they came from.
struct CheckedInputs {
  Shape shape;
  DType dtype;
  MaskView mask;
};

inline bool is_absent(const paddle::Tensor& tensor) { return tensor.shape().size() == 1; }

// Raises an error that names the tensor, what came, what was wanted and the rule.
CheckedInputs check_inputs(const AttentionInputs& inputs);

// Further checks of the gradient op: everything must fit what `checked` says.
void check_gradient_inputs(const CheckedInputs& checked, const paddle::Tensor& out,
                           const paddle::Tensor& lse, const paddle::Tensor& maybe_dout,
                           const paddle::Tensor& maybe_dlse);

std::string dims_text(const paddle::Tensor& tensor);  // "[2, 4096, 8, 128]"

}  // namespace fm3::binding
