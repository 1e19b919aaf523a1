// SPDX-License-Identifier: Apache-2.0
// Backward: one key tile of one kv head against its query tiles, in one pass.
//
//   p  = exp(s - lse)          dv += p^T dout
//   ds = p * (dout v^T - delta + dlse), delta = rowsum(dout * out)
//   dk += ds^T q * scale       dq += ds k * scale
// The key tile stays packed. dk and dv are summed here alone; dq is shared by the key tiles of a
// head, which add to it one after another in ascending order (add_dq_in_turn).

struct BackwardScratch {
  float* k_transposed;  // [keys_padded/kPanel][d_qk][width]
  float* v_transposed;  // [keys_padded/kPanel][d_v][width]
  float* k_panels;      // [d_qk_padded/kPanel][num_keys][width]
  float* dk;            // [kBlockK][d_qk_padded]
  float* dv;            // [kBlockK][d_v_padded]
  float* q_rows;        // [kBlockQ][d_qk_padded] q * softmax_scale * log2(e)
  float* dout_rows;     // [kBlockQ][d_v_padded]
  float* q_panels;      // [d_qk_padded/kPanel][num_rows][width]
  float* dout_panels;   // [d_v_padded/kPanel][num_rows][width]
  float* p;             // [kBlockQ][kBlockK] scores, then probabilities
  float* ds;            // [kBlockQ][kBlockK] dout v^T, then gradient of the scores
  float* dq;            // [kBlockQ][d_qk_padded]
  float* row;           // one row
  TileBounds* bounds;
  VisibleSpans* spans;
  SpecialRows* special_k;
  SpecialRows* special_q;
  SpecialRows* special_dout;
};

FM3_INLINE BackwardScratch carve_backward(const Shape& shape, Arena* arena) {
  const int d_qk = round_up(shape.d_qk, kLanes), d_v = round_up(shape.d_v, kLanes);
  BackwardScratch scratch;
  scratch.k_transposed = arena->take<float>(int64_t{kBlockK} * d_qk);
  scratch.v_transposed = arena->take<float>(int64_t{kBlockK} * d_v);
  scratch.k_panels = arena->take<float>(int64_t{kBlockK} * d_qk);
  scratch.dk = arena->take<float>(int64_t{kBlockK} * d_qk);
  scratch.dv = arena->take<float>(int64_t{kBlockK} * d_v);
  scratch.q_rows = arena->take<float>(int64_t{kBlockQ} * d_qk);
  scratch.dout_rows = arena->take<float>(int64_t{kBlockQ} * d_v);
  scratch.q_panels = arena->take<float>(int64_t{kBlockQ} * d_qk);
  scratch.dout_panels = arena->take<float>(int64_t{kBlockQ} * d_v);
  scratch.p = arena->take<float>(int64_t{kBlockQ} * kBlockK);
  scratch.ds = arena->take<float>(int64_t{kBlockQ} * kBlockK);
  scratch.dq = arena->take<float>(int64_t{kBlockQ} * d_qk);
  scratch.row = arena->take<float>(d_qk > d_v ? d_qk : d_v);
  scratch.bounds = arena->take<TileBounds>(1);
  scratch.spans = arena->take<VisibleSpans>(1);
  scratch.special_k = arena->take<SpecialRows>(1);
  scratch.special_q = arena->take<SpecialRows>(1);
  scratch.special_dout = arena->take<SpecialRows>(1);
  return scratch;
}

int64_t backward_scratch_bytes(const Shape& shape) {
  Arena arena{nullptr};
  carve_backward(shape, &arena);
  return reinterpret_cast<intptr_t>(arena.next);
}

