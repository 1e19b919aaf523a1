// SPDX-License-Identifier: Apache-2.0
// NOTE: with PADDLE_WITH_CUDA the headers of dist tensors ask for those of cuBLAS, cuDNN, cuFFT,
// cuRAND and cuSPARSE. Nothing here touches a device, and the macro adds no member to a class of the
// headers below (conversions of complex numbers, names of backends), so this file does without.
#undef PADDLE_WITH_CUDA
#include "spmd.h"

#include <algorithm>
#include <vector>

#include "paddle/phi/api/ext/spmd_infer.h"

namespace fm3::binding {
namespace {

using DistInput = phi::distributed::DistMetaTensor;
using phi::distributed::TensorDistAttr;

using MeshDims = std::vector<int64_t>;     // mesh dimensions that split one axis; empty: none
using AxisSplits = std::vector<MeshDims>;  // one entry a tensor axis

// Which mesh dimensions split the batch and the heads, the same for every tensor of the call.
struct Split {
  MeshDims batch, q_heads, kv_heads;
  int64_t h_q, h_kv;
};

MeshDims axis_split(const DistInput& tensor, int axis) {
  const AxisSplits& splits = tensor.dist_attr().multi_dims_mapping();
  MeshDims split = static_cast<size_t>(axis) < splits.size() ? splits[axis] : MeshDims();
  // A replicated axis is written as no entry or as -1.
  split.erase(std::remove(split.begin(), split.end(), phi::distributed::kReplicateDim),
              split.end());
  return split;
}

MeshDims first_split(std::initializer_list<const DistInput*> tensors, int axis) {
  for (const DistInput* tensor : tensors) {
    const MeshDims split = axis_split(*tensor, axis);
    if (!split.empty()) return split;
  }
  return {};
}

int64_t num_shards(const MeshDims& split, const DistInput& tensor) {
  int64_t shards = 1;
  for (const int64_t mesh_dim : split) {
    shards *= tensor.dist_attr().process_mesh().dim_size(mesh_dim);
  }
  return shards;
}

// Claim:      the shards of every rank form one smaller attention call with the same answer.
// Because:    batch entries and heads do not interact; query head h reads K/V head h // (h_q / h_kv)
//             and mask head h // (h_q / h_mask), and equal contiguous head shards keep both maps.
// Breaks if:  a head count is not a multiple of the shard count; then heads are gathered instead.
//             One K/V head (MQA) stays whole beside sharded query heads.
// Tested by:  test/cpu/test_op_dist.py
Split choose_split(const DistInput& q, const DistInput& k, const DistInput& v) {
  Split split = {};
  split.h_q = q.dims()[2];
  split.h_kv = k.dims()[2];
  split.batch = first_split({&q, &k, &v}, 0);
  MeshDims heads = first_split({&q, &k, &v}, 2);
  const bool is_free = std::none_of(heads.begin(), heads.end(), [&](int64_t mesh_dim) {
    return std::count(split.batch.begin(), split.batch.end(), mesh_dim) != 0;
  });
  const int64_t shards = num_shards(heads, q);
  if (!is_free || split.h_q % shards != 0) return split;
  if (split.h_kv % shards == 0) {
    split.q_heads = split.kv_heads = heads;
  } else if (split.h_kv == 1) {
    split.q_heads = heads;
  }
  return split;
}

TensorDistAttr with_splits(const DistInput& like, const AxisSplits& splits) {
  TensorDistAttr attr;
  attr.set_process_mesh(like.dist_attr().process_mesh());
  attr.set_dims_mapping(splits);
  return attr;
}

TensorDistAttr query_attr(const DistInput& q, const Split& split) {
  return with_splits(q, {split.batch, {}, split.q_heads, {}});
}

TensorDistAttr key_attr(const DistInput& k, const Split& split) {
  return with_splits(k, {split.batch, {}, split.kv_heads, {}});
}

TensorDistAttr lse_attr(const DistInput& like, const Split& split) {
  return with_splits(like, {split.batch, split.q_heads, {}});
}

// bounds or block_mask; an absent one has one empty axis.
TensorDistAttr mask_attr(const DistInput& mask, const Split& split) {
  if (mask.dims().size() != 4) return with_splits(mask, AxisSplits(mask.dims().size()));
  const int64_t h_mask = mask.dims()[1];
  const MeshDims heads = h_mask == 1            ? MeshDims()
                         : h_mask == split.h_kv ? split.kv_heads
                                                : split.q_heads;
  return with_splits(mask, {split.batch, heads, {}, {}});
}

// With whole K/V heads beside sharded query heads, every rank holds a part of dk and dv.
TensorDistAttr key_gradient_attr(const DistInput& k, const Split& split) {
  TensorDistAttr attr = key_attr(k, split);
  if (split.kv_heads.empty() && !split.q_heads.empty()) attr.set_partial_status(split.q_heads);
  return attr;
}

phi::distributed::SpmdInfo infer_forward_spmd(const DistInput& q, const DistInput& k,
                                              const DistInput& v, const DistInput& bounds,
                                              const DistInput& block_mask, float, bool, bool) {
  const Split split = choose_split(q, k, v);
  return {{query_attr(q, split), key_attr(k, split), key_attr(v, split), mask_attr(bounds, split),
           mask_attr(block_mask, split)},
          {query_attr(q, split), lse_attr(q, split)}};
}

phi::distributed::SpmdInfo infer_backward_spmd(const DistInput& q, const DistInput& k,
                                               const DistInput& v, const DistInput& bounds,
                                               const DistInput& block_mask, const DistInput& out,
                                               const DistInput& lse, const DistInput& dout,
                                               const DistInput& dlse, float, bool, bool) {
  const Split split = choose_split(q, k, v);
  return {{query_attr(q, split), key_attr(k, split), key_attr(v, split), mask_attr(bounds, split),
           mask_attr(block_mask, split), query_attr(out, split), lse_attr(lse, split),
           query_attr(dout, split), lse_attr(dlse, split)},
          {query_attr(q, split), key_gradient_attr(k, split), key_gradient_attr(v, split)}};
}

}  // namespace

// Constant-initialised: register.cc reads them while the library is being loaded.
const paddle::InferSpmdFunc kForwardSpmd = PD_INFER_SPMD_RULE(infer_forward_spmd);
const paddle::InferSpmdFunc kBackwardSpmd = PD_INFER_SPMD_RULE(infer_backward_spmd);

}  // namespace fm3::binding
