// SPDX-License-Identifier: Apache-2.0
// Warp 0 of warpgroup 0: claims query tiles, walks their spans and issues the copies, ahead of the
// consumers.
#pragma once

#include "remote_rows.cuh"
#include "tile_lists.cuh"
#include "tile_place.h"

namespace fm3::sm90 {

template <class Config>
__device__ __forceinline__ TilePlace locate_tile(const FwdArgs& args, int32_t count,
                                                 int32_t tile_id) {
  int32_t num_late = 0;
  if (args.ready_rows != nullptr) {
    const ScheduleTotals* const totals = args.schedule.totals;
    num_late = __ldg(Config::kTeamTiles == 2 ? &totals->late_pairs : &totals->late_tiles);
  }
  return place_tile({args.b, args.h_q, count, args.heads_per_group, num_late, Config::kTeamHeads},
                    tile_id);
}

template <class Config>
class Loader {
  using Smem = typename Config::Smem;
  using Tile = typename Config::Tile;

 public:
  __device__ __forceinline__ Loader(const FwdArgs& args, Smem& smem, int32_t rank)
      : args_(args), smem_(smem), rank_(rank), is_issuer_(threadIdx.x % 32 == 0) {}

  // PPT: the next tile is claimed while the current one's copies are still being issued, so a CTA
  // asks for work at the pace it finishes it. A claim takes an atomic, the tile's place in the order
  // and its spans, each a trip to L2: one is begun after each step and looked at after the next, so
  // that the copies, which are only two steps ahead, never wait for one.
  // is_behind_pairs: what is left are the tiles that are in no pair.
  __device__ __forceinline__ void run(bool is_behind_pairs) {
    const auto num_teams = static_cast<int32_t>(gridDim.x) / Config::kTeam;
    claimed_ = static_cast<int32_t>(blockIdx.x) / Config::kTeam - num_teams;
    if (is_issuer_) {
      smem_.seen_rows = 0;
      if constexpr (Config::kIsCut) begin_lists(is_behind_pairs, num_teams);
    }
    __syncwarp();
    Tile tile{};
    uint32_t packed = 0;  // 32 spans of the tile, one a lane
    int32_t span_idx = 0, num_steps = 0, k_begin = 0, flags = 0;  // num_steps: left of the span
    int32_t phase = 1;                                            // of the next claim
    while (true) {
      if (num_steps == 0 && span_idx == tile.list.num_spans() && phase == kClaimPhases) {
        tile = smem_.tile[tile_pos_.slot];
        tile_pos_.next();
        if (tile.list.num_spans() == 0) break;
        packed = next_spans_;
        span_idx = 0, phase = 0;
      }
      if (num_steps == 0 && span_idx < tile.list.num_spans()) {
        if (span_idx != 0 && span_idx % 32 == 0) {
          packed = fetch_spans(tile_spans<Config>(args_, own_tile(tile)), tile.list.num_spans(),
                               span_idx);
        }
        const Span span = {__shfl_sync(kAllLanes, packed, span_idx % 32)};
        num_steps = steps_of<Config>(span);
        k_begin = span.k_begin() + tile.list.shift();
        flags = (span_idx == 0 ? Config::kFirst : 0) | (span.is_full() ? 0 : Config::kPartial);
        if (Config::kShortCols < Config::kCols && span.ends_short()) flags |= Config::kShort;
        if constexpr (Config::kIsCut) flags |= own_tile(tile).step_bits;
        ++span_idx;
      }
      if (num_steps > 0) {
        --num_steps;
        const bool is_last = num_steps == 0 && span_idx == tile.list.num_spans();
        load_step(tile, k_begin, is_last ? flags | Config::kLast : flags & ~Config::kShort);
        flags &= ~Config::kFirst;
        k_begin += Config::kCols;
      }
      if (phase < kClaimPhases) advance_claim(phase++);
    }
    finish();
  }

 private:
  static constexpr int32_t kClaimPhases = 3;
  static constexpr bool kHasPairSteps = Config::kItemCols == kPairItemCols;

  // The current tile: where tiles may leave the grid, in its slot, because registers are scarce.
  __device__ __forceinline__ const Tile& own_tile(const Tile& tile) const {
    if constexpr (Config::kIsCut) return smem_.tile[tile_pos_.last_slot()];
    return tile;
  }
  // Tiles of a list that are handed out.
  __device__ __forceinline__ int32_t list_tiles() const {
    if constexpr (Config::kIsCut) return smem_.list_tiles;
    return (args_.schedule.num_q_tiles + Config::kTeamTiles - 1) / Config::kTeamTiles;
  }
  __device__ __forceinline__ const QueryTileEntry* order() const {
    if constexpr (Config::kIsCut) return smem_.order;
    return team_lists<Config>(args_).order;
  }
  __device__ __forceinline__ int32_t claim_base() const {
    if constexpr (Config::kIsCut) return smem_.claim_base;
    return static_cast<int32_t>(gridDim.x) / Config::kTeam;
  }
  __device__ __forceinline__ int32_t member(int count) const { return count == 2 ? rank_ : 0; }