// Claim:      dout v^T - delta is exactly 0 in a row that sees one key: such a row (the first of a
//             causal document, say) gets no gradient made of rounding errors.
// Because:    out is then v itself, and the products are summed here in gemm's order, one by one.
// Breaks if:  the order here or in micro_kernel changes.
// Tested by:  test/cpu/test_c_abi_oracle.py::test_rows_with_one_visible_key_have_exact_zero_gradient
void backward_delta(const BwdParams& params, int32_t b_idx, int32_t h_q_idx, int32_t q_tile_idx,
                    float* delta, void* scratch_block) {
  const Shape& shape = params.shape;
  const int d_v = shape.d_v;
  const HeadView out = head_view(params.out, params.dtype, params.stride_out, b_idx, h_q_idx, d_v);
  const HeadView dout =
      head_view(params.dout, params.dtype, params.stride_dout, b_idx, h_q_idx, d_v);
  Arena arena{static_cast<char*>(scratch_block)};
  float* row_values = arena.take<float>(d_v);
  float* out_columns = arena.take<float>(int64_t{kLanes} * d_v);   // [d_v][kLanes]
  float* dout_columns = arena.take<float>(int64_t{kLanes} * d_v);  // [d_v][kLanes]
  const int32_t q_begin = q_tile_idx * kBlockQ;
  const int32_t q_end = shape.s_q - q_begin < kBlockQ ? shape.s_q : q_begin + kBlockQ;
  const int64_t head = (int64_t{b_idx} * shape.h_q + h_q_idx) * shape.s_q;
  for (int32_t q_idx = q_begin; q_idx < q_end; q_idx += kLanes) {
    const int num_rows = q_end - q_idx < kLanes ? q_end - q_idx : kLanes;
    // Lanes past num_rows hold old numbers, which are never stored.
    for (int row = 0; row < num_rows; ++row) {
      load_row(out.dtype, out.row(q_idx + row), d_v, row_values);
      for (int c = 0; c < d_v; ++c) out_columns[c * kLanes + row] = row_values[c];
      load_row(dout.dtype, dout.row(q_idx + row), d_v, row_values);
      for (int c = 0; c < d_v; ++c) dout_columns[c * kLanes + row] = row_values[c];
    }
    VecF sums = VecF{};
    for (int c = 0; c < d_v; ++c) {
      sums += load(dout_columns + c * kLanes) * load(out_columns + c * kLanes);
    }
    for (int row = 0; row < num_rows; ++row) delta[head + q_idx + row] = sums[row];
  }
}

// Packs the key tile; special rows of k are zero in k_panels.
void pack_key_tile(const HeadView& k, const HeadView& v, int32_t k_begin, int num_keys,
                   const BackwardScratch& scratch) {
  const int keys_padded = round_up(num_keys, kLanes);
  const int d_qk_padded = round_up(k.d, kLanes);
  scratch.special_k->count = 0;
  std::memset(scratch.row, 0, sizeof(float) * (d_qk_padded > v.d ? d_qk_padded : v.d));
  for (int key = 0; key < keys_padded; ++key) {
    if (key < num_keys) load_row(v.dtype, v.row(k_begin + key), v.d, scratch.row);
    if (key == num_keys) std::memset(scratch.row, 0, sizeof(float) * v.d);
    scatter_transposed(scratch.row, 1.0f, key, keys_padded, v.d, scratch.v_transposed);
  }
  std::memset(scratch.row, 0, sizeof(float) * d_qk_padded);
  for (int key = 0; key < keys_padded; ++key) {
    bool is_finite = true;
    if (key < num_keys) is_finite = load_row(k.dtype, k.row(k_begin + key), k.d, scratch.row);
    if (key == num_keys) std::memset(scratch.row, 0, sizeof(float) * k.d);
    scatter_transposed(scratch.row, 1.0f, key, keys_padded, k.d, scratch.k_transposed);
    if (key >= num_keys) continue;
    if (!is_finite) {
      scratch.special_k->rows[scratch.special_k->count++] = key;
      std::memset(scratch.row, 0, sizeof(float) * k.d);
    }
    scatter_to_panels(scratch.row, key, num_keys, d_qk_padded, scratch.k_panels);
  }
}

