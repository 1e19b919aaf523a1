// SPDX-License-Identifier: Apache-2.0
#include "backward.h"

#include "arguments.h"
#include "backend.h"
#include "errors.h"
#include "tensors.h"

namespace fm3::binding {

std::vector<paddle::Tensor> attention_backward(
    const paddle::Tensor& q,           // [b, s_q, h_q, d_qk]
    const paddle::Tensor& k,           // [b, s_k, h_kv, d_qk]
    const paddle::Tensor& v,           // [b, s_k, h_kv, d_v]
    const paddle::Tensor& bounds,      // [b, h_mask, s_k, n], or [0]
    const paddle::Tensor& block_mask,  // [b, h_mask, ceil(s_q/128), ceil(s_k/128)], or [0]
    const paddle::Tensor& out,         // [b, s_q, h_q, d_v]
    const paddle::Tensor& lse,         // [b, h_q, s_q]
    const paddle::Tensor& maybe_dout,  // [b, s_q, h_q, d_v]
    const paddle::Tensor& maybe_dlse,  // [b, h_q, s_q]
    float softmax_scale, bool is_causal, bool is_deterministic) {
  if (!q.defined() || !out.defined()) {
    fail(
        "a second backward() through one graph, whose saved tensors are gone; "
        "pass retain_graph=True to the first");
  }
  const paddle::Tensor dense_q = contiguous(q), dense_k = contiguous(k), dense_v = contiguous(v);
  const paddle::Tensor dense_bounds = contiguous(bounds), dense_block_mask = contiguous(block_mask);
  const CheckedInputs checked = check_inputs(
      {dense_q, dense_k, dense_v, dense_bounds, dense_block_mask, softmax_scale, is_causal});
  check_gradient_inputs(checked, out, lse, maybe_dout, maybe_dlse);
  const Backend& backend = backend_for(q);
  const DeviceGuard on_device(q);
  const Shape& shape = checked.shape;
  const paddle::Tensor dense_out = contiguous(out), dense_lse = contiguous(lse);
  const paddle::Tensor dense_dout =  // [b, s_q, h_q, d_v]
      maybe_dout.initialized() ? contiguous(maybe_dout) : zeros(out.shape(), out.dtype(), out);
  paddle::Tensor dense_dlse;  // [b, h_q, s_q], or undefined
  if (maybe_dlse.initialized()) dense_dlse = contiguous(maybe_dlse);
  paddle::Tensor dq = paddle::empty(q.shape(), q.dtype(), q.place());  // [b, s_q, h_q, d_qk]
  paddle::Tensor dk = paddle::empty(k.shape(), k.dtype(), k.place());  // [b, s_k, h_kv, d_qk]
  paddle::Tensor dv = paddle::empty(v.shape(), v.dtype(), v.place());  // [b, s_k, h_kv, d_v]

  BwdParams params = {};
  params.shape = shape;
  params.dtype = checked.dtype;
  params.softmax_scale = softmax_scale;
  params.is_deterministic = is_deterministic;
  params.mask = checked.mask;
  params.q = dense_q.data();
  params.k = dense_k.data();
  params.v = dense_v.data();
  params.out = dense_out.data();
  params.lse = dense_lse.data<float>();
  params.dout = dense_dout.data();
  params.dlse = dense_dlse.initialized() ? dense_dlse.data<float>() : nullptr;
  params.dq = dq.data();
  params.dk = dk.data();
  params.dv = dv.data();
  params.stride_q = strides_of(dense_q);
  params.stride_k = strides_of(dense_k);
  params.stride_v = strides_of(dense_v);
  params.stride_out = strides_of(dense_out);
  params.stride_dout = strides_of(dense_dout);
  params.stride_dq = strides_of(dq);
  params.stride_dk = strides_of(dk);
  params.stride_dv = strides_of(dv);
  params.workspace_bytes = backend.bwd_workspace_bytes(&params);
  check_served(backend, "backward", params.workspace_bytes);
  paddle::Tensor scratch = workspace(params.workspace_bytes, q);
  params.workspace = params.workspace_bytes == 0 ? nullptr : scratch.data();
  check_status(backend, "backward", backend.bwd(&params, stream_of(q)));
  return {dq, dk, dv};
}

}  // namespace fm3::binding
