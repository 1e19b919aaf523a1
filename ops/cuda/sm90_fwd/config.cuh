// SPDX-License-Identifier: Apache-2.0
// Hopper forward kernel: constants, shared memory, barriers. The schedule of the kernel in words is
// in kernel.cuh.
#pragma once

#include "../ptx.cuh"
#include "../schedule/device_schedule.cuh"
#include "../wgmma.cuh"
#include "args.h"

namespace fm3::sm90 {

// What the CTAs of a cluster share: nothing, or each step's K and V, of which each copies half into both.
// kTiles: they walk the list of two neighbouring query tiles. kHeads: that of one query tile, for two
// query heads of one key head and one row of masks; equal lists, so this costs no column on any mask.
enum class Team { kNone, kTiles, kHeads };

// kHeadQk, kHeadV: head dims the tiles are padded to (the tensor maps zero-fill past the real ones).
// kCols: key columns of one step; kItemCols is a multiple, so that wide heads split an item.
// kIsCut_: query tiles leave the grid (schedule/cuts.h).
template <int kHeadQk_, int kHeadV_, int kCols_, Team kTeamOf_, class T_, bool kIsCut_ = false>
struct FwdConfig {
  using T = T_;
  using Cut = FwdConfig<kHeadQk_, kHeadV_, kTeamOf_ == Team::kTiles ? kCutPairItemCols : kCols_,
                        kTeamOf_, T_, true>;
  static constexpr bool kIsCut = kIsCut_;
  static constexpr int kHeadQk = kHeadQk_, kHeadV = kHeadV_, kCols = kCols_;
  static constexpr bool kIsPair = kTeamOf_ != Team::kNone;
  // Query tiles and query heads that a team works on at a time.
  static constexpr int kTeamTiles = kTeamOf_ == Team::kTiles ? 2 : 1;
  static constexpr int kTeamHeads = kTeamOf_ == Team::kHeads ? 2 : 1;
  static constexpr int kItemCols = kTeamTiles == 1 ? kTileItemCols
                                   : kIsCut        ? kCutPairItemCols
                                                   : kPairItemCols;
  static constexpr int kStepsPerItem = kItemCols / kCols;
  static_assert(kStepsPerItem * kCols == kItemCols && kCols % 16 == 0);
  // Columns of a short step. Only the last of a tile's steps may be one, and not the only one; wide heads
  // leave out the second step of a short item instead.
  static constexpr int kShortCols =
      kStepsPerItem == 1 && kItemCols == kTileItemCols ? kShortItemCols : kCols;
  static constexpr int kTeam = kIsPair ? 2 : 1;  // CTAs that walk one list

  static constexpr int kRowsPerGroup = 64;  // query rows of one consumer warpgroup
  static constexpr int kNumConsumers = kTileQ / kRowsPerGroup;
  static constexpr int kThreads = 128 * (1 + kNumConsumers);
  static constexpr int kMaskWarps = 3;  // warps 1-3 of warpgroup 0; warp 0 loads
  static constexpr int kStages = 2;
  // 192/128 has room for one V beside two K of a whole item; two steps an item cost 5 % there.
  static constexpr int kStagesV = kHeadQk > 128 && kCols == kItemCols ? 1 : 2;
  // Four steps of lead cover the latency of reading bounds; d 256 leaves room for one.
  static constexpr int kMaskSlots = kHeadQk > 192 ? 1 : 4;
  // With three, the first group's Q of a tile is there before the tile before has ended, and the
  // second's takes the place of the first group's, which is done half a step earlier.
  static constexpr int kQSlots = kHeadQk <= 128 && kItemCols == kTileItemCols ? 3 : 2;
  static constexpr int kTileSlots = 2;
  // Claims passed on between two CTAs; the K ring keeps their loaders within two steps of each other,
  // so that at most three claims are under way.
  static constexpr int kClaimSlots = 4;
  // The loader of two heads, or of two tiles with cuts, has more to keep, consumers of 160 columns less.
  static constexpr bool kKeepsMore = kTeamHeads == 2 || (kIsCut && kHeadQk <= 128);
  static constexpr int kProducerRegs = kKeepsMore ? 56 : 40;
  static constexpr int kConsumerRegs = kKeepsMore ? 224 : 232;

