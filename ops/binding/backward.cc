// SPDX-License-Identifier: Apache-2.0
#include "backward.h"

#include "arguments.h"
#include "backend.h"
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
    PD_THROW("fm3_attention: a second backward() through one graph, whose saved tensors are gone; "
             "pass retain_graph=True to the first");
  }
  const paddle::Tensor dense_bounds = contiguous(bounds), dense_block_mask = contiguous(block_mask);
  const CheckedInputs checked =
      check_inputs({q, k, v, dense_bounds, dense_block_mask, softmax_scale, is_causal});
  check_gradient_inputs(checked, out, lse, maybe_dout, maybe_dlse);
  const Backend& backend = backend_for(q);
  const Shape& shape = checked.shape;
  const paddle::Tensor dout =
      maybe_dout.initialized() ? maybe_dout : zeros(out.shape(), out.dtype(), out);
  const ReadableTensor q_view(q), k_view(k), v_view(v), out_view(out), dout_view(dout);
  const paddle::Tensor dense_lse = contiguous(lse);
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
  params.q = q_view.data();
  params.k = k_view.data();
  params.v = v_view.data();
  params.out = out_view.data();
  params.lse = dense_lse.data<float>();
  params.dout = dout_view.data();
  params.dlse = dense_dlse.initialized() ? dense_dlse.data<float>() : nullptr;
  params.dq = dq.data();
  params.dk = dk.data();
  params.dv = dv.data();
  params.stride_q = q_view.strides();
  params.stride_k = k_view.strides();
  params.stride_v = v_view.strides();
  params.stride_out = out_view.strides();
  params.stride_dout = dout_view.strides();
  params.stride_dq = contiguous_strides(shape.s_q, shape.h_q, shape.d_qk);
  params.stride_dk = contiguous_strides(shape.s_k, shape.h_kv, shape.d_qk);
  params.stride_dv = contiguous_strides(shape.s_k, shape.h_kv, shape.d_v);
  params.workspace_bytes = backend.bwd_workspace_bytes(&params);
  check_served(backend, "backward", params.workspace_bytes);
  paddle::Tensor scratch = workspace(params.workspace_bytes, q);
  params.workspace = params.workspace_bytes == 0 ? nullptr : scratch.data();
  check_status(backend, "backward", backend.bwd(&params, stream_of(q)));
  return {dq, dk, dv};
}

}  // namespace fm3::binding