  // Which lists are handed out, and the first claim.
  // Claim:      behind the pairs each tile is claimed once.
  // Because:    one counter goes on: a claim behind the last pair is a tile of the rest, and each team has made one such
  //             claim, its last, which its rank 0 begins with; rank 1 claims another.
  // Breaks if:  a loader claims on behind the last pair, or ends before.
  // Tested by:  test/unit/test_sm90_fwd_claims.py (a model), test/gpu/test_sm90_fwd_cuts.py
  __device__ __forceinline__ void begin_lists(bool is_behind_pairs, int32_t num_teams) {
    const ScheduleTotals& totals = *args_.schedule.totals;
    const EntryCounts counts = Config::kTeamTiles == 2 ? totals.pairs
                               : is_behind_pairs       ? totals.rest
                                                       : totals.tiles;
    smem_.order = is_behind_pairs ? args_.schedule.rest : team_lists<Config>(args_).order;
    smem_.list_tiles = counts.most;
    smem_.has_gaps = counts.fewest < counts.most;
    smem_.claim_base = num_teams;
    if (is_behind_pairs) {
      const int32_t num_pair_claims = args_.b * args_.h_q * totals.pairs.most;
      smem_.claim_base = num_teams / 2 - num_pair_claims;
      claimed_ = rank_ == 0 ? smem_.claimed_last : atomicAdd(args_.next_tile, 1);
    }
  }

  // The claimed tile grows in its slot of shared memory: registers are scarce here, too.
  __device__ __forceinline__ void advance_claim(int32_t phase) {
    Tile& next = smem_.tile[tile_pos_.slot];
    if (phase == 0) {
      ask_for_claim();
    } else if (phase == 1) {
      if (Config::kIsCut && smem_.has_gaps) pass_over_gaps();
      const int32_t tile_id = receive_claim();
      ptx::mbar_wait_warp(&smem_.tile_empty[tile_pos_.slot], tile_pos_.parity ^ 1);
      const SpanLists& lists = team_lists<Config>(args_);
      set_entry({});
      if (tile_id < num_tiles()) {
        const TilePlace place = locate_tile<Config>(args_, list_tiles(), tile_id);
        if (is_issuer_)
          next.h_idx = place.h_idx + member(Config::kTeamHeads), next.b_idx = place.b_idx;
        fetch_entry(order()[mask_list(args_, place.b_idx, place.h_idx) * lists.count + place.rank]);
      }
    } else {
      if (is_issuer_) {
        const QueryTileEntry entry = own_entry();
        next.q_tile_idx = entry.q_tile_idx * Config::kTeamTiles + member(Config::kTeamTiles);
        next.list = entry.list;
        if constexpr (Config::kIsCut) {
          const int32_t num_rows = entry.rows.count(member(Config::kTeamTiles));
          next.cut_begin = entry.rows.begin_of(member(Config::kTeamTiles));
          next.step_bits = num_rows << Config::kRowsShift | next.q_tile_idx << Config::kTileShift;
        }
        ptx::mbar_arrive(&smem_.tile_full[tile_pos_.slot]);
      }
      __syncwarp();
      if ((Config::kIsCut ? next.list : next_entry_.list).num_spans() > 0) {
        const Tile tile = next;
        next_spans_ = fetch_spans(tile_spans<Config>(args_, tile), tile.list.num_spans(), 0);
        if (is_issuer_) prefetch_q(tile);
        if constexpr (Config::kQSlots > 2) load_q(tile, 0);
      }
    }
  }
  __device__ __forceinline__ void ask_for_claim() {
    if (Config::kIsPair && rank_ != 0) {
      if (is_issuer_) {
        ptx::mbar_arrive_expect_tx(&smem_.claim_full[claim_pos_.slot], sizeof(int32_t));
      }
      claimed_ = 0;
    } else if (is_issuer_) {
      claimed_ = atomicAdd(args_.next_tile, 1);
    }
  }
  __device__ __forceinline__ int32_t receive_claim() {
    const uint32_t slot = claim_pos_.slot;
    const int32_t claimed = __shfl_sync(kAllLanes, claimed_, 0);  // below 0: the tile to begin with
    int32_t tile_id = claim_base() + claimed;
    if constexpr (Config::kIsCut && Config::kTeamTiles == 2) {
      if (is_issuer_) smem_.claimed_last = claimed;
    }
    if (Config::kIsPair && claimed >= 0) {
      if (rank_ != 0) {
        ptx::mbar_wait_warp(&smem_.claim_full[slot], claim_pos_.parity);
        tile_id = *static_cast<volatile int32_t*>(&smem_.claim[slot]);
      } else if (is_issuer_) {
        ptx::store_async_b32(ptx::map_to_cta(ptx::smem_addr(&smem_.claim[slot]), 1), tile_id,
                             ptx::map_to_cta(ptx::smem_addr(&smem_.claim_full[slot]), 1));
      }
      claim_pos_.next();
    }
    return tile_id;
  }

