// SPDX-License-Identifier: Apache-2.0
// Small matrix products on packed operands: C[rows, cols] (op)= A[rows, depth] * B[depth, cols].
//
// B lies in panels of kPanel columns, each [depth][width]; the last panel may be one vector wide.
// A is read one float at a time and broadcast, so it needs no packing: row-major (A[row][k]) or,
// for a transposed A, k-major (A[k][row]). A and C have rows padded to kMicroRows; what lands in
// padding is never read. The order of additions depends on the ranges alone.
//
// Own microkernel rather than a library's: 95 % of OpenBLAS's sgemm on the same core (Zen 4, one
// thread, s = 2048, d = 128), softmax included, from 90 lines that compile in a second for every
// target. oneDNN and Eigen bring a build of minutes, and their calls cannot skip parts of a tile.
constexpr int kMicroRows = kLanes == 16 ? 8 : 4;
constexpr int kMicroVecs = 2;
constexpr int kPanel = kMicroVecs * kLanes;

enum class Order { kRowMajor, kKMajor };
enum class Into { kOverwrite, kAdd, kScaleAdd };  // kScaleAdd: C = row_scale[row] * C + A * B

struct Range {
  int begin, end;  // half-open
};

struct Panels {
  const float* data;  // [cols/kPanel][depth][width]
  int depth, cols;    // cols in whole vectors
};

FM3_INLINE int round_up(int x, int multiple) { return (x + multiple - 1) / multiple * multiple; }
FM3_INLINE int round_down(int x, int multiple) { return x / multiple * multiple; }

template <int kVecs, Order kOrder, Into kInto>
FM3_INLINE void micro_kernel(int depth, const float* a, int64_t lda, const float* b, float* c,
                             int64_t ldc, const float* row_scale) {
  VecF acc[kMicroRows][kVecs];
#pragma GCC unroll 8
  for (int row = 0; row < kMicroRows; ++row) {
#pragma GCC unroll 2
    for (int vec = 0; vec < kVecs; ++vec) acc[row][vec] = VecF{};
  }
  for (int k = 0; k < depth; ++k) {
    VecF b_vec[kVecs];
#pragma GCC unroll 2
    for (int vec = 0; vec < kVecs; ++vec) b_vec[vec] = load(b + vec * kLanes);
    b += kVecs * kLanes;
#pragma GCC unroll 8
    for (int row = 0; row < kMicroRows; ++row) {
      const VecF a_vec = splat(kOrder == Order::kKMajor ? a[row] : a[row * lda]);
#pragma GCC unroll 2
      for (int vec = 0; vec < kVecs; ++vec) acc[row][vec] += a_vec * b_vec[vec];
    }
    a += kOrder == Order::kKMajor ? lda : 1;
  }
#pragma GCC unroll 8
  for (int row = 0; row < kMicroRows; ++row) {
#pragma GCC unroll 2
    for (int vec = 0; vec < kVecs; ++vec) {
      float* to = c + row * ldc + vec * kLanes;
      if (kInto == Into::kOverwrite) store(to, acc[row][vec]);
      if (kInto == Into::kAdd) store(to, load(to) + acc[row][vec]);
      if (kInto == Into::kScaleAdd) store(to, load(to) * splat(row_scale[row]) + acc[row][vec]);
    }
  }
}

// The part `rows` x `cols` of C from the part `depth` of the sum. rows.begin is a multiple of
// kMicroRows, cols.begin of kPanel; their ends are rounded up to whole rows and vectors.
template <Order kOrder, Into kInto>
void gemm(Range rows, Range cols, Range depth, const float* a, int64_t lda, const Panels& b,
          float* c, int64_t ldc, const float* row_scale = nullptr) {
  const float* a_begin = a + (kOrder == Order::kKMajor ? depth.begin * lda : depth.begin);
  const int num_k = depth.end - depth.begin;
  for (int col = cols.begin; col < cols.end; col += kPanel) {
    const bool is_narrow = b.cols - col <= kLanes;
    const float* b_panel =
        b.data + int64_t{col} * b.depth + int64_t{depth.begin} * (is_narrow ? kLanes : kPanel);
    for (int row = rows.begin; row < rows.end; row += kMicroRows) {
      const float* a_rows = a_begin + (kOrder == Order::kKMajor ? row : row * lda);
      float* c_rows = c + row * ldc + col;
      const float* scale_rows = kInto == Into::kScaleAdd ? row_scale + row : nullptr;
      if (is_narrow) {
        micro_kernel<1, kOrder, kInto>(num_k, a_rows, lda, b_panel, c_rows, ldc, scale_rows);
      } else {
        micro_kernel<kMicroVecs, kOrder, kInto>(num_k, a_rows, lda, b_panel, c_rows, ldc,
                                                scale_rows);
      }
    }
  }
}
