// SPDX-License-Identifier: Apache-2.0
// The definition of the schedule: from a mask to one KeyTileSummary a key tile, on the CPU.
// The Python twin is paddle_fm3/schedule.py; both must give the same runs, bit for bit.
#pragma once

#include <cstdint>

#include "fm3/schedule.h"

namespace fm3 {

inline int64_t num_tiles(int64_t length, int64_t tile) { return (length + tile - 1) / tile; }

// Summary of key columns [k_begin, k_end) of one (batch, mask head); k_begin < k_end <= mask.s_k.
KeyTileSummary summarize_key_tile(const MaskView& mask, int32_t b_idx, int32_t h_mask_idx,
                                  int32_t k_begin, int32_t k_end);

// Fills summaries[b, h_mask, ceil(s_k/block_k)]. block_mask is not part of a summary.
void build_schedule(const MaskView& mask, int32_t block_k, KeyTileSummary* summaries);

}  // namespace fm3