// Packs one query tile as A operand (rows) and as B operand (panels, special rows zero).
void pack_query_rows(const HeadView& x, float scale, int32_t q_begin, int num_rows, float* rows,
                     float* panels, SpecialRows* special) {
  const int d_padded = round_up(x.d, kLanes);
  special->count = 0;
  for (int row = 0; row < round_up(num_rows, kMicroRows); ++row) {
    float* to = rows + int64_t{row} * d_padded;
    std::memset(to, 0, sizeof(float) * d_padded);
    if (row >= num_rows) continue;
    const bool is_finite = load_row(x.dtype, x.row(q_begin + row), x.d, to);
    for (int c = 0; c < d_padded; c += kLanes) store(to + c, load(to + c) * splat(scale));
    scatter_to_panels(to, row, num_rows, d_padded, panels);
    if (is_finite) continue;
    special->rows[special->count++] = row;
    for (int col = 0; col < d_padded; col += kPanel) {
      const int width = d_padded - col < kPanel ? d_padded - col : kPanel;
      std::memset(panels + int64_t{col} * num_rows + int64_t{row} * width, 0,
                  sizeof(float) * width);
    }
  }
}

FM3_INLINE void zero_outside(Range keys, Range rows, int keys_padded, float* table) {
  for (int row = rows.begin; row < rows.end; ++row) {
    float* at = table + row * kBlockK;
    for (int k = 0; k < keys.begin; k += kLanes) store(at + k, VecF{});
    for (int k = keys.end; k < keys_padded; k += kLanes) store(at + k, VecF{});
  }
}

// p := exp2(p - lse), ds := p * (ds - delta + dlse); both 0 where hidden. delta and dlse stay
// apart: their sum would lose the digits of a small dlse.
template <bool kIsMasked>
void softmax_gradient(const TileBounds& bounds, int32_t q_begin, Range rows, Range keys,
                      const float* lse, const float* delta, const float* maybe_dlse, float* p,
                      float* ds) {
  for (int row = rows.begin; row < rows.end; ++row) {
    // A row without visible keys has lse -inf; +inf makes its p zero.
    const VecF row_lse = splat(lse[row] == -kInfinity ? kInfinity : lse[row]);
    const VecF row_delta = splat(delta[row]);
    const VecF row_dlse = splat(maybe_dlse == nullptr ? 0.0f : maybe_dlse[row]);
    const VecI q_idx = splat(q_begin + row);
    for (int k = keys.begin; k < keys.end; k += kLanes) {
      float* p_at = p + row * kBlockK + k;
      float* ds_at = ds + row * kBlockK + k;
      // p <= 1; without the bound, rounding of a score beyond 1e7 could make it infinite.
      const VecF exponent = load(p_at) - row_lse * splat(kLog2e);
      VecF p_vec = exp2_nonpositive(min_keeping_nan(exponent, VecF{}));
      VecF ds_vec = p_vec * (load(ds_at) - row_delta + row_dlse);
      if (kIsMasked) {
        const VecI is_hidden =
            (q_idx < load(bounds.causal + k)) |
            ((load(bounds.lt_begin + k) <= q_idx) & (q_idx < load(bounds.lt_end + k))) |
            ((load(bounds.ut_begin + k) <= q_idx) & (q_idx < load(bounds.ut_end + k)));
        p_vec = as_float(as_int(p_vec) & ~is_hidden);
        ds_vec = as_float(as_int(ds_vec) & ~is_hidden);
      }
      store(p_at, p_vec);
      store(ds_at, ds_vec);
    }
  }
}

// What special rows r of a B operand give to visible pairs: c[target] += weight(target, r) * x[r].
template <typename Weight, typename IsHidden>
void add_special_rows(const SpecialRows& special, const HeadView& x, int32_t begin, float scale,
                      int num_targets, const Weight& weight, const IsHidden& is_hidden_pair,
                      float* row, float* c, int ldc) {
  for (int i = 0; i < special.count; ++i) {
    const int r = special.rows[i];
    load_row(x.dtype, x.row(begin + r), x.d, row);
    for (int target = 0; target < num_targets; ++target) {
      if (is_hidden_pair(target, r)) continue;
      const float w = weight(target, r) * scale;
      for (int col = 0; col < x.d; ++col) c[int64_t{target} * ldc + col] += w * row[col];
    }
  }
}

FM3_INLINE float* dq_acc_row(const BackwardContext& context, int64_t b_idx, int64_t h_q_idx,
                             int64_t q_idx) {
  const Strides& stride = context.stride_dq_acc;
  return context.dq_acc_f32 +
         (b_idx * stride.b + q_idx * stride.s + h_q_idx * stride.h - context.dq_acc_offset);
}

