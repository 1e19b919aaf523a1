// SPDX-License-Identifier: Apache-2.0
// A hull of key columns on the host, as the backward's first pass makes it.
#pragma once

#include <algorithm>

#include "ops/cuda/schedule/device_schedule.cuh"

inline fm3::sm90::ColumnHull make_hull(const fm3::MaskView& mask, const int32_t* bounds,
                                       int32_t k_begin, int32_t k_end) {
  using namespace fm3::sm90;
  int32_t low[4] = {kNever, kNever, kNever, kNever}, high[4] = {-1, -1, -1, -1};
  for (int32_t k_idx = k_begin; k_idx < k_end; ++k_idx) {
    const HiddenRows rows = hidden_rows(mask, bounds, k_idx);
    const bool has_lt = rows.lt.begin < rows.lt.end, has_ut = rows.ut.begin < rows.ut.end;
    const int32_t value[4] = {has_lt ? rows.lt.begin : kNever, has_lt ? rows.lt.end : -1,
                              has_ut ? rows.ut.begin : kNever, has_ut ? rows.ut.end : -1};
    for (int idx = 0; idx < 4; ++idx) {
      low[idx] = std::min(low[idx], value[idx]);
      high[idx] = std::max(high[idx], value[idx]);
    }
  }
  return {low[0], high[0], low[1], high[1], low[2], high[2], low[3], high[3]};
}
