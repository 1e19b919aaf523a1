// SPDX-License-Identifier: Apache-2.0
// Forward: one query tile of one head against its key tiles, with the online softmax.
//
// Scores are kept transposed, s[key][query]: the query tile stays packed, key rows need no packing,
// row statistics are plain vector operations, and a key's hidden rows are runs of memory. A strip of
// kStrip queries goes through scores, softmax and output before the next: its scores stay in L1.

struct ForwardScratch {
  float* q_panels;   // [q_padded/kPanel][d_qk][width] q * softmax_scale * log2(e)
  float* k_rows;     // [kBlockK][d_qk]
  float* v_panels;   // [d_v_padded/kPanel][num_keys][width]
  float* s;          // [kBlockK][kStrip] scores in log2 units, then probabilities
  float* out;        // [kBlockQ][d_v_padded] unnormalised output
  float* row;        // one row of q or v
  float* row_max;    // [kBlockQ]
  float* row_sum;    // [kBlockQ]
  float* row_scale;  // [kBlockQ] 2^(old max - new max)
  TileBounds* bounds;
  VisibleSpans* spans;
  SpecialRows* special;
};

FM3_INLINE ForwardScratch carve_forward(const Shape& shape, Arena* arena) {
  const int d_v = round_up(shape.d_v, kLanes);
  ForwardScratch scratch;
  scratch.q_panels = arena->take<float>(int64_t{kBlockQ} * shape.d_qk);
  scratch.k_rows = arena->take<float>(int64_t{kBlockK} * shape.d_qk);
  scratch.v_panels = arena->take<float>(int64_t{kBlockK} * d_v);
  scratch.s = arena->take<float>(int64_t{kBlockK} * kStrip);
  scratch.out = arena->take<float>(int64_t{kBlockQ} * d_v);
  scratch.row =
      arena->take<float>(round_up(shape.d_qk > shape.d_v ? shape.d_qk : shape.d_v, kLanes));
  scratch.row_max = arena->take<float>(kBlockQ);
  scratch.row_sum = arena->take<float>(kBlockQ);
  scratch.row_scale = arena->take<float>(kBlockQ);
  scratch.bounds = arena->take<TileBounds>(1);
  scratch.spans = arena->take<VisibleSpans>(1);
  scratch.special = arena->take<SpecialRows>(1);
  return scratch;
}

int64_t forward_scratch_bytes(const Shape& shape) {
  Arena arena{nullptr};
  carve_forward(shape, &arena);
  return reinterpret_cast<intptr_t>(arena.next);
}

// Sets the scores of hidden pairs of one strip to -infinity.
void hide_scores(const TileBounds& bounds, int32_t q_begin, int num_rows, Range keys, float* s) {
  const auto hide = [&](float* row, int32_t begin, int32_t end) {
    begin = begin > q_begin ? begin - q_begin : 0;
    end = end - q_begin < num_rows ? end - q_begin : num_rows;
    for (int32_t q = begin; q < end; ++q) row[q] = -kInfinity;
  };
  for (int k = keys.begin; k < keys.end; ++k) {
    float* row = s + k * kStrip;
    hide(row, 0, bounds.causal[k]);
    hide(row, bounds.lt_begin[k], bounds.lt_end[k]);
    hide(row, bounds.ut_begin[k], bounds.ut_end[k]);
  }
}

// Scores to probabilities relative to the running maximum; updates maximum, sum and row_scale.
void online_softmax(int num_rows, Range keys, float* s, float* row_max, float* row_sum,
                    float* row_scale) {
  for (int q = 0; q < num_rows; q += kLanes) {
    const VecF old_max = load(row_max + q);
    VecF new_max = old_max;
    for (int k = keys.begin; k < keys.end; ++k) {
      new_max = max_ignoring_nan(load(s + k * kStrip + q), new_max);
    }
    // A row with nothing visible so far has maximum -inf; 0 keeps -inf - (-inf) out of exp2.
    const VecF shift = new_max == splat(-kInfinity) ? splat(0.0f) : new_max;
    const VecF scale = exp2_nonpositive(old_max - shift);
    VecF sum = VecF{};  // of this tile alone: short sums round less than one long one
    for (int k = keys.begin; k < keys.end; ++k) {
      const VecF p = exp2_nonpositive(load(s + k * kStrip + q) - shift);
      sum += p;
      store(s + k * kStrip + q, p);
    }
    store(row_max + q, new_max);
    store(row_sum + q, load(row_sum + q) * scale + sum);
    store(row_scale + q, scale);
  }
}

