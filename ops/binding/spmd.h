// SPDX-License-Identifier: Apache-2.0
// How the ops run on dist tensors: batch and head shards stay where they are, anything else of the
// inputs is gathered first.
#pragma once

#include "paddle/phi/api/ext/spmd_infer.h"

namespace fm3::binding {

using DistInput = phi::distributed::DistMetaTensor;

phi::distributed::SpmdInfo infer_forward_spmd(const DistInput& q, const DistInput& k,
                                              const DistInput& v, const DistInput& bounds,
                                              const DistInput& block_mask, float softmax_scale,
                                              bool is_causal, bool is_deterministic);

phi::distributed::SpmdInfo infer_backward_spmd(const DistInput& q, const DistInput& k,
                                               const DistInput& v, const DistInput& bounds,
                                               const DistInput& block_mask, const DistInput& out,
                                               const DistInput& lse, const DistInput& dout,
                                               const DistInput& dlse, float softmax_scale,
                                               bool is_causal, bool is_deterministic);

}  // namespace fm3::binding