  // A tile's entry is read here and looked at one step later. With rows in it, it waits in shared memory.
  __device__ __forceinline__ void set_entry(const QueryTileEntry& entry) {
    if constexpr (!Config::kIsCut) {
      next_entry_ = entry;
    } else if (is_issuer_) {
      smem_.next_entry = entry;
    }
  }
  __device__ __forceinline__ void fetch_entry(const QueryTileEntry& entry) {
    if constexpr (!Config::kIsCut) {
      next_entry_ = entry;
    } else if (is_issuer_) {
      ptx::copy_async_16(&smem_.next_entry, &entry);
    }
  }
  __device__ __forceinline__ QueryTileEntry own_entry() const {
    if constexpr (!Config::kIsCut) return next_entry_;
    ptx::copy_async_wait();
    return smem_.next_entry;
  }

  __device__ __forceinline__ int32_t num_tiles() const {
    return args_.b * (args_.h_q / Config::kTeamHeads) * list_tiles();
  }
  // Some list of the mask has fewer tiles than list_tiles: a claim of one that is not there is followed by the next, at once.
  // Claim:      the loaders of a team get the same tiles, in the same order, and neither waits for ever.
  // Because:    rank 0 sends only claims of tiles that are there, one for each that rank 1 asks for, and does nothing else
  //             until it has one to send: while rank 1 waits it copies nothing, and rank 0 could go on for two steps only.
  // Breaks if:  rank 0 goes on with its steps in between, or sends what it passes over.
  // Tested by:  test/unit/test_sm90_fwd_claims.py (a model), test/gpu/test_sm90_fwd_cuts.py
  __device__ __forceinline__ void pass_over_gaps() {
    const SpanLists& lists = team_lists<Config>(args_);
    while (true) {
      const int32_t claimed = __shfl_sync(kAllLanes, claimed_, 0);
      if (Config::kIsPair && rank_ != 0 && claimed >= 0) return;  // what is sent is there
      const int32_t tile_id = claim_base() + claimed;
      if (tile_id >= num_tiles()) return;
      const TilePlace place = locate_tile<Config>(args_, list_tiles(), tile_id);
      const int64_t list_begin = mask_list(args_, place.b_idx, place.h_idx) * lists.count;
      if (order()[list_begin + place.rank].list.num_spans() > 0) return;
      ask_for_claim();
    }
  }

  // Copies are issued in the order the consumers need them: K of this step, V of the step before
  // (they multiply P V one step late), and the query tile after both, because its buffer is freed
  // last.
  __device__ __forceinline__ void load_step(const Tile& tile, int32_t k_begin, int32_t flags) {
    const int32_t h_kv_idx = tile.h_idx / (args_.h_q / args_.h_kv);
    const int32_t q_begin = tile.q_begin();
    ptx::mbar_wait_warp(&smem_.k_empty[k_pos_.slot], k_pos_.parity ^ 1);
    if (args_.ready_rows != nullptr) {
      int32_t seen_rows = smem_.seen_rows;
      wait_rows(args_, args_.s_k, seen_rows, k_begin + Config::kCols);
      if (is_issuer_) smem_.seen_rows = seen_rows;
      __syncwarp();
    }
    if (is_issuer_) {
      smem_.step[k_pos_.slot] = {flags | (args_.needs_prescale ? Config::kScaled : 0), q_begin,
                                 tile.h_idx, tile.b_idx};
      ptx::Barrier* barrier = &smem_.k_full[k_pos_.slot];
      ptx::mbar_arrive_expect_tx(barrier, Config::kBytesK);
#pragma unroll
      for (int panel = 0; panel < Config::kPanelsQk; ++panel) {
        load_panel(smem_.k[k_pos_.slot], &args_.map_k[kHasPairSteps], barrier, panel, panel % 2,
                   k_begin, h_kv_idx, tile.b_idx);
      }
    }
    __syncwarp();
    k_pos_.next();
    if (has_pending_v_) load_pending_v();
    if (is_issuer_) smem_.pending_v = {k_begin, h_kv_idx, tile.b_idx};
    has_pending_v_ = true;
    if (flags & Config::kFirst) {
      if (Config::kQSlots == 2 || next_q_group_ == 0) load_q(tile, 0);
      load_q(tile, 1);
    }
  }