void forward_query_tile(const FwdParams& params, const MaskContext& context, int32_t b_idx,
                        int32_t h_q_idx, int32_t q_tile_idx, void* scratch_block) {
  const Shape& shape = params.shape;
  const int32_t q_begin = q_tile_idx * kBlockQ;
  const int num_rows = shape.s_q - q_begin < kBlockQ ? shape.s_q - q_begin : kBlockQ;
  const int q_padded = round_up(num_rows, kLanes);
  const int d_qk = shape.d_qk, d_v = shape.d_v, d_v_padded = round_up(d_v, kLanes);
  const int32_t h_kv_idx = h_q_idx / (shape.h_q / shape.h_kv);
  const int32_t h_mask_idx = h_q_idx / (shape.h_q / context.mask.h_mask);
  const HeadView q = head_view(params.q, params.dtype, params.stride_q, b_idx, h_q_idx, d_qk);
  const HeadView k = head_view(params.k, params.dtype, params.stride_k, b_idx, h_kv_idx, d_qk);
  const HeadView v = head_view(params.v, params.dtype, params.stride_v, b_idx, h_kv_idx, d_v);
  Arena arena{static_cast<char*>(scratch_block)};
  const ForwardScratch scratch = carve_forward(shape, &arena);

  for (int row = 0; row < q_padded; ++row) {
    if (row < num_rows) {
      load_row(q.dtype, q.row(q_begin + row), d_qk, scratch.row);
    } else {
      std::memset(scratch.row, 0, sizeof(float) * d_qk);
    }
    scatter_transposed(scratch.row, params.softmax_scale * kLog2e, row, q_padded, d_qk,
                       scratch.q_panels);
    scratch.row_max[row] = -kInfinity;
    scratch.row_sum[row] = 0.0f;
  }
  std::memset(scratch.out, 0, sizeof(float) * q_padded * d_v_padded);
  std::memset(scratch.row, 0, sizeof(float) * d_v_padded);  // zero padding of v rows

  const TileClassifier class_of = tile_classifier(context, b_idx, h_mask_idx);
  const int32_t num_k_tiles = (shape.s_k + kBlockK - 1) / kBlockK;
  for (int32_t k_tile_idx = 0; k_tile_idx < num_k_tiles; ++k_tile_idx) {
    const TileClass tile_class = class_of(q_begin, k_tile_idx);
    if (tile_class == TileClass::kSkip) continue;
    const int32_t k_begin = k_tile_idx * kBlockK;
    const int num_keys = shape.s_k - k_begin < kBlockK ? shape.s_k - k_begin : kBlockK;
    SpecialRows& special = *scratch.special;
    special.count = 0;
    for (int key = 0; key < num_keys; ++key) {
      load_row(k.dtype, k.row(k_begin + key), d_qk, scratch.k_rows + int64_t{key} * d_qk);
      const bool is_finite = load_row(v.dtype, v.row(k_begin + key), d_v, scratch.row);
      if (!is_finite) {
        special.rows[special.count++] = key;
        std::memset(scratch.row, 0, sizeof(float) * d_v);
      }
      scatter_to_panels(scratch.row, key, num_keys, d_v_padded, scratch.v_panels);
    }
    const bool is_partial = tile_class == TileClass::kPartial;
    if (is_partial) {
      load_tile_bounds(context.mask, b_idx, h_mask_idx, k_begin, num_keys, scratch.bounds);
      find_visible_spans(*scratch.bounds, q_begin, num_rows, num_keys, scratch.spans);
    } else {
      see_everything(num_rows, num_keys, scratch.spans);
    }
    const Panels v_panels = {scratch.v_panels, num_keys, d_v_padded};
    for (int strip_begin = 0; strip_begin < q_padded; strip_begin += kStrip) {
      const int strip_rows = q_padded - strip_begin < kStrip ? q_padded - strip_begin : kStrip;
      Range keys = scratch.spans->keys[strip_begin / kStrip];
      if (keys.begin >= keys.end) continue;
      keys.begin = round_down(keys.begin, kMicroRows);
      const Panels q_panels = {scratch.q_panels + int64_t{strip_begin} * d_qk, d_qk, strip_rows};
      float* out = scratch.out + int64_t{strip_begin} * d_v_padded;
      gemm<Order::kRowMajor, Into::kOverwrite>(keys, {0, strip_rows}, {0, d_qk}, scratch.k_rows,
                                               d_qk, q_panels, scratch.s, kStrip);
      if (is_partial)
        hide_scores(*scratch.bounds, q_begin + strip_begin, strip_rows, keys, scratch.s);
      online_softmax(strip_rows, keys, scratch.s, scratch.row_max + strip_begin,
                     scratch.row_sum + strip_begin, scratch.row_scale + strip_begin);
      gemm<Order::kKMajor, Into::kScaleAdd>({0, strip_rows}, {0, d_v_padded}, keys, scratch.s,
                                            kStrip, v_panels, out, d_v_padded,
                                            scratch.row_scale + strip_begin);
      for (int i = 0; i < special.count; ++i) {
        const int key = special.rows[i];
        if (key < keys.begin || key >= keys.end) continue;
        load_row(v.dtype, v.row(k_begin + key), d_v, scratch.row);
        for (int row = 0; row < strip_rows && strip_begin + row < num_rows; ++row) {
          if (is_partial && is_hidden(*scratch.bounds, q_begin + strip_begin + row, key)) continue;
          const float p = scratch.s[key * kStrip + row];
          for (int c = 0; c < d_v; ++c) out[int64_t{row} * d_v_padded + c] += p * scratch.row[c];
        }
      }
    }
  }

  float* lse = params.lse + (int64_t{b_idx} * shape.h_q + h_q_idx) * shape.s_q + q_begin;
  for (int row = 0; row < num_rows; ++row) {
    const float sum = scratch.row_sum[row];
    const bool is_empty = scratch.row_max[row] == -kInfinity && sum == 0.0f;
    // lse = (max + log2(sum)) * ln 2
    lse[row] = is_empty ? -kInfinity : (scratch.row_max[row] + std::log2(sum)) * kLn2;
    void* out = element(params.out, params.dtype,
                        b_idx * params.stride_out.b + (q_begin + row) * params.stride_out.s +
                            h_q_idx * params.stride_out.h);
    store_row(params.dtype, scratch.out + int64_t{row} * d_v_padded, is_empty ? 0.0f : 1.0f / sum,
              d_v, out);
  }
}
