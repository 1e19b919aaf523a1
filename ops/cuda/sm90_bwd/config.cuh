// SPDX-License-Identifier: Apache-2.0
// Constants, shared-memory layout, barriers and kernel arguments of the Hopper backward.
//
// One work item is a key tile of one (batch, key/value head): kBlockK keys. The CTA walks the row
// tiles that the mask leaves visible (kBlockQ query rows each), over every query head of the group or
// over a part of them (plan.h), and keeps dK and dV in registers all the way. Per step, five products:
//     S^T = K Q^T     dP^T = V dO^T     dV += P^T dO     dK += dS^T Q     dQ_step = dS K
// Everything is transposed (keys are accumulator rows), so P^T turns into the register operand of dV
// in place, and a thread needs the mask bounds of two keys only.
//
// dQ: the fp32 sum lives in a ring of a few heads that stays in L2, is never cleared by a pass of its
// own and never read back by one. A row tile knows how many key tiles visit it. Who adds the last part
// (found by an atomic count) lists the sum, and a converter warp of whichever CTA is next converts it to
// the output and leaves zeros behind for the ring's next head; a row tile with one visitor never touches
// the ring. See dq.cuh.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../wgmma.cuh"
#include "args.h"

namespace fm3::sm90_bwd {

using ptx::Barrier;

constexpr int kNumInfo = 8;      // steps remembered; > C::kQStages + what the dQ writer may lag
constexpr int kNumEvents = 8;    // added dQ parts waiting to be counted
constexpr int kBackBuffers = 5;  // for pieces of a finished dQ sum, see dq_convert.cuh
constexpr int kNumConsumerWarps = 8;
constexpr int kNumThreads = 384;  // warpgroup 0: loader, writer, counter, converter; 1, 2: products
constexpr int kLoaderWarp = 0, kWriterWarp = 1, kCounterWarp = 2;  // 3: converter
// 128 * 24 + 256 * 240 = 64512 = 384 * 168, what the launch hands out.
constexpr int kHelperRegs = 24, kConsumerRegs = 240;
constexpr int kStepBarrier = 1;    // named barrier of the two consumer warpgroups
constexpr int kGroupBarrier = 2;   // and 3: of each of them
constexpr int kDsFreeBarrier = 4;  // and 5: each of them has read dS
constexpr uint32_t kAllLanes = 0xFFFFFFFF;

// One step: written by the loader, read by consumers and the dQ writer.
struct alignas(16) StepInfo {
  int32_t q_begin;  // first row
  uint32_t flags;   // kStepPartial, kStepBoundsSlot; from kStepTileShift on the row tile
  int32_t h_q_idx;
  uint32_t visits_order;  // visitors of the row tile (low 16), this tile's turn (high 16)
  __device__ int32_t q_tile_idx() const { return static_cast<int32_t>(flags >> kStepTileShift); }
  static constexpr int32_t kStepTileShift = 16;
};
constexpr uint32_t kStepPartial = 1, kStepBoundsSlot = 2;
static_assert(kMostTiles >> StepInfo::kStepTileShift == 0);

// A dQ part that has been added to the ring, to be counted, or the only part of its sum.
struct DqEvent {
  int32_t b_idx, h_q_idx, q_tile_idx;
  int32_t num_visits;              // parts of its sum, or one of the three below
  int32_t ring_sum_idx, part_idx;  // of an only part, which is in no ring: its buffer instead
};
constexpr int32_t kInOrder = -1, kLastInOrder = -2, kNoMoreEvents = 0;

// Rows of a row tile of a batch entry. Those behind its last one, if it is short, are the next tile's: the row pass gives them
// P = 0, so they add zeros to dK, dV and the tile's dQ, where nobody looks for them.
__device__ __forceinline__ TilePair rows_of_tile(const KernelArgs& args, int32_t b_idx,
                                                 int32_t q_tile_idx) {
  if (args.q_rows == nullptr) return row_tile(nullptr, 0, q_tile_idx, args.shape.s_q);
  const int2 rows =
      __ldg(reinterpret_cast<const int2*>(args.q_rows) + b_idx * args.num_q_tiles + q_tile_idx);
  return {rows.x, rows.y};
}

// Index of the mask that query head h_q_idx of batch entry b_idx obeys, in [0, b * h_mask).
__device__ __forceinline__ int32_t mask_index(const KernelArgs& args, int32_t b_idx,
                                              int32_t h_q_idx) {
  return b_idx * args.mask.h_mask + h_q_idx / (args.shape.h_q / args.mask.h_mask);
}

// d <= 128: each consumer warpgroup owns 64 of 128 keys and all columns of their dK and dV.
template <class T_, int kDim_, int kDimV_>
struct Config {
  using T = T_;
  static constexpr bool kSplitsColumns = false;
  static constexpr bool kIsTall = false;
  static constexpr int kDim = kDim_;  // d_qk, d_v rounded up to what is computed
  static constexpr int kDimV = kDimV_;
  static constexpr int kBlockK = 128;
  // Q is needed half a step earlier than dO (for the next S) and released half a step later (after
  // dK): two stages would leave its load less time than it takes.
  static constexpr int kQStages = 3, kDoutStages = 2;
  static constexpr bool kPacksRows = true;  // lse and delta are operands of products
  // Two stages of lse are enough: who releases Q of step i - 1 has P of step i. Only at a CTA's start, where
  // nothing has been released, the loader waits for it.
  static constexpr int kLseStages = 2;
  static constexpr int kDsBuffers = 2;
  static constexpr int kDqParts = 1, kDqBuffers = 1;
  static constexpr bool kTakesTwo = false;
  static_assert(kDim % 64 == 0 && kDimV % 64 == 0, "tiles are panels of 64 columns");
};

// 64: two steps at a time, in the order of consumer_two_steps.cuh.
template <class T_>
struct TwoStepConfig : Config<T_, 64, 64> {
  static constexpr bool kTakesTwo = true;
  static constexpr int kQStages = 4, kDoutStages = 4;  // the two steps at work and the next two
  static constexpr int kLseStages = kQStages;
  static constexpr int kDsBuffers = 4;  // two a pair of steps
  static constexpr int kDqBuffers = 2;
  // Step info is written again when Q of four steps later may be, and read until the dQ buffers of the pair before are free.
  static_assert(kNumInfo >= kQStages + 3);
};

// 192/128: 64 of 128 keys a warpgroup as well, in the order of consumer_tall.cuh.
template <class T_, int kDim_, int kDimV_>
struct TallConfig {
  using T = T_;
  static constexpr bool kSplitsColumns = false;
  static constexpr bool kIsTall = true;  // consumer_tall.cuh
  static constexpr int kDim = kDim_;
  static constexpr int kDimV = kDimV_;
  static constexpr int kBlockK = 128;
  static constexpr int kQStages = 2, kDoutStages = 1;  // what fits
  static constexpr bool kPacksRows = true;
  static constexpr int kLseStages = kQStages;
  static constexpr int kDsBuffers = 1;
  static constexpr int kDqParts = 1, kDqBuffers = 1;
  static constexpr bool kTakesTwo = false;
  static_assert(kDim == 192 && kDimV == 128, "registers and shared memory are counted for these");
};

// 192 and 256: dK and dV of 64 keys need 192 or 256 registers a thread of one warpgroup, so each consumer
// warpgroup owns half of the columns of dK, dV and dQ, and half of the rows of S and dP.
template <class T_, int kDim_, int kDimV_>
struct WideConfig {
  using T = T_;
  static constexpr bool kSplitsColumns = true;
  static constexpr bool kIsTall = false;
  static constexpr int kDim = kDim_;
  static constexpr int kDimV = kDimV_;
  static constexpr int kBlockK = 64;
  static constexpr int kQStages = 2, kDoutStages = kDim + kDimV > 384 ? 1 : 2;  // what fits
  static constexpr bool kPacksRows = false;
  static constexpr int kLseStages = kQStages;
  static constexpr int kDsBuffers = 1;
  static constexpr int kDqParts =
      kDim > 192 ? 2 : 1;  // staged one after the other in the same 32 KB
  static constexpr int kDqBuffers = 1;
  static constexpr bool kTakesTwo = false;
  static_assert(kDim % 64 == 0 && kDimV % 64 == 0, "tiles are panels of 64 columns");
};

// lse or delta of a row, in global and in shared memory.
template <class C>
using RowValue = std::conditional_t<C::kPacksRows, RowPieces, float>;

// Whether the kernel waits for keys of other ranks, and says when their gradients are written.
template <class C>
constexpr bool kServesRemote = !C::kSplitsColumns && !C::kIsTall;

// Derived sizes.
template <class C>
struct Sizes {
  static constexpr int kQBytes = kBlockQ * C::kDim * 2, kDoutBytes = kBlockQ * C::kDimV * 2;
  static constexpr int kKBytes = C::kBlockK * C::kDim * 2, kVBytes = C::kBlockK * C::kDimV * 2;
  static constexpr int kDsBytes = C::kBlockK * kBlockQ * 2;
  static constexpr int kPartFloats = kBlockQ * C::kDim / C::kDqParts;  // staged dQ, one ring sum
  static constexpr int kUnitFloats = kPartFloats / 8;                  // see dq.cuh
  static constexpr int kUnitBlocks = C::kDim / C::kDqParts / 16;       // 8-column blocks of a unit
  static_assert(kUnitBlocks == 4 || kUnitBlocks == 8 || kUnitBlocks == 12);
  static constexpr int kPiecePairs = 2;
  static constexpr int kUnitPieces = kUnitBlocks / (2 * kPiecePairs);
  static constexpr int kPieces = 8 * kUnitPieces;             // of a part
  static constexpr int kPieceFloats = kPartFloats / kPieces;  // 32 columns of 16 rows
  // Parts leave by TMA, [16 rows, 64 columns] at a time: one unit, two of them, or, of 12 blocks, the first 8 of one
  // unit or the last 4 of two.
  static constexpr bool kSharesPanel = kUnitBlocks == 12;
  static constexpr int kTileUnits = kUnitBlocks == 8 ? 1 : 2;
};

// name              arrivals        signalled by      waited by             then it is safe to
// tile_full[2]      1               loader            consumers, writer     read tile[.]
// tile_empty[2]     8 + 1           consumers, writer loader                overwrite tile[.]
// k_full, v_full    1 + bytes       loader (TMA)      consumers             read k, v
// k_empty, v_empty  8               consumers         loader                overwrite k, v: d <= 128 next V, K
// q_full[.]         1 + bytes       loader (TMA)      consumers             read q, lse, info
// q_empty[.]        8               consumers         loader                overwrite q, and its lse; d <= 128: the next step's
// dout_full[.]      1 + bytes       loader (TMA)      consumers             read dout, minus_delta, bounds
// dout_empty[.]     8               consumers         loader                overwrite dout, minus_delta
// dq_full[.]        8               consumers         writer                read dq
// dq_empty[.]       1               writer, counter   consumers             overwrite dq with the next; of a part or a buffer
// ds_full[g]        4               other warpgroup   warpgroup g           d = 64: read the ds that its dQ is of
// dq_back_full[.]   1 + bytes       converter (bulk)  that converter        read what it fetched to dq_back
// event_full[8]     1              writer            counter               read event[.]
// event_empty[8]    1               counter           writer                overwrite event[.]
// kStepBarrier      256             consumers         consumers             read both halves of ds, cleared rows of
//                                                                           q, dout; at a tile's end: stage dV, dK there.
//                                                                           192, 256: read p too; overwrite p, ds
// kGroupBarrier + g 128             warpgroup g       warpgroup g           store what it staged; overwrite it; read
//                                                                           cleared rows of v
// kDsFreeBarrier + g 256            warpgroup g       the other warpgroup   overwrite its half of ds (192/128: one buffer)
// Only d <= 128 stages dV and dK: of a tile's last dout and q the first warp of each group signals *_empty in
// the next tile, when TMA has read them.
template <class C>
struct alignas(1024) Smem {
  typename C::T kv[C::kBlockK * (C::kDim + C::kDimV)];  // panels of 64 columns; see KvPlaces
  typename C::T q[C::kQStages][kBlockQ * C::kDim];
  typename C::T dout[C::kDoutStages][kBlockQ * C::kDimV];
  typename C::T ds[C::kDsBuffers][C::kBlockK * kBlockQ];          // dS^T: a row is a key
  float dq[C::kDqBuffers * Sizes<C>::kPartFloats];                // accumulator order, see dq.cuh
  float dq_back[kBackBuffers][Sizes<C>::kPieceFloats];            // pieces of a finished sum
  typename C::T p[C::kSplitsColumns ? C::kBlockK * kBlockQ : 8];  // P^T, if both warpgroups need it
  RowValue<C> lse[C::kLseStages][kBlockQ];
  RowValue<C> minus_delta[C::kDoutStages][kBlockQ];
  int4 bounds[2][C::kBlockK];
  StepInfo info[kNumInfo];
  TileInfo tile[2];
  DqEvent event[kNumEvents];
  Barrier tile_full[2], tile_empty[2];
  Barrier k_full, v_full, k_empty, v_empty;
  Barrier q_full[C::kQStages], q_empty[C::kQStages];
  Barrier dout_full[C::kDoutStages], dout_empty[C::kDoutStages];
  Barrier dq_full[C::kDqBuffers], dq_empty[C::kDqParts * C::kDqBuffers];
  Barrier dq_back_full[kBackBuffers];
  Barrier event_full[kNumEvents], event_empty[kNumEvents];
  Barrier ds_full[C::kTakesTwo ? 2 : 1];
};

// Where K and V of the num_kv-th loaded tile lie in Smem::kv, in elements. For d <= 128 they change places
// from tile to tile: V is last needed half a step before K is, so the next K, needed first, comes early.
template <class C>
struct KvPlaces {
  static constexpr bool kSwaps = !C::kSplitsColumns && C::kDim == C::kDimV;
  static constexpr uint32_t kSecond = C::kBlockK * C::kDim;
  __device__ __forceinline__ static uint32_t k(uint32_t num_kv) {
    return kSwaps ? (num_kv & 1) * kSecond : 0;
  }
  __device__ __forceinline__ static uint32_t v(uint32_t num_kv) {
    return kSwaps ? (~num_kv & 1) * kSecond : kSecond;
  }
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
