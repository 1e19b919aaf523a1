// SPDX-License-Identifier: Apache-2.0
#include "forward.h"

#include "arguments.h"
#include "backend.h"
#include "tensors.h"

namespace fm3::binding {

std::vector<paddle::Tensor> attention_forward(
    const paddle::Tensor& q,           // [b, s_q, h_q, d_qk]
    const paddle::Tensor& k,           // [b, s_k, h_kv, d_qk]
    const paddle::Tensor& v,           // [b, s_k, h_kv, d_v]
    const paddle::Tensor& bounds,      // [b, h_mask, s_k, n], or [0]
    const paddle::Tensor& block_mask,  // [b, h_mask, ceil(s_q/128), ceil(s_k/128)], or [0]
    float softmax_scale, bool is_causal, bool /*is_deterministic*/) {
  const paddle::Tensor dense_q = contiguous(q), dense_k = contiguous(k), dense_v = contiguous(v);
  const paddle::Tensor dense_bounds = contiguous(bounds), dense_block_mask = contiguous(block_mask);
  const CheckedInputs checked = check_inputs(
      {dense_q, dense_k, dense_v, dense_bounds, dense_block_mask, softmax_scale, is_causal});
  const Backend& backend = backend_for(q);
  const DeviceGuard on_device(q);
  const Shape& shape = checked.shape;
  paddle::Tensor out = paddle::empty({shape.b, shape.s_q, shape.h_q, shape.d_v}, q.dtype(),
                                     q.place());  // [b, s_q, h_q, d_v]
  paddle::Tensor lse = paddle::empty({shape.b, shape.h_q, shape.s_q}, paddle::DataType::FLOAT32,
                                     q.place());  // [b, h_q, s_q]

  FwdParams params = {};
  params.shape = shape;
  params.dtype = checked.dtype;
  params.softmax_scale = softmax_scale;
  params.mask = checked.mask;
  params.q = dense_q.data();
  params.k = dense_k.data();
  params.v = dense_v.data();
  params.out = out.data();
  params.lse = lse.data<float>();
  params.stride_q = strides_of(dense_q);
  params.stride_k = strides_of(dense_k);
  params.stride_v = strides_of(dense_v);
  params.stride_out = strides_of(out);
  params.workspace_bytes = backend.fwd_workspace_bytes(&params);
  check_served(backend, "forward", params.workspace_bytes);
  paddle::Tensor scratch = workspace(params.workspace_bytes, q);
  params.workspace = params.workspace_bytes == 0 ? nullptr : scratch.data();
  check_status(backend, "forward", backend.fwd(&params, stream_of(q)));
  return {out, lse};
}

}  // namespace fm3::binding
