// SPDX-License-Identifier: Apache-2.0
// How a call's work is cut and in which order it is claimed: for the device and for the tests on the host.
//
// A work item is a key tile of one key/value head, over the query heads of its group or over a part of
// them. What a simulation of items, CTAs, ring and L2 and the H200 agree on (results/sm90_bwd.md):
// * Items that follow each other in the list run at the same time. Where their walks begin at the same
//   row tile (causal masks: at the last one), one finds in L2 what the other has left there, if all heads
//   of a row tile come before the next row tile. So each list says where its key tiles are aligned.
// * What an item touches (Q, dO and dQ of its row tiles and heads) must fit into L2 all the same, or a
//   CTA that starts a little later finds nothing of it there. So a group is cut where rows are long.
// * The longest items of the last heads must not start last. So a group is cut where items are few, or
//   the items of several heads are claimed in turns.
#pragma once

#include <cstdint>

#include "steps.h"

namespace fm3::sm90_bwd {

// What the key tiles of one mask visit. Where two neighbours are after a few steps tells whether they walk
// together.
constexpr int32_t kSampleStep = 7;
struct VisitSummary {
  int64_t num_steps;       // of all key tiles
  int32_t max_steps;       // of one
  int32_t max_late_steps;  // of one in the second half
  int32_t num_visiting;    // key tiles that visit anything
  int32_t num_apart_up;    // neighbours that are at different rows after kSampleStep steps,
  int32_t num_apart_down;  // walking up, walking down
  int32_t num_tiles;       // key tiles
};

enum Walk : int32_t { kWalkUp = 0, kWalkUpAligned = 1, kWalkDownAligned = 2 };

// How the key tiles of a list follow each other: that with most steps first, or by key.
enum class TileOrder { kByLength, kFirstKeysFirst, kLastKeysFirst };

FM3_HOST_DEVICE Walk choose_walk(const VisitSummary& visits) {
  const int32_t few = visits.num_visiting / 2;
  if (visits.num_apart_up <= few) return kWalkUpAligned;
  return visits.num_apart_down <= few ? kWalkDownAligned : kWalkUp;
}

struct PlanInput {
  int32_t group;         // query heads of a key/value head
  int32_t num_kv_heads;  // b * h_kv
  int32_t num_k_tiles;
  int32_t ring_heads;      // query heads whose sums the ring holds; a multiple of max_part_heads
  int32_t max_part_heads;  // divides group
  int32_t can_cut;         // whether an item may have fewer
  int32_t num_sms;
  int32_t step_bytes;  // Q, dO and dQ of a row tile of one head
  int32_t is_deterministic;
  int32_t num_q_tiles;
};

struct WorkPlan {
  int32_t part_heads;      // query heads of an item; divides the group
  int32_t num_parts;       // group / part_heads
  int32_t heads_together;  // (batch, kv head, part)s whose key tiles are claimed in turns
  int32_t
      ring_slots;  // of part_heads query heads each; at least 2 * heads_together, or enough for all
  int32_t is_in_order;  // parts of a sum are added in turns
  int32_t wave_items;   // items that begin together, see comes_in_waves; 0: each as it comes
};

constexpr float kL2Bytes = 32 << 20;  // of 50 MB, what items that run together may count on
constexpr float kTileSteps = 3;       // a change of the key tile, in steps
constexpr float kSumSteps = 1;        // adding a part's dK and dV to fp32 sums, in steps
constexpr float kTurnSteps = 2;       // in a fixed order, from one addition to a sum to the next
constexpr int32_t kMaxTogether = 8;

// Whether L2 cannot hold what CTAs touch (Q, dO and dQ) that are anywhere in so many row tiles of a head.
FM3_HOST_DEVICE bool is_beyond_l2(const PlanInput& in, int32_t row_tiles) {
  return 1.f * row_tiles * in.step_bytes > 1.5f * kL2Bytes;
}

// Whether key tiles of a list are taken in the order of keys, so that neighbours run together, and not the
// longest (in a fixed order: the last) ones first: where walks begin together and tiles that come late are
// cheap against all the work that a multiprocessor has. For grouped heads, whose items share rows, and for long rows
// (in a fixed order: long walks). 128K, 32 heads, an H200: causal blockwise from 83 to 14 GB through memory (3 % of the time), share question 2 %, prefix
// document 1 %, causal document 37 to 12 GB (0 %). In a fixed order it is walking down that counts: walked up, a tile
// begins where it crosses the diagonal, and waves of items drift apart (causal, 16 heads: 852 GB in 339 ms, 16 in 294).
FM3_HOST_DEVICE bool goes_by_key(const PlanInput& in, const VisitSummary& visits) {
  const int32_t row_tiles = in.is_deterministic ? visits.max_steps : in.num_q_tiles;
  if (in.group == 1 && !is_beyond_l2(in, row_tiles)) return false;
  if (choose_walk(visits) != kWalkDownAligned) return false;
  return int64_t{visits.max_late_steps} * in.max_part_heads * 8 * in.num_sms <=
         visits.num_steps * in.group * in.num_kv_heads;
}

// Whether parts of a sum are added in turns: in the deterministic mode, and where they are few and come in turns by
// themselves, as those of a window do: its key tiles are alike and begin at later and later rows. The first part is
// stored then, not added, and sums need no zeros.
constexpr int32_t kFewVisits = 8;  // of a row tile
FM3_HOST_DEVICE bool adds_in_order(const PlanInput& in, const VisitSummary& visits) {
  if (in.is_deterministic) return true;
  const bool are_alike = int64_t{visits.max_steps} * visits.num_visiting <= 2 * visits.num_steps;
  return are_alike && choose_walk(visits) == kWalkUp &&
         visits.num_steps <= int64_t{kFewVisits} * in.num_q_tiles;
}

// Whether items begin in waves of one a multiprocessor: where all walks are equally long and longer than what L2 holds.
// Nothing else keeps CTAs together there: they drift apart from item to item, until each reads its rows from memory.
// (Of a causal mask the short items of each head bring them together again.) 128K full, 16 heads, an H200: 629 GB went
// through memory in 617 ms; with waves 111 GB in 592; with every second wave only 517 GB in 601.
FM3_HOST_DEVICE bool comes_in_waves(const PlanInput& in, const VisitSummary& visits) {
  const bool are_equal = int64_t{visits.max_steps} * in.num_k_tiles == visits.num_steps;
  return in.group == 1 && are_equal && is_beyond_l2(in, visits.max_steps);
}

// How many items are claimed when the last one of the item's wave is; 0: it need not wait.
FM3_HOST_DEVICE int32_t wave_end(int32_t work_idx, int32_t num_items, int32_t wave_items) {
  if (wave_items == 0) return 0;
  const int64_t end = (int64_t{work_idx / wave_items} + 1) * wave_items;
  return end <= num_items ? static_cast<int32_t>(end) : 0;
}

// In a fixed order turns keep an item behind the one before it, but nothing keeps the others near. So there the first item
// of a wave waits until the last one of the wave before is kWaveTurns turns from the end of its walk: how many parts a
// sum of the row tile there then has, 0 if it need not wait. (Waves that begin together stand kTurnSteps a multiprocessor
// at every start: 128K full 0.82 of the free mode, so 0.99.)
// Claim:      those parts come from items that were claimed earlier: the `rank` key tiles before it.
// Because:    where every key tile visits every row tile, parts are added in the order of ranks.
// Breaks if:  it is asked for a mask of which a tile leaves a row out: the sum may never have so many parts.
// Tested by:  test/unit/test_sm90_bwd_plan.py, test_sm90_bwd_waves.py; test_rows_beyond_l2 of
//             test/gpu/test_sm90_contract.py
constexpr int32_t kWaveTurns = 3;  // row tiles a multiprocessor; turns alone take kTurnSteps
FM3_HOST_DEVICE int32_t wave_start_parts(const PlanInput& in, const VisitSummary& visits,
                                         int32_t work_idx, int32_t rank, int32_t wave_items) {
  const bool are_all = int64_t{in.num_q_tiles} * in.num_k_tiles == visits.num_steps;
  return are_all && wave_items > 0 && work_idx % wave_items == 0 ? rank : 0;
}

// In a fixed order rows are walked down only where the key tiles are taken in the order of keys, which then
// is the order of turns, and where the heads of an item have one mask, hence one order.
FM3_HOST_DEVICE Walk choose_item_walk(const PlanInput& in, const VisitSummary& visits,
                                      bool is_in_order, bool same_mask) {
  const Walk walk = choose_walk(visits);
  const bool stays =
      !is_in_order || walk != kWalkDownAligned || (same_mask && goes_by_key(in, visits));
  return stays ? walk : kWalkUp;
}

// Free order: longest first, so that what starts last is short, or by key (goes_by_key). Fixed order: from the
// last key tile, rows walked up; every row tile is then summed in that order, and under a causal rule or a window
// the tiles reach it in that order by themselves, because a later tile starts at later rows. Or by key, rows
// walked down (choose_item_walk).
FM3_HOST_DEVICE TileOrder choose_order(const PlanInput& in, const VisitSummary& visits,
                                       bool is_in_order, Walk item_walk) {
  if (is_in_order && item_walk != kWalkDownAligned) return TileOrder::kLastKeysFirst;
  return goes_by_key(in, visits) ? TileOrder::kFirstKeysFirst : TileOrder::kByLength;
}

// Whether items of grouped heads that run together drift apart: key tiles of any length and place follow each
// other, and an item reads rows that no neighbour is at. Then L2 is worth half, what is over costs more, and so
// does a tail. Measured on an H200 on ranks' masks of context parallelism: eight of 8K rows (64/8, 32/4 heads), all
// plans of each: within 0.4 % of the best one (as by key up to 19 % behind, 6 % on average); cycles as by key to
// cycles now on nine of 32K rows 0.99 to 1.05, on seven grouped cases of the benchmark that do not go by key 0.99 to
// 1.03 (share question 0.95, in the same time).
FM3_HOST_DEVICE bool drifts_apart(const PlanInput& in, const VisitSummary& visits) {
  return in.group > 1 && !in.is_deterministic && !goes_by_key(in, visits);
}

// Expected duration in steps of a multiprocessor, if items have `part_heads` query heads and those of
// `together` head parts take turns. (In float: a lane computes each of some twenty.)
FM3_HOST_DEVICE float plan_cost(const PlanInput& in, const VisitSummary& visits, int32_t part_heads,
                                int32_t together) {
  const float num_parts = in.group / part_heads;
  const float change = kTileSteps + (num_parts > 1 ? kSumSteps : 0);
  const float num_steps = visits.num_steps, num_k_tiles = in.num_k_tiles;
  const float num_head_parts = num_parts * in.num_kv_heads;
  // The work of one head part, evenly spread, and of all.
  const float head = (num_steps * part_heads + num_k_tiles * change) / in.num_sms;
  float busy = head * num_head_parts;
  // The longest of the last items start when all the others have been claimed.
  const float longest = 1.f * visits.max_steps * part_heads + change;
  const float tail = longest - head * together;
  // What the items that run together touch comes through L2 again and again if it is more than that
  // holds: up to an eighth, or a third.
  const float touched =
      num_steps / larger(visits.num_visiting, 1) * part_heads * together * in.step_bytes;
  const bool drifts = drifts_apart(in, visits);
  const float excess = touched / (drifts ? kL2Bytes / 2 : kL2Bytes) - 1;
  if (excess > 0) busy += busy / (drifts ? 12 : 32) * (excess < 4 ? excess : 4);
  if (in.is_deterministic) {
    // Neighbours that begin at the same row tile wait there for their turns.
    const float late = kTurnSteps - head * together / num_k_tiles;
    if (late > 0 && (choose_walk(visits) == kWalkUpAligned || goes_by_key(in, visits))) {
      busy += late * 4 * num_head_parts * num_k_tiles / in.num_sms;
    }
    // Parts of a head that run at the same time wait for each other at their ends.
    if (num_parts > 1 && in.num_k_tiles < 2 * in.num_sms) busy += busy / 2;
  }
  // A head part keeps its ring slot for as long as its longest item; whoever claims for a later head waits.
  const float open_heads = 1.5f * longest / (head > 0 ? head : 1) + together + 1;
  const float slots = in.ring_heads / part_heads;
  if (open_heads > slots && num_head_parts > slots) busy += busy / slots * (open_heads - slots);
  return busy + (tail > 0 ? (drifts ? 1.5f : 1.f) * tail : 0);
}

// Claim:      heads_together is 1 or at most half of ring_slots.
// Because:    no more are tried.
// Breaks if:  the ring's size stops being a multiple of max_part_heads. (A head part would wait for a slot
//             of one whose items are claimed after its own: nobody would go on.)
// Tested by:  test/unit/test_sm90_bwd_plan.py
// cost_of(idx, part_heads, together): plan_cost of the idx-th choice, asked for in the order of idx.
template <class CostOf>
FM3_HOST_DEVICE WorkPlan choose_plan(const PlanInput& in, const VisitSummary& visits,
                                     CostOf cost_of) {
  WorkPlan plan = {in.max_part_heads, 1, 1, 1, 0, 0};
  const bool drifts = drifts_apart(in, visits);
  float best = 0;
  int32_t idx = 0;
  for (int32_t heads = in.max_part_heads; heads > 0; --heads) {
    if (heads < in.max_part_heads && !in.can_cut) break;
    if (in.group % heads != 0) continue;
    const int32_t slots = in.ring_heads / heads;
    for (int32_t together = 1; together <= kMaxTogether; together *= 2) {
      if (together > 1 && 2 * together > slots) break;
      const float cost = cost_of(idx, heads, together);
      // Only for a gain that can be seen; heads that take turns lose more in L2 than the model knows.
      const bool is_sure = together == 1 || in.is_deterministic || drifts;
      const float least = cost / (is_sure ? 128 : 16);
      if (idx++ > 0 && cost + least >= best) continue;
      best = cost;
      plan.part_heads = heads;
      plan.heads_together = together;
    }
  }
  plan.num_parts = in.group / plan.part_heads;
  plan.ring_slots = in.ring_heads / plan.part_heads;
  plan.is_in_order = adds_in_order(in, visits);
  plan.wave_items = comes_in_waves(in, visits) ? in.num_sms : 0;
  return plan;
}

// The last key tiles may be of other ranks (BwdParams::remote_begin). What of the work is theirs:
struct RemoteWork {
  int32_t remote_tiles;
  int32_t max_steps;  // of one of them
  int64_t remote_steps, own_steps;
};

// How a list of work treats them: at its begin their keys may be on their way, and their gradients may be wanted before
// its end. Whole heads in both cases, because the parts of a head share places (kv_sum.cuh).
struct RemotePlan {
  int32_t first_parts;  // head parts, the first ones, that begin with first_tiles own key tiles
  int32_t first_tiles;
  int32_t split_parts;  // the last ones, whose remote tiles come before the own ones of all of them
};

// Own tiles first: one for each multiprocessor; copies take less time than it does. Own tiles last: enough for lead_steps
// of a multiprocessor when the last remote one is done. lead_steps < 0: nobody waits for gradients. If the ring does not
// hold all head parts, at most half of it is split (see choose_plan). In a fixed order tiles stay where they are: the
// last keys come first there, but for walks by key.
// Few heads are split: a rank's 8K rows of causal documents, 64/8 heads, H200: two of eight heads 1.8 % faster than none,
// three 1.3, four 1 to 5 % slower (more rows at a time than L2 holds). Remote tiles in turns over all split parts and own
// ones as elsewhere: that costs least of three orders.
FM3_HOST_DEVICE RemotePlan choose_remote_plan(const PlanInput& in, const WorkPlan& plan,
                                              const RemoteWork& work, float lead_steps,
                                              bool keys_are_late) {
  RemotePlan chosen = {0, 0, 0};
  const int32_t own_tiles = in.num_k_tiles - work.remote_tiles;
  if (work.remote_tiles == 0 || own_tiles == 0) return chosen;
  const int32_t num_head_parts = plan.num_parts * in.num_kv_heads;
  int32_t turn_parts = plan.num_parts;  // of whole heads, as many as take turns at least
  while (turn_parts < plan.heads_together) turn_parts += plan.num_parts;
  if (lead_steps >= 0) {
    const int32_t most = plan.ring_slots < num_head_parts ? plan.ring_slots / 2 : num_head_parts;
    // Of one head part, a multiprocessor's share.
    const float own =
        (1.f * work.own_steps * plan.part_heads + kTileSteps * own_tiles) / in.num_sms;
    const float remote =
        (1.f * work.remote_steps * plan.part_heads + kTileSteps * work.remote_tiles) / in.num_sms;
    const float longest = 1.f * work.max_steps * plan.part_heads + kTileSteps;
    const float average = remote * in.num_sms / work.remote_tiles;
    const float first = keys_are_late ? own * in.num_sms / own_tiles : 0;
    for (int32_t parts = turn_parts; parts <= most; parts += plan.num_parts) {
      chosen.split_parts = parts;
      const float left =
          chosen.split_parts * own - (chosen.split_parts == num_head_parts ? first : 0);
      if (left >= lead_steps + average &&
          left + chosen.split_parts * remote >= lead_steps + longest) {
        break;
      }
    }
  }
  if (keys_are_late && !plan.is_in_order) {
    const int32_t whole_parts = num_head_parts - chosen.split_parts;
    chosen.first_parts = whole_parts == 0 ? num_head_parts : smaller(turn_parts, whole_parts);
    const int32_t in_turns =
        whole_parts == 0 ? num_head_parts : smaller(plan.heads_together, chosen.first_parts);
    chosen.first_tiles = smaller((in.num_sms + in_turns - 1) / in_turns, own_tiles);
  }
  return chosen;
}

// Where item `work_idx` stands: in which head part, and at which place of its list of key tiles.
struct ItemPlace {
  int32_t head_part, rank;
};
// Of head parts that follow each other, heads_together in turns.
FM3_HOST_DEVICE ItemPlace place_in_turns(int32_t work_idx, int32_t num_k_tiles,
                                         int32_t num_head_parts, int32_t heads_together) {
  const int32_t first = work_idx / (num_k_tiles * heads_together) * heads_together;
  const int32_t heads = smaller(heads_together, num_head_parts - first);
  const int32_t inside = work_idx - first * num_k_tiles;
  return {first + inside % heads, inside / heads};
}
FM3_HOST_DEVICE ItemPlace item_place(int32_t work_idx, int32_t num_k_tiles, int32_t num_head_parts,
                                     int32_t heads_together, const RemotePlan& remote,
                                     int32_t remote_tiles) {
  const int32_t split_parts = remote.split_parts;
  const int32_t whole_parts = num_head_parts - split_parts;
  int32_t idx = work_idx - whole_parts * num_k_tiles;
  if (idx < 0) return place_in_turns(work_idx, num_k_tiles, whole_parts, heads_together);
  // Of all split parts: own tiles for the begin, remote ones, the other own ones.
  const int32_t num_first = whole_parts == 0 ? remote.first_tiles : 0;
  const int32_t num_before[] = {0, num_first, num_first + remote_tiles, num_k_tiles};
  int32_t kind = 0;
  while (idx >= split_parts * num_before[kind + 1]) ++kind;
  idx -= split_parts * num_before[kind];
  const int32_t num_tiles = num_before[kind + 1] - num_before[kind];
  ItemPlace place = {idx % split_parts, idx / split_parts};
  if (kind == 2) {  // the last turn is a whole one: its items end together
    const int32_t rest = split_parts % heads_together;
    place = idx < rest * num_tiles ? place_in_turns(idx, num_tiles, rest, rest)
                                   : place_in_turns(idx - rest * num_tiles, num_tiles,
                                                    split_parts - rest, heads_together);
    if (idx >= rest * num_tiles) place.head_part += rest;
  }
  place.head_part += whole_parts;
  place.rank += num_before[kind];
  return place;
}

// Key tile at place `rank` where the first num_first own tiles of a list come first, and those of other ranks, the last
// remote_tiles of num_k_tiles, next if the list is split. tile_at(idx): the list itself.
template <class TileAt>
FM3_HOST_DEVICE int32_t arranged_tile(int32_t rank, int32_t num_k_tiles, int32_t remote_tiles,
                                      int32_t num_first, bool is_split, TileAt tile_at) {
  const int32_t own_tiles = num_k_tiles - remote_tiles;
  const bool is_first = rank < num_first;
  const bool is_remote = is_split && !is_first && rank < num_first + remote_tiles;
  const bool is_own = is_split && !is_first && !is_remote;
  // Of the tiles that are asked for, after `left` others.
  int32_t left = is_first ? rank : is_own ? rank - remote_tiles : rank - num_first;
  int32_t num_own = 0;
  for (int32_t idx = 0;; ++idx) {
    const int32_t tile = tile_at(idx);
    const bool is_others = tile >= own_tiles;
    const bool counts = is_first || is_own ? !is_others
                        : is_remote        ? is_others
                                           : is_others || num_own >= num_first;
    if (counts && left-- == 0) return tile;
    num_own += !is_others;
  }
}

}  // namespace fm3::sm90_bwd
