// SPDX-License-Identifier: Apache-2.0
// Arguments of the attention kernels: plain data, no framework type. Every backend takes these.
#pragma once

#include <cstdint>

#include "fm3/mask.h"

namespace fm3 {

enum class DType : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

// Element strides of a [b, s, h, d] tensor whose last axis is contiguous. 64-bit on purpose:
// b * s * h * d may exceed 2^31.
struct Strides {
  int64_t b, s, h;
};

struct Shape {
  int32_t b, s_q, s_k, h_q, h_kv, d_qk, d_v;  // h_q % h_kv == 0; mask.h_mask in {1, h_kv, h_q}
};

struct FwdParams {
  Shape shape;
  DType dtype;  // of q, k, v, out
  float softmax_scale;
  MaskView mask;
  const void* schedule;  // backend's prepared schedule of `mask`; may be nullptr (then it is built)
  const void* q;         // [b, s_q, h_q, d_qk]
  const void* k;         // [b, s_k, h_kv, d_qk]
  const void* v;         // [b, s_k, h_kv, d_v]
  void* out;             // [b, s_q, h_q, d_v]; 0 in a fully hidden row
  float* lse;            // [b, h_q, s_q] contiguous, natural log; -inf in a fully hidden row
  Strides stride_q, stride_k, stride_v, stride_out;
  void* workspace;  // *_fwd_workspace_bytes(params) bytes; may be nullptr if that is 0
  int64_t workspace_bytes;
  // Keys on their way (sm90 only): K and V rows [0, *ready_rows) are in; the word grows while the
  // kernel runs, which waits for the rows that it visits. nullptr: all are in. A kernel that has
  // waited ready_timeout_us for one row writes its index, plus 1, to *ready_status (0 before), and
  // ends with results that mean nothing. Both words may be in registered host memory.
  const uint32_t* ready_rows;
  uint32_t* ready_status;
  int64_t ready_timeout_us;
  // sm90: a device word that is 0 when the kernel starts, for it to count in; nullptr: in the workspace, which the
  // call clears.
  int32_t* tile_counter;
};

// What the sm90 backward needs to know of a mask, prepared once: device memory filled by
// fm3_sm90_build_bwd_schedule, and for which mask. It serves every call with that very mask (the same
// sizes, form, causal rule and addresses): any head dims, heads, dtype and mode. What bounds and
// block_mask held when it was made counts, until it is made again. A plain value, in host memory.
struct BwdSchedule {
  MaskView mask;
  void* data;     // device memory, aligned to 16 bytes
  int64_t bytes;  // of it; at least fm3_sm90_bwd_schedule_bytes(&mask)
};

struct BwdParams {
  Shape shape;
  DType dtype;  // of q, k, v, out, dout, dq, dk, dv
  float softmax_scale;
  int32_t is_deterministic;
  MaskView mask;
  const void* schedule;  // as in FwdParams; the sm90 backward reads bwd_schedule instead
  const void* q;         // [b, s_q, h_q, d_qk]
  const void* k;         // [b, s_k, h_kv, d_qk]
  const void* v;         // [b, s_k, h_kv, d_v]
  const void* out;       // [b, s_q, h_q, d_v]
  const float* lse;      // [b, h_q, s_q]
  const void* dout;      // [b, s_q, h_q, d_v]
  const float* dlse;     // [b, h_q, s_q] gradient of lse; may be nullptr
  void* dq;              // [b, s_q, h_q, d_qk]
  void* dk;              // [b, s_k, h_kv, d_qk]
  void* dv;              // [b, s_k, h_kv, d_v]
  Strides stride_q, stride_k, stride_v, stride_out, stride_dout, stride_dq, stride_dk, stride_dv;
  void* workspace;  // *_bwd_workspace_bytes(params) bytes; may be nullptr if that is 0
  int64_t workspace_bytes;
  void* keys_ready;  // sm90: cudaEvent_t before which k and v are not read, or nullptr; passes over
                     // the other tensors run before it
  const BwdSchedule* bwd_schedule;  // sm90: prepared for `mask`; nullptr: then it is built
  // Keys of other ranks (sm90; the cpu backend refuses both words): rows [remote_begin, s_k) of k, v, dk and dv, if
  // ready_rows or sent_word is set.
  // They may be on their way: ready_rows, ready_status and ready_timeout_us as in FwdParams; head dims up to 128. Own
  // keys come first, where the mode lets them.
  // Their gradients may be wanted early: *sent_word becomes sent_value once they are written, so that who waits for it
  // (a stream, by cuStreamWaitValue32) reads them while the kernel goes on; at the call's end at the latest. Own keys
  // are left behind them for sent_lead_us, where the mode lets them. nullptr: nobody waits. A call that returns an error
  // sets no word.
  int32_t remote_begin;
  uint32_t sent_value;
  const uint32_t* ready_rows;
  uint32_t* ready_status;
  int64_t ready_timeout_us;
  uint32_t* sent_word;
  int64_t sent_lead_us;
  // Whether the large sums in `workspace` are zeros (sm90): 0: cleared first; 1: and zeros when the call is done; 2: zeros
  // already, left by a call with 1 or 2, the same sizes, dtype and mode, and lists prepared or not alike.
  int32_t zero_sums;
};

}  // namespace fm3