  // 64 columns of K or V. In a pair, CTA `owner` loads them for both.
  __device__ __forceinline__ void load_panel(uint8_t* buffer, const CUtensorMap* map,
                                             ptx::Barrier* barrier, int panel, int32_t owner,
                                             int32_t k_begin, int32_t h_kv_idx, int32_t b_idx) {
    uint8_t* dst = buffer + panel * Config::kCols * 128;
    const int32_t column = panel * Config::kPanelCols;
    if constexpr (!Config::kIsPair) {
      ptx::tma_load_4d(dst, map, barrier, column, k_begin, h_kv_idx, b_idx);
    } else if (owner == rank_) {
      ptx::tma_load_4d_multicast(dst, map, barrier, 3, column, k_begin, h_kv_idx, b_idx);
    }
  }

  // The buffer of Q is free only when the tile before has its last scores; what can be done earlier
  // is to have Q in L2 by then.
  __device__ __forceinline__ void prefetch_q(const Tile& tile) {
#pragma unroll
    for (int group = Config::kQSlots > 2 ? 1 : 0; group < Config::kNumConsumers; ++group) {
#pragma unroll
      for (int panel = 0; panel < Config::kPanelsQk; ++panel) {
        ptx::tma_prefetch_4d(&args_.map_q, panel * Config::kPanelCols,
                             tile.q_begin() + group * Config::kRowsPerGroup, tile.h_idx,
                             tile.b_idx);
      }
    }
  }

  __device__ __forceinline__ void load_q(const Tile& tile, int group) {
    const int32_t slot = q_pos_.slot;
    ptx::mbar_wait_warp(&smem_.q_empty[slot], q_pos_.parity ^ 1);
    if (is_issuer_) {
      ptx::mbar_arrive_expect_tx(&smem_.q_full[slot], Config::kBytesQGroup);
#pragma unroll
      for (int panel = 0; panel < Config::kPanelsQk; ++panel) {
        ptx::tma_load_4d(smem_.q[slot] + panel * Config::kRowsPerGroup * 128, &args_.map_q,
                         &smem_.q_full[slot], panel * Config::kPanelCols,
                         tile.q_begin() + group * Config::kRowsPerGroup, tile.h_idx, tile.b_idx,
                         ptx::kEvictFirst);
      }
    }
    __syncwarp();
    q_pos_.next();
    if constexpr (Config::kQSlots > 2) next_q_group_ ^= 1;
  }

  __device__ __forceinline__ void load_pending_v() {
    if constexpr (Config::kStagesV == 1) {
      ptx::mbar_wait_warp(&smem_.v_empty[v_pos_.slot], v_pos_.parity ^ 1);
    }
    if (is_issuer_) {
      ptx::Barrier* barrier = &smem_.v_full[v_pos_.slot];
      const typename Config::PendingV pending = smem_.pending_v;
      ptx::mbar_arrive_expect_tx(barrier, Config::kBytesV);
#pragma unroll
      for (int panel = 0; panel < Config::kPanelsV; ++panel) {
        load_panel(smem_.v[v_pos_.slot], &args_.map_v[kHasPairSteps], barrier, panel,
                   (panel + 1) % 2, pending.k_begin, pending.h_kv_idx, pending.b_idx);
      }
    }
    __syncwarp();
    v_pos_.next();
  }

  __device__ __forceinline__ void finish() {
    ptx::mbar_wait_warp(&smem_.k_empty[k_pos_.slot], k_pos_.parity ^ 1);
    if (is_issuer_) {
      smem_.step[k_pos_.slot] = {Config::kEnd, 0, 0, 0};
      ptx::mbar_arrive(&smem_.k_full[k_pos_.slot]);
    }
    __syncwarp();
    if (has_pending_v_) load_pending_v();
  }

  const FwdArgs& args_;
  Smem& smem_;
  int32_t rank_;  // in the team
  bool is_issuer_;
  RingPos<Config::kStages> k_pos_;
  RingPos<Config::kStagesV> v_pos_;
  RingPos<Config::kClaimSlots> claim_pos_;
  RingPos<Config::kTileSlots> tile_pos_;
  RingPos<Config::kQSlots> q_pos_;
  int32_t next_q_group_ = 0;
  // The tile to come.
  int32_t claimed_ = 0;
  QueryTileEntry next_entry_{};
  uint32_t next_spans_ = 0;
  bool has_pending_v_ = false;
};

}  // namespace fm3::sm90
