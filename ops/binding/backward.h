// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "paddle/extension.h"

namespace fm3::binding {

// Returns {dq, dk, dv}. A gradient that nothing asked for arrives uninitialised and counts as zero.
std::vector<paddle::Tensor> attention_backward(
    const paddle::Tensor& q, const paddle::Tensor& k, const paddle::Tensor& v,
    const paddle::Tensor& bounds, const paddle::Tensor& block_mask, const paddle::Tensor& out,
    const paddle::Tensor& lse, const paddle::Tensor& maybe_dout, const paddle::Tensor& maybe_dlse,
    float softmax_scale, bool is_causal, bool is_deterministic);

}  // namespace fm3::binding