// Claim:      dq is the same, bit for bit, for any number of threads, and nobody waits for ever.
// Because:    a tile is added only after the key tile before it that visits the same query tile, so
//             the order of additions is ascending; items are taken in ascending order, so the one
//             waited for was taken earlier and depends on even earlier ones only.
// Breaks if:  items of one head are not handed out in ascending order of key tiles, or predecessor
//             and visit use different tile classes.
// Tested by:  test/cpu/test_c_abi_threads.py (1..5 threads, bitwise)
void add_dq_in_turn(const BackwardContext& context, const TileClassifier& class_of, int64_t b_idx,
                    int64_t h_q_idx, int32_t q_tile_idx, int32_t k_tile_idx, int num_rows, int d,
                    float scale, const float* dq, int d_padded) {
  const int32_t q_begin = q_tile_idx * kBlockQ;
  int32_t previous = k_tile_idx - 1;
  while (previous >= 0 && class_of(q_begin, previous) == TileClass::kSkip) --previous;
  const int64_t num_q_tiles = (int64_t{context.mask.mask.s_q} + kBlockQ - 1) / kBlockQ;
  std::atomic<int32_t>& turn =
      context.dq_turn[(b_idx * context.mask.h_q + h_q_idx) * num_q_tiles + q_tile_idx];
  for (int spins = 0; turn.load(std::memory_order_acquire) != previous; ++spins) {
    if (spins > 200) std::this_thread::yield();
  }
  for (int row = 0; row < num_rows; ++row) {
    float* to = dq_acc_row(context, b_idx, h_q_idx, q_begin + row);
    const float* from = dq + int64_t{row} * d_padded;
    for (int c = 0; c < d; ++c) to[c] += from[c] * scale;
  }
  turn.store(k_tile_idx, std::memory_order_release);
}

struct QueryTile {
  int32_t q_begin;
  int num_rows;
  bool is_partial;
  const float* lse;         // [num_rows]
  const float* delta;       // [num_rows]
  const float* maybe_dlse;  // [num_rows]
};

// p and ds of one tile, and the tile's share of dq, from packed operands.
void scores_and_dq(const Shape& shape, const QueryTile& tile, int num_keys,
                   const BackwardScratch& scratch) {
  const int d_qk_padded = round_up(shape.d_qk, kLanes), d_v_padded = round_up(shape.d_v, kLanes);
  const int keys_padded = round_up(num_keys, kLanes);
  const int rows_padded = round_up(tile.num_rows, kMicroRows);
  const Panels k_transposed = {scratch.k_transposed, shape.d_qk, keys_padded};
  const Panels v_transposed = {scratch.v_transposed, shape.d_v, keys_padded};
  const Panels k_panels = {scratch.k_panels, num_keys, d_qk_padded};
  for (int begin = 0; begin < rows_padded; begin += kStrip) {
    const Range rows = {begin, rows_padded - begin < kStrip ? rows_padded : begin + kStrip};
    const Range strip_rows = {begin, tile.num_rows < rows.end ? tile.num_rows : rows.end};
    Range keys = scratch.spans->keys[begin / kStrip];
    if (keys.begin >= keys.end) keys = {0, 0};
    // gemm writes whole panels.
    keys = {round_down(keys.begin, kPanel), round_up(keys.end, kPanel)};
    keys.end = keys.end < keys_padded ? keys.end : keys_padded;
    // What the strip does not compute is zero for the strips of keys in add_dk_dv.
    zero_outside(keys, strip_rows, keys_padded, scratch.p);
    zero_outside(keys, strip_rows, keys_padded, scratch.ds);
    gemm<Order::kRowMajor, Into::kOverwrite>(rows, keys, {0, shape.d_qk}, scratch.q_rows,
                                             d_qk_padded, k_transposed, scratch.p, kBlockK);
    gemm<Order::kRowMajor, Into::kOverwrite>(rows, keys, {0, shape.d_v}, scratch.dout_rows,
                                             d_v_padded, v_transposed, scratch.ds, kBlockK);
    const auto gradient = tile.is_partial ? softmax_gradient<true> : softmax_gradient<false>;
    gradient(*scratch.bounds, tile.q_begin, strip_rows, keys, tile.lse, tile.delta, tile.maybe_dlse,
             scratch.p, scratch.ds);
    keys.end = num_keys < keys.end ? num_keys : keys.end;
    gemm<Order::kRowMajor, Into::kOverwrite>(rows, {0, d_qk_padded}, keys, scratch.ds, kBlockK,
                                             k_panels, scratch.dq, d_qk_padded);
  }
}

