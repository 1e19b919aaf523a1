// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "lists.cuh"
#include "order.cuh"

namespace fm3::sm90 {

// Grids of the passes.
struct LaunchSizes {
  int64_t num_blocks;  // hulls to scan
  uint32_t scan_ctas, cut_ctas, list_ctas, tile_order_ctas, pair_order_ctas, order_ctas;
};

inline LaunchSizes launch_sizes(const MaskView& mask, const ScheduleView& schedule) {
  const auto div_up = [](int64_t value, int64_t divisor) {
    return static_cast<uint32_t>((value + divisor - 1) / divisor);
  };
  const int64_t num_lists = int64_t{mask.b} * mask.h_mask;
  LaunchSizes sizes;
  sizes.num_blocks = mask.form == BoundForm::kNone ? 1 : num_lists * schedule.num_hulls;
  sizes.scan_ctas = div_up(sizes.num_blocks, kScanThreads / 32);
  sizes.cut_ctas = schedule.q_begins == nullptr ? 0 : static_cast<uint32_t>(num_lists);
  sizes.list_ctas = static_cast<uint32_t>(num_lists * div_up(schedule.pairs.count, kPairsPerCta));
  sizes.tile_order_ctas =
      static_cast<uint32_t>(num_lists * div_up(schedule.tiles.count, kRankTiles));
  sizes.pair_order_ctas =
      static_cast<uint32_t>(num_lists * div_up(schedule.pairs.count, kRankTiles));
  sizes.order_ctas =
      sizes.tile_order_ctas * (schedule.rest == nullptr ? 1 : 2) + sizes.pair_order_ctas;
  return sizes;
}

}  // namespace fm3::sm90
