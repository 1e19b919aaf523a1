// SPDX-License-Identifier: Apache-2.0
// When each transfer and each compute step of a plan would happen, on alpha-beta links.
#pragma once

#include <vector>

#include "route.h"

namespace fm3::planner {

struct Link {
  double latency_us;  // of one message
  double us_per_row;  // K and V (or dK and dV) of one row, one direction of one rank's link
};

struct TimelineProblem {
  const std::vector<Transfer>* transfers;
  std::vector<int32_t> node_of_rank;  // [num_ranks]
  int32_t num_stages;
  std::vector<int32_t> stage_rows;   // [num_ranks, num_stages + 2]
  std::vector<int32_t> stage_place;  // [num_stages + 1] when a stage's turn comes; 0 for stage 0
  std::vector<int32_t>
      step_stages;  // [num_steps] stage that the step waits for, and all with an earlier turn
  std::vector<double> step_us;  // [num_ranks, num_steps] compute; 0: nothing to do
  Link fast, slow;

  int32_t num_ranks() const { return int32_t(node_of_rank.size()); }
  int32_t num_steps() const { return int32_t(step_stages.size()); }
};

struct Message {  // consecutive transfers of one stage and hop between two ranks
  int32_t stage, hop, src_rank, dst_rank;
  int64_t num_rows;
  int32_t
      last_dst_row;  // largest first buffer row at the receiver: tells relayed rows from its own
  double begin_us, end_us;
};

struct Timeline {
  std::vector<double> step_begin_us, step_end_us;  // [num_ranks, num_steps]
  std::vector<Message> gather, reduce;
  std::vector<double> finish_us;  // [num_ranks]
};

// Gather and compute: step i starts when step i - 1 is done and its stage has arrived.
Timeline run_gather(const TimelineProblem& problem);

// The reduction on top of `timeline`: a message leaves when its step is done and what it must carry is in.
// A row takes `row_factor` times as long as in the gather (gradients in a wider type).
void run_reduce(const TimelineProblem& problem, const std::vector<Transfer>& reduce,
                double row_factor, Timeline& timeline);

}  // namespace fm3::planner
