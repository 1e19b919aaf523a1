// SPDX-License-Identifier: Apache-2.0
// The Hopper backward's decisions from what a mask shows, run on the host for test/unit/test_sm90_bwd_plan.py.
#include <cstring>

#include "ops/cuda/sm90_bwd/plan.h"

using namespace fm3;

extern "C" {

int32_t choose_walk(const sm90_bwd::VisitSummary* visits) { return sm90_bwd::choose_walk(*visits); }

int32_t goes_by_key(const sm90_bwd::PlanInput* in, const sm90_bwd::VisitSummary* visits) {
  return sm90_bwd::goes_by_key(*in, *visits);
}

int32_t adds_in_order(const sm90_bwd::PlanInput* in, const sm90_bwd::VisitSummary* visits) {
  return sm90_bwd::adds_in_order(*in, *visits);
}

int32_t choose_item_walk(const sm90_bwd::PlanInput* in, const sm90_bwd::VisitSummary* visits,
                         int32_t same_mask) {
  return sm90_bwd::choose_item_walk(*in, *visits, sm90_bwd::adds_in_order(*in, *visits),
                                    same_mask != 0);
}

// 0 by length, 1 first keys first, 2 last keys first.
int32_t choose_order(const sm90_bwd::PlanInput* in, const sm90_bwd::VisitSummary* visits,
                     int32_t is_in_order, int32_t item_walk) {
  return static_cast<int32_t>(sm90_bwd::choose_order(*in, *visits, is_in_order != 0,
                                                     static_cast<sm90_bwd::Walk>(item_walk)));
}

float plan_cost(const sm90_bwd::PlanInput* in, const sm90_bwd::VisitSummary* visits,
                int32_t part_heads, int32_t together) {
  return sm90_bwd::plan_cost(*in, *visits, part_heads, together);
}

int32_t wave_end(int32_t work_idx, int32_t num_items, int32_t wave_items) {
  return sm90_bwd::wave_end(work_idx, num_items, wave_items);
}

int32_t wave_start_parts(const sm90_bwd::PlanInput* in, const sm90_bwd::VisitSummary* visits,
                         int32_t work_idx, int32_t rank, int32_t wave_items) {
  return sm90_bwd::wave_start_parts(*in, *visits, work_idx, rank, wave_items);
}

// part_heads, num_parts, heads_together, ring_slots, is_in_order, wave_items
void choose_plan(const sm90_bwd::PlanInput* in, const sm90_bwd::VisitSummary* visits,
                 int32_t* plan) {
  const sm90_bwd::WorkPlan chosen =
      sm90_bwd::choose_plan(*in, *visits, [&](int32_t, int32_t part_heads, int32_t together) {
        return sm90_bwd::plan_cost(*in, *visits, part_heads, together);
      });
  std::memcpy(plan, &chosen, sizeof(chosen));
}

void choose_remote_plan(const sm90_bwd::PlanInput* in, const int32_t* plan,
                        const sm90_bwd::RemoteWork* work, float lead_steps, int32_t keys_are_late,
                        int32_t* remote) {
  sm90_bwd::WorkPlan chosen;
  std::memcpy(&chosen, plan, sizeof(chosen));
  const sm90_bwd::RemotePlan found =
      sm90_bwd::choose_remote_plan(*in, chosen, *work, lead_steps, keys_are_late != 0);
  std::memcpy(remote, &found, sizeof(found));
}

int32_t arranged_tile(int32_t rank, int32_t num_k_tiles, int32_t remote_tiles, int32_t num_first,
                      int32_t is_split, const int32_t* list) {
  return sm90_bwd::arranged_tile(rank, num_k_tiles, remote_tiles, num_first, is_split != 0,
                                 [&](int32_t idx) { return list[idx]; });
}

// Head part and place in its list of every work item: [num_head_parts * num_k_tiles, 2].
void item_places(int32_t num_k_tiles, int32_t num_head_parts, int32_t heads_together,
                 const sm90_bwd::RemotePlan* remote, int32_t remote_tiles, int32_t* places) {
  for (int32_t work_idx = 0; work_idx < num_k_tiles * num_head_parts; ++work_idx) {
    const sm90_bwd::ItemPlace place = sm90_bwd::item_place(work_idx, num_k_tiles, num_head_parts,
                                                           heads_together, *remote, remote_tiles);
    *places++ = place.head_part;
    *places++ = place.rank;
  }
}

}  // extern "C"