  // Softmax's blocks of exponentials as they are written: 2 to 4 % of cycles at 64, +0.8 in the mean at 128.
  static constexpr bool kHoldsBlocks = kHeadQk <= 64;

  static constexpr int kPanelCols = 64;  // 128 bytes: one swizzle row
  static constexpr int kPanelsQk = (kHeadQk + kPanelCols - 1) / kPanelCols;
  static constexpr int kPanelsV = (kHeadV + kPanelCols - 1) / kPanelCols;
  static constexpr int kBytesQGroup = kPanelsQk * kRowsPerGroup * 128;
  static constexpr int kBytesK = kPanelsQk * kCols * 128;
  static constexpr int kBytesV = kPanelsV * kCols * 128;

  static constexpr int kMaskWords = (kCols + 31) / 32;
  static constexpr int kMaskRowWords = kMaskWords | 1;  // odd: rows fall into different banks

  // What a consumer must know of one step. Written by the loader before it arrives on k_full.
  enum StepFlags : int32_t {
    kFirst = 1,
    kLast = 2,
    kPartial = 4,
    kEnd = 8,
    kScaled = 16,
    kShort = 32
  };
  // Above the flags, if tiles leave the grid: rows of the tile, and its place in the list.
  static constexpr int kRowsShift = 8, kTileShift = 16;
  static_assert(kMostQTiles <= 0xFFFF && kTileQ <= 0xFF);
  static __device__ __forceinline__ int32_t rows_of_bits(int32_t bits) {
    return bits >> kRowsShift & 0xFF;
  }
  struct alignas(16) Step {
    int32_t flags, q_begin, h_idx, b_idx;
    __device__ __forceinline__ int32_t q_tile_idx() const {
      return kIsCut ? static_cast<int32_t>(static_cast<uint32_t>(flags) >> kTileShift)
                    : q_begin / kTileQ;
    }
    // Where the tile's rows end.
    __device__ __forceinline__ int32_t q_end(int32_t s_q) const {
      return kIsCut ? q_begin + rows_of_bits(flags) : s_q;
    }
  };

  // name              arrivals          signalled by        waited by    then it is safe to
  // q_full[r]         1 + bytes         loader (TMA)        a group      read q[r]
  // q_empty[r]        4 warps           that group          loader       overwrite q[r]
  // k_full[s]         1 + bytes         loader (TMA)        consumers    read k[s], step[s]
  // k_empty[s]        8 warps           consumers           loader       overwrite k[s], step[s]
  // v_full[s]         1 + bytes         loader (TMA)        consumers    read v[s]
  // v_empty[s]        8 warps           consumers           loader       overwrite v[s]; one slot only
  // mask_full[m]      3 warps           mask warps          consumers    read mask_bits[m]
  // mask_empty[m]     8 warps           consumers           mask warps   overwrite mask_bits[m]
  // tile_full[t]      1                 loader              mask warps   read tile[t]
  // tile_empty[t]     3 warps           mask warps          loader       overwrite tile[t]
  // claim_full[c]     1 + 4 bytes       both loaders        rank 1's     read claim[c]
  // named 1 + group   256               the other group     that group   issue the next products
  // With pairs, k_empty and v_empty take twice the arrivals: the consumers of both CTAs. On claim_full
  // rank 1's loader arrives, and rank 0's store brings the bytes.
  //
  // Claim:     with two slots, V of step j - 1 may be loaded as soon as K of step j has been.
  // Because:   that waits for k_empty of step j - 2, on which a warp arrives after it has waited for O of
  //            step j - 3, and V of step j - 1 takes the slot of V of step j - 3.
  // Breaks if: K is given back earlier, or V is loaded before K of the next step.
  // Tested by: test/unit/test_sm90_fwd_protocol.py.
  struct Tile {
    int32_t q_tile_idx, h_idx, b_idx;
    ListHead list;  // no spans: no more tiles
    // If tiles leave the grid.
    int32_t cut_begin;
    int32_t step_bits;  // what stands above the flags of its steps
    __device__ __forceinline__ int32_t q_begin() const {
      return kIsCut ? cut_begin : q_tile_idx * kTileQ;
    }
  };

