// SPDX-License-Identifier: Apache-2.0
// The balance of many small chunks at the cost of few large ones: blocks first, then what they leave uneven.
#pragma once

#include "balance.h"

namespace fm3::planner {

// Balances blocks of `block` consecutive chunks, then swaps single chunks between ranks, so that most chunks stay
// beside their neighbours. With block = 1, or capacities that blocks do not fill, the same as `balance`.
Balance balance_in_blocks(const BalanceProblem& problem, int32_t block,
                          const BalanceOptions& options);

}  // namespace fm3::planner
