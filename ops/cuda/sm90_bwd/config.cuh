// SPDX-License-Identifier: Apache-2.0
// Constants, shared-memory layout, barriers and kernel arguments of the Hopper backward.
//
// One work item is a key tile of one (batch, key/value head): kBlockK keys. The CTA walks the row
// tiles that the mask leaves visible (kBlockQ query rows each), over every query head of the group,
// and keeps dK and dV in registers all the way. Per step, five products:
//     S^T = K Q^T     dP^T = V dO^T     dV += P^T dO     dK += dS^T Q     dQ_step = dS K
// Everything is transposed (keys are accumulator rows), so P^T and dS^T turn into the register
// operand of dV and dK in place, and a thread needs the mask bounds of two keys only.
//
// dQ: the fp32 sum lives in a ring of a few heads that stays in L2, is never cleared by a pass of its
// own and never read back by one. A row tile knows how many key tiles visit it. The last to add its
// part (found by an atomic count) converts the sum to the output and leaves zeros behind for the
// ring's next head; a row tile with one visitor never touches the ring. See dq.cuh.
#pragma once

#include <cstdint>

#include "../wgmma.cuh"
#include "args.h"

namespace fm3::sm90_bwd {

using ptx::Barrier;
using sm90::ColumnHull;

constexpr int kNumStages = 2;       // of Q and of dO
constexpr int kNumInfo = 8;         // steps remembered; > kNumStages + what the dQ writer may lag
constexpr int kNumEvents = 8;       // finished dQ parts waiting for the converter warps
constexpr int kNumConsumerWarps = 8;
constexpr int kNumThreads = 384;    // warpgroup 0: loader, dQ writer, 2 converters; 1 and 2: products
constexpr int kLoaderWarp = 0, kWriterWarp = 1, kConverterWarp = 2;
// 128 * 40 + 256 * 232 = 64512 = 384 * 168, what the launch hands out.
constexpr int kHelperRegs = 24, kConsumerRegs = 240;
constexpr int kStepBarrier = 1;     // named barrier of the two consumer warpgroups
constexpr float kLog2E = 1.4426950408889634f;

// What a key tile is about. num_steps < 0: no more work.
struct TileInfo {
  int32_t b_idx, h_kv_idx, k_tile_idx, num_steps;
};

// One step: written by the loader, read by consumers and the dQ writer.
struct StepInfo {
  int32_t q_tile_idx;
  uint32_t flags;         // kStepPartial, kStepBoundsSlot
  int32_t h_q_idx;
  uint32_t visits_order;  // visitors of the row tile (low 16), this tile's turn among them (high 16)
};
constexpr uint32_t kStepPartial = 1, kStepBoundsSlot = 2;

// A dQ part that has been added to the ring: the converter counts it and converts after the last.
struct DqEvent {
  int32_t b_idx, h_q_idx, q_tile_idx, num_visits;  // num_visits == 0: no more events
  int32_t ring_tile_idx, head_idx;                 // head_idx = b_idx * h_kv + h_kv_idx
};

// Index of the mask that query head h_q_idx of batch entry b_idx obeys, in [0, b * h_mask).
__device__ __forceinline__ int32_t mask_index(const KernelArgs& args, int32_t b_idx,
                                              int32_t h_q_idx) {
  return b_idx * args.mask.h_mask + h_q_idx / (args.shape.h_q / args.mask.h_mask);
}

// Each consumer warpgroup owns 64 of 128 keys (d <= 128).
template <class T_, int kDim_, int kDimV_>
struct Config {
  using T = T_;
  static constexpr int kDim = kDim_;    // d_qk, d_v rounded up to what is computed
  static constexpr int kDimV = kDimV_;
  static constexpr int kBlockK = 128;
  static constexpr int kDqFloats = kBlockQ * kDim;         // one row tile of dQ
  static constexpr int kDqBytes = kDqFloats * 4;
  static constexpr int kQBytes = kBlockQ * kDim * 2, kDoutBytes = kBlockQ * kDimV * 2;
  static constexpr int kKBytes = kBlockK * kDim * 2, kVBytes = kBlockK * kDimV * 2;
  static_assert(kDim % 64 == 0 && kDimV % 64 == 0, "tiles are panels of 64 columns");
};

// name              arrivals        signalled by      waited by             then it is safe to
// tile_full[2]      1               loader            consumers, writer     read tile[.]
// tile_empty[2]     8 + 1           consumers, writer loader                overwrite tile[.]
// k_full, v_full    1 + bytes       loader (TMA)      consumers             read k, v
// k_empty, v_empty  8               consumers         loader                overwrite k, v
// q_full[2]         1 + bytes       loader (TMA)      consumers             read q, lse, info, bounds
// q_empty[2]        8               consumers         loader                overwrite q, lse
// dout_full[2]      1 + bytes       loader (TMA)      consumers             read dout, delta
// dout_empty[2]     8               consumers         loader                overwrite dout, delta
// dq_full           8               consumers         writer                read dq
// dq_empty          1               writer            consumers             overwrite dq
// event_full[8]     1               writer            converter             read event[.]
// event_empty[8]    1               converter         writer                overwrite event[.]
// kStepBarrier      256             consumers         consumers             read both halves of ds
template <class C>
struct alignas(1024) Smem {
  typename C::T k[C::kBlockK * C::kDim];                // panels of 64 columns
  typename C::T v[C::kBlockK * C::kDimV];
  typename C::T q[kNumStages][kBlockQ * C::kDim];
  typename C::T dout[kNumStages][kBlockQ * C::kDimV];
  typename C::T ds[2][C::kBlockK * kBlockQ];            // dS^T: a row is a key
  float dq[C::kDqFloats];                               // accumulator order, see dq.cuh
  int4 bounds[2][C::kBlockK];
  float lse_log2[kNumStages][kBlockQ];
  float delta[kNumStages][kBlockQ];
  StepInfo info[kNumInfo];
  TileInfo tile[2];
  DqEvent event[kNumEvents];
  Barrier tile_full[2], tile_empty[2];
  Barrier k_full, v_full, k_empty, v_empty;
  Barrier q_full[kNumStages], q_empty[kNumStages];
  Barrier dout_full[kNumStages], dout_empty[kNumStages];
  Barrier dq_full, dq_empty;
  Barrier event_full[kNumEvents], event_empty[kNumEvents];
};

// Position in a ring of kDepth barriers that is walked forever.
template <int kDepth>
struct RingPos {
  uint32_t count = 0;
  __device__ __forceinline__ uint32_t slot() const { return count % kDepth; }
  __device__ __forceinline__ uint32_t parity() const { return (count / kDepth) & 1; }
  // Parity to wait for before the slot is written for this count (the first round never waits).
  __device__ __forceinline__ uint32_t write_parity() const { return parity() ^ 1; }
};

}  // namespace fm3::sm90_bwd