  // What the loader keeps of the step whose V it has not copied yet; registers are scarce there, too.
  struct PendingV {
    int32_t k_begin, h_kv_idx, b_idx;
  };

  struct Smem {
    alignas(1024) uint8_t q[kQSlots][kBytesQGroup];
    alignas(1024) uint8_t k[kStages][kBytesK];
    alignas(1024) uint8_t v[kStagesV][kBytesV];
    // Bit b of word [row][w]: row of the query tile sees column 32 w + mask_bit_column(b) of the step.
    uint32_t mask_bits[kMaskSlots][kTileQ][kMaskRowWords];
    Step step[kStages];
    Tile tile[kTileSlots];
    int32_t claim[kClaimSlots];
    PendingV pending_v;
    int32_t seen_rows;  // key rows that the loader knows to be in (remote_rows.cuh)
    // If tiles leave the grid.
    alignas(16) QueryTileEntry next_entry;    // of the loader's next tile
    const QueryTileEntry* order;              // what the loader hands out,
    int32_t list_tiles;                       // entries of each list
    bool has_gaps;                            // some of them have no tile
    int32_t claim_base;                       // a claim counts from here on
    int32_t claimed_last;                     // the first claim behind the last tile
    int32_t revisit_head[kNumConsumers * 4];  // a warp each
    Step own_tile[kNumConsumers * 4];         // a warp each: the tile that it works on
    ptx::Barrier q_full[kQSlots], q_empty[kQSlots];
    ptx::Barrier k_full[kStages], k_empty[kStages], v_full[kStagesV], v_empty[kStagesV];
    ptx::Barrier mask_full[kMaskSlots], mask_empty[kMaskSlots];
    ptx::Barrier tile_full[kTileSlots], tile_empty[kTileSlots];
    ptx::Barrier claim_full[kClaimSlots];
  };
  static constexpr int kSmemBytes = sizeof(Smem);
  static_assert(kSmemBytes <= 232448, "Hopper gives one CTA 227 KiB");
};

// A slot of a ring and the parity to wait for; `kCount` slots.
template <int kCount>
struct RingPos {
  int32_t slot = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void next() {
    if (++slot == kCount) slot = 0, parity ^= 1;
  }
  __device__ __forceinline__ int32_t last_slot() const { return slot == 0 ? kCount - 1 : slot - 1; }
};

// Whether two CTAs walk the list of a pair of query tiles together, each loading half of K and V for
// both: for masks where neighbouring tiles see nearly the same columns. Of a mask with cuts some tiles are walked so, before
// all others. Uniform over the grid.
template <bool kIsCut>
__device__ __forceinline__ bool use_pairs(const FwdArgs& args) {
  const ScheduleTotals& totals = *args.schedule.totals;
  // Keys that are under way come in the order of single tiles.
  if constexpr (kIsCut) return are_pairs_worth_it(totals) && args.ready_rows == nullptr;
  return are_all_pairs_worth_it(totals);
}

// Whether query tiles begin at documents. Uniform over the grid.
__device__ __forceinline__ bool is_cut(const FwdArgs& args) {
  return args.schedule.q_begins != nullptr && args.schedule.totals->has_cuts();
}

__device__ __forceinline__ int32_t mask_head(const FwdArgs& args, int32_t h_idx) {
  return h_idx / (args.h_q / args.mask.h_mask);
}

}  // namespace fm3::sm90
