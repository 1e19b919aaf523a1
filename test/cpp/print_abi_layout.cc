// SPDX-License-Identifier: Apache-2.0
// Prints size and field offsets of every struct of the C ABI, one `struct.field offset` a line;
// test/cpu/test_c_abi_cpp.py compares them with the ctypes mirror.
#include <cstddef>
#include <cstdio>

#include "fm3/c_api.h"

#define SIZE(type) std::printf(#type " %zu\n", sizeof(fm3::type))
#define FIELD(type, field) std::printf(#type "." #field " %zu\n", offsetof(fm3::type, field))

int main() {
  SIZE(MaskView);
  FIELD(MaskView, bounds), FIELD(MaskView, block_mask), FIELD(MaskView, form),
      FIELD(MaskView, is_causal);
  FIELD(MaskView, b), FIELD(MaskView, h_mask), FIELD(MaskView, s_q), FIELD(MaskView, s_k);
  SIZE(Strides);
  FIELD(Strides, b), FIELD(Strides, s), FIELD(Strides, h);
  SIZE(Shape);
  FIELD(Shape, b), FIELD(Shape, s_q), FIELD(Shape, s_k), FIELD(Shape, h_q), FIELD(Shape, h_kv);
  FIELD(Shape, d_qk), FIELD(Shape, d_v);
  SIZE(FwdParams);
  FIELD(FwdParams, shape), FIELD(FwdParams, dtype), FIELD(FwdParams, softmax_scale);
  FIELD(FwdParams, mask), FIELD(FwdParams, schedule), FIELD(FwdParams, q), FIELD(FwdParams, k);
  FIELD(FwdParams, v), FIELD(FwdParams, out), FIELD(FwdParams, lse), FIELD(FwdParams, stride_q);
  FIELD(FwdParams, stride_k), FIELD(FwdParams, stride_v), FIELD(FwdParams, stride_out);
  FIELD(FwdParams, workspace), FIELD(FwdParams, workspace_bytes);
  FIELD(FwdParams, ready_rows), FIELD(FwdParams, ready_status);
  FIELD(FwdParams, ready_timeout_us), FIELD(FwdParams, tile_counter);
  SIZE(BwdParams);
  FIELD(BwdParams, shape), FIELD(BwdParams, dtype), FIELD(BwdParams, softmax_scale);
  FIELD(BwdParams, is_deterministic), FIELD(BwdParams, mask), FIELD(BwdParams, schedule);
  FIELD(BwdParams, q), FIELD(BwdParams, k), FIELD(BwdParams, v), FIELD(BwdParams, out);
  FIELD(BwdParams, lse), FIELD(BwdParams, dout), FIELD(BwdParams, dlse), FIELD(BwdParams, dq);
  FIELD(BwdParams, dk), FIELD(BwdParams, dv), FIELD(BwdParams, stride_q),
      FIELD(BwdParams, stride_k);
  FIELD(BwdParams, stride_v), FIELD(BwdParams, stride_out), FIELD(BwdParams, stride_dout);
  FIELD(BwdParams, stride_dq), FIELD(BwdParams, stride_dk), FIELD(BwdParams, stride_dv);
  FIELD(BwdParams, workspace), FIELD(BwdParams, workspace_bytes), FIELD(BwdParams, keys_ready);
  FIELD(BwdParams, bwd_schedule), FIELD(BwdParams, remote_begin), FIELD(BwdParams, sent_value);
  FIELD(BwdParams, ready_rows), FIELD(BwdParams, ready_status), FIELD(BwdParams, ready_timeout_us);
  FIELD(BwdParams, sent_word), FIELD(BwdParams, sent_lead_us), FIELD(BwdParams, zero_sums);
  SIZE(BwdSchedule);
  FIELD(BwdSchedule, mask), FIELD(BwdSchedule, data), FIELD(BwdSchedule, bytes);
  SIZE(RowRun);
  FIELD(RowRun, begin), FIELD(RowRun, end);
  SIZE(KeyTileSummary);
  FIELD(KeyTileSummary, hidden_runs), FIELD(KeyTileSummary, clear_runs);
  return 0;
}