// dv += p^T dout, dk += ds^T q; a strip of keys looks only at the rows that may see it.
void add_dk_dv(const Shape& shape, int num_rows, int num_keys, const BackwardScratch& scratch) {
  const int d_qk_padded = round_up(shape.d_qk, kLanes), d_v_padded = round_up(shape.d_v, kLanes);
  const int keys_padded = round_up(num_keys, kLanes);
  const Panels q_panels = {scratch.q_panels, num_rows, d_qk_padded};
  const Panels dout_panels = {scratch.dout_panels, num_rows, d_v_padded};
  for (int begin = 0; begin < keys_padded; begin += kStrip) {
    const Range keys = {begin, keys_padded - begin < kStrip ? keys_padded : begin + kStrip};
    const Range rows = scratch.spans->rows[begin / kStrip];
    if (rows.begin >= rows.end) continue;
    gemm<Order::kKMajor, Into::kAdd>(keys, {0, d_v_padded}, rows, scratch.p, kBlockK, dout_panels,
                                     scratch.dv, d_v_padded);
    gemm<Order::kKMajor, Into::kAdd>(keys, {0, d_qk_padded}, rows, scratch.ds, kBlockK, q_panels,
                                     scratch.dk, d_qk_padded);
  }
}

void backward_key_tile(const BwdParams& params, const BackwardContext& context, int32_t b_idx,
                       int32_t h_kv_idx, int32_t k_tile_idx, void* scratch_block) {
  const Shape& shape = params.shape;
  const int d_qk = shape.d_qk, d_qk_padded = round_up(d_qk, kLanes);
  const int d_v = shape.d_v, d_v_padded = round_up(d_v, kLanes);
  const int32_t k_begin = k_tile_idx * kBlockK;
  const int num_keys = shape.s_k - k_begin < kBlockK ? shape.s_k - k_begin : kBlockK;
  const int group = shape.h_q / shape.h_kv;
  const HeadView k = head_view(params.k, params.dtype, params.stride_k, b_idx, h_kv_idx, d_qk);
  const HeadView v = head_view(params.v, params.dtype, params.stride_v, b_idx, h_kv_idx, d_v);
  Arena arena{static_cast<char*>(scratch_block)};
  const BackwardScratch scratch = carve_backward(shape, &arena);

  std::memset(scratch.dk, 0, sizeof(float) * kBlockK * d_qk_padded);
  std::memset(scratch.dv, 0, sizeof(float) * kBlockK * d_v_padded);
  bool is_packed = false;
  int32_t bounds_head = -1;
  const int32_t num_q_tiles = (shape.s_q + kBlockQ - 1) / kBlockQ;
  for (int32_t h_q_idx = h_kv_idx * group; h_q_idx < (h_kv_idx + 1) * group; ++h_q_idx) {
    const int32_t h_mask_idx = h_q_idx / (shape.h_q / context.mask.mask.h_mask);
    const TileClassifier class_of = tile_classifier(context.mask, b_idx, h_mask_idx);
    const HeadView q = head_view(params.q, params.dtype, params.stride_q, b_idx, h_q_idx, d_qk);
    const HeadView dout =
        head_view(params.dout, params.dtype, params.stride_dout, b_idx, h_q_idx, d_v);
    for (int32_t q_tile_idx = 0; q_tile_idx < num_q_tiles; ++q_tile_idx) {
      const int32_t q_begin = q_tile_idx * kBlockQ;
      const TileClass tile_class = class_of(q_begin, k_tile_idx);
      if (tile_class == TileClass::kSkip) continue;
      const bool is_partial = tile_class == TileClass::kPartial;
      const int num_rows = shape.s_q - q_begin < kBlockQ ? shape.s_q - q_begin : kBlockQ;
      const int64_t stats = (int64_t{b_idx} * shape.h_q + h_q_idx) * shape.s_q + q_begin;
      if (!is_packed) pack_key_tile(k, v, k_begin, num_keys, scratch);
      is_packed = true;
      if (is_partial && bounds_head != h_mask_idx) {
        load_tile_bounds(context.mask.mask, b_idx, h_mask_idx, k_begin, num_keys, scratch.bounds);
        bounds_head = h_mask_idx;
      }
      pack_query_rows(q, params.softmax_scale * kLog2e, q_begin, num_rows, scratch.q_rows,
                      scratch.q_panels, scratch.special_q);
      pack_query_rows(dout, 1.0f, q_begin, num_rows, scratch.dout_rows, scratch.dout_panels,
                      scratch.special_dout);
      if (is_partial) {
        find_visible_spans(*scratch.bounds, q_begin, num_rows, num_keys, scratch.spans);
      } else {
        see_everything(num_rows, num_keys, scratch.spans);
      }
      const QueryTile query_tile = {q_begin,
                                    num_rows,
                                    is_partial,
                                    params.lse + stats,
                                    context.delta + stats,
                                    params.dlse == nullptr ? nullptr : params.dlse + stats};
      scores_and_dq(shape, query_tile, num_keys, scratch);
      add_dk_dv(shape, num_rows, num_keys, scratch);
      const auto hides = [&](int row, int key) {
        return is_partial && is_hidden(*scratch.bounds, q_begin + row, key);
      };
      add_special_rows(
          *scratch.special_dout, dout, q_begin, 1.0f, num_keys,
          [&](int key, int row) { return scratch.p[row * kBlockK + key]; },
          [&](int key, int row) { return hides(row, key); }, scratch.row, scratch.dv, d_v_padded);
      add_special_rows(
          *scratch.special_q, q, q_begin, params.softmax_scale * kLog2e, num_keys,
          [&](int key, int row) { return scratch.ds[row * kBlockK + key]; },
          [&](int key, int row) { return hides(row, key); }, scratch.row, scratch.dk, d_qk_padded);
      add_special_rows(
          *scratch.special_k, k, k_begin, 1.0f, num_rows,
          [&](int row, int key) { return scratch.ds[row * kBlockK + key]; }, hides, scratch.row,
          scratch.dq, d_qk_padded);
      add_dq_in_turn(context, class_of, b_idx, h_q_idx, q_tile_idx, k_tile_idx, num_rows, d_qk,
                     params.softmax_scale, scratch.dq, d_qk_padded);
    }
  }
  for (int key = 0; key < num_keys; ++key) {
    const int64_t k_idx = k_begin + key;
    // q_rows carry softmax_scale * log2(e); ln 2 leaves the softmax_scale that dk needs.
    store_row(params.dtype, scratch.dk + int64_t{key} * d_qk_padded, kLn2, d_qk,
              element(params.dk, params.dtype,
                      b_idx * params.stride_dk.b + k_idx * params.stride_dk.s +
                          h_kv_idx * params.stride_dk.h));
    store_row(params.dtype, scratch.dv + int64_t{key} * d_v_padded, 1.0f, d_v,
              element(params.dv, params.dtype,
                      b_idx * params.stride_dv.b + k_idx * params.stride_dv.s +
                          h_kv_idx * params.stride_dv.h));
  }
}

void backward_store_dq(const BwdParams& params, const BackwardContext& context, int32_t b_idx,
                       int32_t h_q_idx, int32_t q_tile_idx) {
  const Shape& shape = params.shape;
  const int32_t q_begin = q_tile_idx * kBlockQ;
  const int32_t q_end = shape.s_q - q_begin < kBlockQ ? shape.s_q : q_begin + kBlockQ;
  for (int64_t q_idx = q_begin; q_idx < q_end; ++q_idx) {
    store_row(params.dtype, dq_acc_row(context, b_idx, h_q_idx, q_idx), 1.0f, shape.d_qk,
              element(params.dq, params.dtype,
                      b_idx * params.stride_dq.b + q_idx * params.stride_dq.s +
                          h_q_idx * params.stride_dq.h));
  }
}
