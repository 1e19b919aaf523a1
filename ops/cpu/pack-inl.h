// SPDX-License-Identifier: Apache-2.0
// Between the caller's tensors and the packed fp32 operands of gemm.

FM3_INLINE float bits_to_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
FM3_INLINE uint32_t float_to_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

FM3_INLINE float bf16_to_f32(uint16_t x) { return bits_to_float(uint32_t{x} << 16); }

// Rounds to nearest, ties to even; a NaN stays a (quiet) NaN.
FM3_INLINE uint16_t f32_to_bf16(float x) {
  const uint32_t bits = float_to_bits(x);
  const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t quiet_nan = (bits >> 16) | 0x40u;
  return static_cast<uint16_t>((bits & 0x7FFFFFFFu) > 0x7F800000u ? quiet_nan : rounded);
}

// Exact. A denormal is the difference of two normal numbers, so flush-to-zero does not touch it.
FM3_INLINE float f16_to_f32(uint16_t x) {
  const uint32_t sign = (uint32_t{x} & 0x8000u) << 16;
  const uint32_t magnitude = uint32_t{x} & 0x7FFFu;
  const uint32_t normal = (magnitude << 13) + ((127u - 15u) << 23);
  const uint32_t special = (magnitude << 13) | 0x7F800000u;
  const uint32_t denormal =
      float_to_bits(bits_to_float((113u << 23) | (magnitude << 13)) - bits_to_float(113u << 23));
  const uint32_t bits = magnitude >= 0x7C00u ? special : magnitude >= 0x0400u ? normal : denormal;
  return bits_to_float(bits | sign);
}

// Rounds to nearest, ties to even; overflow gives infinity, a NaN stays a NaN.
FM3_INLINE uint16_t f32_to_f16(float x) {
  const uint32_t bits = float_to_bits(x);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  const uint32_t normal =
      (magnitude + 0xFFFu + ((magnitude >> 13) & 1u) - ((127u - 15u) << 23)) >> 13;
  // Adding 1/2 aligns a denormal's last bit with the float's last bit, where the add rounds it.
  const uint32_t denormal = float_to_bits(bits_to_float(magnitude) + 0.5f) - float_to_bits(0.5f);
  const uint32_t finite = magnitude < (113u << 23) ? denormal : normal;
  const uint32_t overflow = magnitude > 0x7F800000u ? 0x7E00u : 0x7C00u;
  return static_cast<uint16_t>(sign | (magnitude >= 0x477FF000u ? overflow : finite));
}

FM3_INLINE const void* element(const void* base, DType dtype, int64_t offset) {
  return static_cast<const char*>(base) + offset * (dtype == DType::kFloat32 ? 4 : 2);
}
FM3_INLINE void* element(void* base, DType dtype, int64_t offset) {
  return static_cast<char*>(base) + offset * (dtype == DType::kFloat32 ? 4 : 2);
}

// One row of `d` elements to fp32. Returns whether all are finite.
bool load_row(DType dtype, const void* from, int d, float* to) {
  if (dtype == DType::kFloat32) {
    std::memcpy(to, from, sizeof(float) * d);
  } else {
    const uint16_t* halves = static_cast<const uint16_t*>(from);
    if (dtype == DType::kBFloat16) {
      for (int c = 0; c < d; ++c) to[c] = bf16_to_f32(halves[c]);
    } else {
      for (int c = 0; c < d; ++c) to[c] = f16_to_f32(halves[c]);
    }
  }
  uint32_t largest_exponent = 0;
  for (int c = 0; c < d; ++c) {
    const uint32_t exponent = float_to_bits(to[c]) & 0x7F800000u;
    largest_exponent = exponent > largest_exponent ? exponent : largest_exponent;
  }
  return largest_exponent < 0x7F800000u;
}

// One row of `d` fp32 numbers times `scale` to the tensor's type.
void store_row(DType dtype, const float* from, float scale, int d, void* to) {
  if (dtype == DType::kFloat32) {
    float* floats = static_cast<float*>(to);
    for (int c = 0; c < d; ++c) floats[c] = from[c] * scale;
  } else {
    uint16_t* halves = static_cast<uint16_t*>(to);
    if (dtype == DType::kBFloat16) {
      for (int c = 0; c < d; ++c) halves[c] = f32_to_bf16(from[c] * scale);
    } else {
      for (int c = 0; c < d; ++c) halves[c] = f32_to_f16(from[c] * scale);
    }
  }
}

// Where the rows of one head of a [b, s, h, d] tensor begin.
struct HeadView {
  const void* base;
  DType dtype;
  int64_t stride_s;
  int d;

  FM3_INLINE const void* row(int64_t s_idx) const { return element(base, dtype, s_idx * stride_s); }
};

FM3_INLINE HeadView head_view(const void* tensor, DType dtype, const Strides& stride, int64_t b_idx,
                              int64_t h_idx, int d) {
  return {element(tensor, dtype, b_idx * stride.b + h_idx * stride.h), dtype, stride.s, d};
}

// Rows of a B operand that hold a NaN or an infinity. They are zero in the packed operand, because
// 0 * NaN would carry them to pairs that the mask hides; add_special_rows adds what is visible.
struct SpecialRows {
  int count;
  int32_t rows[kBlockQ > kBlockK ? kBlockQ : kBlockK];
};

// rows [begin, begin + num_rows) -> B panels [cols/kPanel][num_rows][width], zero padded columns.
FM3_INLINE void scatter_to_panels(const float* row_values, int row, int num_rows, int d_padded,
                                  float* panels) {
  for (int col = 0; col < d_padded; col += kPanel) {
    const int width = d_padded - col < kPanel ? d_padded - col : kPanel;
    float* to = panels + int64_t{col} * num_rows + int64_t{row} * width;
    for (int c = 0; c < width; c += kLanes) store(to + c, load(row_values + col + c));
  }
}

// Row `row` of a tile becomes column `row` of B panels [num_rows_padded/kPanel][d][width].
FM3_INLINE void scatter_transposed(const float* row_values, float scale, int row,
                                   int num_rows_padded, int d, float* panels) {
  const int panel_begin = row / kPanel * kPanel;
  const int width = num_rows_padded - panel_begin < kPanel ? num_rows_padded - panel_begin : kPanel;
  float* to = panels + int64_t{panel_begin} * d + (row - panel_begin);
  for (int c = 0; c < d; ++c) to[int64_t{c} * width] = row_values[c] * scale;
}

// Hands out pieces of one scratch block, each on a cache line.
struct Arena {
  char* next;

  template <typename T>
  FM3_INLINE T* take(int64_t count) {
    T* piece = reinterpret_cast<T*>(next);
    next += (count * int64_t{sizeof(T)} + 63) / 64 * 64;
    return piece;
  }
};
