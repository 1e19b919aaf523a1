// SPDX-License-Identifier: Apache-2.0
// The Hopper backward's decisions from a mask, run on the host for test/unit/test_sm90_bwd_steps.py.
#include <cstring>
#include <vector>

#include "ops/cuda/sm90_bwd/plan.h"
#include "ops/cuda/sm90_bwd/steps.h"
#include "test/cpp/column_hull.h"

using namespace fm3;
using namespace fm3::sm90;

extern "C" {

int32_t block_q() { return sm90_bwd::kBlockQ; }

// 0 skip, 1 partial, 2 full, for every key tile and row tile: classes [num_k_tiles, num_q_tiles].
void step_classes(const MaskView* mask, int32_t list_idx, int32_t block_k, int32_t* classes) {
  const int32_t num_hulls = (mask->s_k + kHullCols - 1) / kHullCols;
  const int32_t* bounds = mask->bounds + int64_t{list_idx} * mask->s_k * num_bounds(mask->form);
  std::vector<ColumnHull> hulls(int64_t{num_hulls} * (list_idx + 1));
  for (int32_t idx = 0; idx < num_hulls; ++idx) {
    hulls[int64_t{list_idx} * num_hulls + idx] =
        make_hull(*mask, bounds, idx * kHullCols, std::min((idx + 1) * kHullCols, mask->s_k));
  }
  const int32_t num_q_tiles = (mask->s_q + sm90_bwd::kBlockQ - 1) / sm90_bwd::kBlockQ;
  for (int32_t k_begin = 0; k_begin < mask->s_k; k_begin += block_k) {
    for (int32_t q_tile_idx = 0; q_tile_idx < num_q_tiles; ++q_tile_idx) {
      *classes++ = static_cast<int32_t>(sm90_bwd::classify_step(
          *mask, hulls.data(), num_hulls, list_idx, k_begin, block_k, q_tile_idx));
    }
  }
}

// Rows hidden from each key as the kernel stores them: [s_k, 4].
void folded_bounds(const MaskView* mask, int32_t list_idx, int32_t* rows) {
  const int32_t* bounds = mask->bounds + int64_t{list_idx} * mask->s_k * num_bounds(mask->form);
  for (int32_t k_idx = 0; k_idx < mask->s_k; ++k_idx) {
    const sm90_bwd::TwoIntervals folded =
        sm90_bwd::fold_causal(hidden_rows(*mask, bounds, k_idx), mask->is_causal, mask->s_q);
    *rows++ = folded.lt_begin;
    *rows++ = folded.lt_end;
    *rows++ = folded.ut_begin;
    *rows++ = folded.ut_end;
  }
}

int32_t shows_one_interval(int32_t lt_end, int32_t ut_begin, int32_t s_q) {
  return sm90_bwd::shows_one_interval(lt_end, ut_begin, s_q);
}

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

float plan_cost(const sm90_bwd::PlanInput* in, const sm90_bwd::VisitSummary* visits,
                int32_t part_heads, int32_t together) {
  return sm90_bwd::plan_cost(*in, *visits, part_heads, together);
}

// part_heads, num_parts, heads_together, ring_slots, is_in_order
void choose_plan(const sm90_bwd::PlanInput* in, const sm90_bwd::VisitSummary* visits,
                 int32_t* plan) {
  const sm90_bwd::WorkPlan chosen = sm90_bwd::choose_plan(*in, *visits);
  std::memcpy(plan, &chosen, sizeof(chosen));
}

// Head part and place in its list of every work item: [num_head_parts * num_k_tiles, 2].
void item_places(int32_t num_k_tiles, int32_t num_head_parts, int32_t heads_together,
                 int32_t* places) {
  for (int32_t work_idx = 0; work_idx < num_k_tiles * num_head_parts; ++work_idx) {
    const sm90_bwd::ItemPlace place =
        sm90_bwd::item_place(work_idx, num_k_tiles, num_head_parts, heads_together);
    *places++ = place.head_part;
    *places++ = place.rank;
  }
}

}  // extern "C"
