// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "paddle/extension.h"

namespace fm3::binding {

// Returns {out [b, s_q, h_q, d_v], lse [b, h_q, s_q] float32}. The forward is always deterministic;
// `is_deterministic` is an attribute of both ops because the gradient op takes the forward's.
std::vector<paddle::Tensor> attention_forward(const paddle::Tensor& q, const paddle::Tensor& k,
                                              const paddle::Tensor& v, const paddle::Tensor& bounds,
                                              const paddle::Tensor& block_mask, float softmax_scale,
                                              bool is_causal, bool is_deterministic);

}  // namespace fm3::binding
