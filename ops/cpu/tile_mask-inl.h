// SPDX-License-Identifier: Apache-2.0
// The mask inside one tile.

// Rows hidden from each key column of a tile: three half-open intervals.
struct TileBounds {
  alignas(64) int32_t lt_begin[kBlockK], lt_end[kBlockK], ut_begin[kBlockK], ut_end[kBlockK];
  alignas(64) int32_t causal[kBlockK];  // rows [0, causal) are hidden by the causal rule
};

void load_tile_bounds(const MaskView& mask, int64_t b_idx, int64_t h_mask_idx, int32_t k_begin,
                      int num_keys, TileBounds* tile) {
  const int num_column_bounds = num_bounds(mask.form);
  const int32_t* bounds =
      mask.form == BoundForm::kNone
          ? nullptr
          : mask.bounds +
                ((b_idx * mask.h_mask + h_mask_idx) * mask.s_k + k_begin) * num_column_bounds;
  for (int k = 0; k < num_keys; ++k) {
    const ColumnBounds column = expand_bounds(bounds + k * num_column_bounds, mask.form, mask.s_q);
    tile->lt_begin[k] = column.lt_begin;
    tile->lt_end[k] = column.lt_end;
    tile->ut_begin[k] = column.ut_begin;
    tile->ut_end[k] = column.ut_end;
    tile->causal[k] = mask.is_causal ? causal_end(k_begin + k, mask.s_q, mask.s_k) : 0;
  }
  for (int k = num_keys; k < kBlockK; ++k) {  // padding: hidden from every row
    tile->lt_begin[k] = tile->ut_begin[k] = tile->ut_end[k] = 0;
    tile->lt_end[k] = mask.s_q;
    tile->causal[k] = 0;
  }
}

FM3_INLINE bool is_hidden(const TileBounds& tile, int32_t q_idx, int k) {
  return q_idx < tile.causal[k] || hidden(q_idx, ColumnBounds{tile.lt_begin[k], tile.lt_end[k],
                                                              tile.ut_begin[k], tile.ut_end[k]});
}

// A tile is worked on in strips of kStrip rows (and, for dk and dv, of kStrip keys). A strip of a
// PARTIAL tile looks only at the keys between the first and the last that it sees.
constexpr int kStrip = 32;
constexpr int kMaxStrips = (kBlockQ > kBlockK ? kBlockQ : kBlockK) / kStrip;
static_assert(kStrip % kPanel == 0 && kStrip % kMicroRows == 0,
              "strips hold whole panels and micro rows");
static_assert(kBlockQ % kStrip == 0 && kBlockK % kStrip == 0, "tiles hold whole strips");

struct VisibleSpans {
  Range keys[kMaxStrips];  // of each strip of rows; empty if begin >= end
  Range rows[kMaxStrips];  // of each strip of keys, in whole strips; empty if begin >= end
};

// Claim:      no pair outside the spans is visible.
// Because:    a key is left out of a strip only if one hidden interval covers the whole strip.
// Breaks if:  strips here and in the kernels differ in size or origin.
// Tested by:  test/cpu/test_c_abi_oracle.py (hostile cases and random masks against the oracle)
void find_visible_spans(const TileBounds& tile, int32_t q_begin, int num_rows, int num_keys,
                        VisibleSpans* spans) {
  for (int strip = 0; strip < kMaxStrips; ++strip) spans->rows[strip] = {kBlockQ, 0};
  for (int strip = 0; strip * kStrip < num_rows; ++strip) {
    const int32_t begin = q_begin + strip * kStrip;
    const int32_t end =
        begin + (num_rows - strip * kStrip < kStrip ? num_rows - strip * kStrip : kStrip);
    Range keys = {num_keys, 0};
    for (int k = 0; k < num_keys; ++k) {
      const bool is_covered = (end <= tile.causal[k]) |
                              ((tile.lt_begin[k] <= begin) & (end <= tile.lt_end[k])) |
                              ((tile.ut_begin[k] <= begin) & (end <= tile.ut_end[k]));
      if (is_covered) continue;
      keys.begin = keys.begin < k ? keys.begin : k;
      keys.end = k + 1;
    }
    spans->keys[strip] = keys;
    for (int k_strip = keys.begin / kStrip; k_strip * kStrip < keys.end; ++k_strip) {
      Range& rows = spans->rows[k_strip];
      rows.begin = rows.begin < strip * kStrip ? rows.begin : strip * kStrip;
      rows.end = end - q_begin;
    }
  }
}

FM3_INLINE void see_everything(int num_rows, int num_keys, VisibleSpans* spans) {
  for (int strip = 0; strip < kMaxStrips; ++strip) {
    spans->keys[strip] = {0, num_keys};
    spans->rows[strip] = {0, num_rows};
  }
}

// What to do with tile (q_tile_idx, k_tile_idx) of one head, block_mask included.
struct TileClassifier {
  const KeyTileSummary* summaries;  // [num_k_tiles] of this batch entry and mask head
  const int32_t* block_mask;        // [ceil(s_q/128), ceil(s_k/128)] of the same; may be nullptr
  int64_t block_mask_cols;
  int32_t s_q;

  FM3_INLINE TileClass operator()(int32_t q_begin, int32_t k_tile_idx) const {
    if (block_mask != nullptr &&
        block_mask[q_begin / kBlockMaskTile * block_mask_cols + k_tile_idx] == 0) {
      return TileClass::kSkip;
    }
    const int32_t q_end = s_q - q_begin < kBlockQ ? s_q : q_begin + kBlockQ;
    return classify(summaries[k_tile_idx], q_begin, q_end);
  }
};

FM3_INLINE TileClassifier tile_classifier(const MaskContext& context, int64_t b_idx,
                                          int64_t h_mask_idx) {
  const MaskView& mask = context.mask;
  const int64_t num_k_tiles = (int64_t{mask.s_k} + kBlockK - 1) / kBlockK;
  const int64_t num_q_blocks = (int64_t{mask.s_q} + kBlockMaskTile - 1) / kBlockMaskTile;
  const int64_t head = b_idx * mask.h_mask + h_mask_idx;
  return {
      context.summaries + head * num_k_tiles,
      mask.block_mask == nullptr ? nullptr : mask.block_mask + head * num_q_blocks * num_k_tiles,
      num_k_tiles, mask.s_q};
}
