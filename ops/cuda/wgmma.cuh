// SPDX-License-Identifier: Apache-2.0
// wgmma: D[64, N] (+)= A[64, 16] * B[16, N], D fp32 in registers, A and B bf16 or fp16.
//
//   Wgmma<N, T, kTransA, kTransB>::ss(d, desc_a, desc_b, scale_d)   A and B in shared memory
//   Wgmma<N, T, false,   kTransB>::rs(d, a[4], desc_b, scale_d)     A in registers
//   scale_d: 0 overwrites D, 1 accumulates. Instances: N = 8 ... 256 in steps of 8.
//
// D fragment of thread t (warp w = t / 32 % 4, lane l = t % 32): d[4 j + 2 i + e] is row
// 16 w + l / 4 + 8 i, column 8 j + 2 (l % 4) + e. A fragment of `rs`, for k step s:
// {d[8 s + 0..1], d[8 s + 2..3], d[8 s + 4..5], d[8 s + 6..7]} packed: a D tile turns into A in place.
//
// Shared tiles are panels of 64 elements (128 bytes) a row, 128-byte swizzled as TMA writes them:
// panel p of a [rows, d] tile starts at p * rows * 128 bytes, row r at r * 128; 1024-byte aligned.
//   K-major     (k contiguous, e.g. Q and K in Q K^T): desc(addr) ; next 16 of k: + 32 bytes inside
//               a panel, then the next panel. B's N rows (or A's 64) are the rows of the tile.
//   not K-major (k strided, e.g. V in P V; set kTransA/B): desc_mn(addr, panel_bytes); next 16 of k:
//               + 2048 bytes. N (or 64) runs along the 64-wide panels, panel_bytes apart.
// Descriptors are advanced by adding bytes >> 4 to the 64-bit value (advance()).
#pragma once

#include "ptx.cuh"

namespace fm3::ptx {

constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
constexpr uint64_t kSwizzle64 = uint64_t{2} << 62;
constexpr uint64_t kSwizzle32 = uint64_t{3} << 62;

// K-major operand. `group_bytes`: 8 rows of the panel (1024 for 128-byte rows).
__device__ __forceinline__ uint64_t wgmma_desc(uint32_t smem_address, uint32_t group_bytes = 1024,
                                               uint64_t swizzle = kSwizzle128) {
  return swizzle | (uint64_t{group_bytes >> 4} << 32) | (uint64_t{1} << 16) |
         ((smem_address & 0x3FFFF) >> 4);
}
// Operand whose k axis is strided by a panel row.
__device__ __forceinline__ uint64_t wgmma_desc_mn(uint32_t smem_address, uint32_t panel_bytes,
                                                  uint32_t group_bytes = 1024,
                                                  uint64_t swizzle = kSwizzle128) {
  return swizzle | (uint64_t{group_bytes >> 4} << 32) | (uint64_t{panel_bytes >> 4} << 16) |
         ((smem_address & 0x3FFFF) >> 4);
}
// B operand of rows of 16 bytes, 8 rows of a group one after the other: both halves of its k step are these.
__device__ __forceinline__ uint64_t wgmma_desc_rows16(uint32_t smem_address) {
  return (uint64_t{128 >> 4} << 32) | ((smem_address & 0x3FFFF) >> 4);
}
// Only the low half changes (addresses stay below 2^18), so no carry is computed.
__device__ __forceinline__ uint64_t advance(uint64_t desc, uint32_t bytes) {
  const auto low = static_cast<uint32_t>(desc) + (bytes >> 4);
  return (desc & 0xFFFFFFFF00000000) | low;
}

// Before the first wgmma, and after registers of D or A were touched by anything else.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Keeps the compiler from moving uses of an accumulator above the wait that completes it.
template <int kCount>
__device__ __forceinline__ void wgmma_pin(float (&d)[kCount]) {
#pragma unroll
  for (int idx = 0; idx < kCount; ++idx) asm volatile("" : "+f"(d[idx])::"memory");
}

template <int N, class T, bool kTransA = false, bool kTransB = false>
struct Wgmma;

// Operand lists of N columns: N / 2 accumulator registers, grown 8 columns (4 registers) a step.
// clang-format off
#define FM3_R8 "%0, %1, %2, %3"
#define FM3_D8 "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
#define FM3_R16 FM3_R8 ", %4, %5, %6, %7"
#define FM3_D16 FM3_D8, "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
#define FM3_R24 FM3_R16 ", %8, %9, %10, %11"
#define FM3_D24 FM3_D16, "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11])
#define FM3_R32 FM3_R24 ", %12, %13, %14, %15"
#define FM3_D32 FM3_D24, "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
#define FM3_R40 FM3_R32 ", %16, %17, %18, %19"
#define FM3_D40 FM3_D32, "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19])
#define FM3_R48 FM3_R40 ", %20, %21, %22, %23"
#define FM3_D48 FM3_D40, "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23])
#define FM3_R56 FM3_R48 ", %24, %25, %26, %27"
#define FM3_D56 FM3_D48, "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27])
#define FM3_R64 FM3_R56 ", %28, %29, %30, %31"
#define FM3_D64 FM3_D56, "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define FM3_R72 FM3_R64 ", %32, %33, %34, %35"
#define FM3_D72 FM3_D64, "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35])
#define FM3_R80 FM3_R72 ", %36, %37, %38, %39"
#define FM3_D80 FM3_D72, "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39])
#define FM3_R88 FM3_R80 ", %40, %41, %42, %43"
#define FM3_D88 FM3_D80, "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43])
#define FM3_R96 FM3_R88 ", %44, %45, %46, %47"
#define FM3_D96 FM3_D88, "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47])
#define FM3_R104 FM3_R96 ", %48, %49, %50, %51"
#define FM3_D104 FM3_D96, "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51])
#define FM3_R112 FM3_R104 ", %52, %53, %54, %55"
#define FM3_D112 FM3_D104, "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55])
#define FM3_R120 FM3_R112 ", %56, %57, %58, %59"
#define FM3_D120 FM3_D112, "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59])
#define FM3_R128 FM3_R120 ", %60, %61, %62, %63"
#define FM3_D128 FM3_D120, "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
#define FM3_R136 FM3_R128 ", %64, %65, %66, %67"
#define FM3_D136 FM3_D128, "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67])
#define FM3_R144 FM3_R136 ", %68, %69, %70, %71"
#define FM3_D144 FM3_D136, "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71])
#define FM3_R152 FM3_R144 ", %72, %73, %74, %75"
#define FM3_D152 FM3_D144, "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75])
#define FM3_R160 FM3_R152 ", %76, %77, %78, %79"
#define FM3_D160 FM3_D152, "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79])
#define FM3_R168 FM3_R160 ", %80, %81, %82, %83"
#define FM3_D168 FM3_D160, "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83])
#define FM3_R176 FM3_R168 ", %84, %85, %86, %87"
#define FM3_D176 FM3_D168, "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87])
#define FM3_R184 FM3_R176 ", %88, %89, %90, %91"
#define FM3_D184 FM3_D176, "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91])
#define FM3_R192 FM3_R184 ", %92, %93, %94, %95"
#define FM3_D192 FM3_D184, "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95])
#define FM3_R200 FM3_R192 ", %96, %97, %98, %99"
#define FM3_D200 FM3_D192, "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99])
#define FM3_R208 FM3_R200 ", %100, %101, %102, %103"
#define FM3_D208 FM3_D200, "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103])
#define FM3_R216 FM3_R208 ", %104, %105, %106, %107"
#define FM3_D216 FM3_D208, "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107])
#define FM3_R224 FM3_R216 ", %108, %109, %110, %111"
#define FM3_D224 FM3_D216, "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111])
#define FM3_R232 FM3_R224 ", %112, %113, %114, %115"
#define FM3_D232 FM3_D224, "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115])
#define FM3_R240 FM3_R232 ", %116, %117, %118, %119"
#define FM3_D240 FM3_D232, "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119])
#define FM3_R248 FM3_R240 ", %120, %121, %122, %123"
#define FM3_D248 FM3_D240, "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123])
#define FM3_R256 FM3_R248 ", %124, %125, %126, %127"
#define FM3_D256 FM3_D248, "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])

#define FM3_WGMMA_TYPE(N, T, TNAME, I0, I1, I2, I3, I4, I5, I6)                                    \
  template <bool kTransA, bool kTransB>                                                           \
  struct Wgmma<N, T, kTransA, kTransB> {                                                          \
    static __device__ __forceinline__ void ss(float (&d)[N / 2], uint64_t desc_a, uint64_t desc_b, \
                                              int32_t scale_d) {                                  \
      asm volatile(                                                                               \
          "{\n.reg .pred p;\nsetp.ne.b32 p, %" #I2 ", 0;\n"                                       \
          "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TNAME "." TNAME " {" FM3_R##N "}, "   \
          "%" #I0 ", %" #I1 ", p, 1, 1, %" #I3 ", %" #I4 ";\n}\n"                                 \
          : FM3_D##N                                                                              \
          : "l"(desc_a), "l"(desc_b), "r"(scale_d), "n"(kTransA ? 1 : 0), "n"(kTransB ? 1 : 0));  \
    }                                                                                             \
    static __device__ __forceinline__ void rs(float (&d)[N / 2], uint32_t a0, uint32_t a1,        \
                                              uint32_t a2, uint32_t a3, uint64_t desc_b,          \
                                              int32_t scale_d) {                                  \
      static_assert(!kTransA, "A in registers has one layout");                                   \
      asm volatile(                                                                               \
          "{\n.reg .pred p;\nsetp.ne.b32 p, %" #I5 ", 0;\n"                                       \
          "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TNAME "." TNAME " {" FM3_R##N "}, "   \
          "{%" #I0 ", %" #I1 ", %" #I2 ", %" #I3 "}, %" #I4 ", p, 1, 1, %" #I6 ";\n}\n"           \
          : FM3_D##N                                                                              \
          : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(desc_b), "r"(scale_d),                        \
            "n"(kTransB ? 1 : 0));                                                                \
    }                                                                                             \
  };
#define FM3_WGMMA(N, ...)                                      \
  FM3_WGMMA_TYPE(N, __nv_bfloat16, "bf16", __VA_ARGS__)        \
  FM3_WGMMA_TYPE(N, __half, "f16", __VA_ARGS__)
// N, then the seven operand numbers that follow the N / 2 accumulator registers.
FM3_WGMMA(8, 4, 5, 6, 7, 8, 9, 10)
FM3_WGMMA(16, 8, 9, 10, 11, 12, 13, 14)
FM3_WGMMA(24, 12, 13, 14, 15, 16, 17, 18)
FM3_WGMMA(32, 16, 17, 18, 19, 20, 21, 22)
FM3_WGMMA(40, 20, 21, 22, 23, 24, 25, 26)
FM3_WGMMA(48, 24, 25, 26, 27, 28, 29, 30)
FM3_WGMMA(56, 28, 29, 30, 31, 32, 33, 34)
FM3_WGMMA(64, 32, 33, 34, 35, 36, 37, 38)
FM3_WGMMA(72, 36, 37, 38, 39, 40, 41, 42)
FM3_WGMMA(80, 40, 41, 42, 43, 44, 45, 46)
FM3_WGMMA(88, 44, 45, 46, 47, 48, 49, 50)
FM3_WGMMA(96, 48, 49, 50, 51, 52, 53, 54)
FM3_WGMMA(104, 52, 53, 54, 55, 56, 57, 58)
FM3_WGMMA(112, 56, 57, 58, 59, 60, 61, 62)
FM3_WGMMA(120, 60, 61, 62, 63, 64, 65, 66)
FM3_WGMMA(128, 64, 65, 66, 67, 68, 69, 70)
FM3_WGMMA(136, 68, 69, 70, 71, 72, 73, 74)
FM3_WGMMA(144, 72, 73, 74, 75, 76, 77, 78)
FM3_WGMMA(152, 76, 77, 78, 79, 80, 81, 82)
FM3_WGMMA(160, 80, 81, 82, 83, 84, 85, 86)
FM3_WGMMA(168, 84, 85, 86, 87, 88, 89, 90)
FM3_WGMMA(176, 88, 89, 90, 91, 92, 93, 94)
FM3_WGMMA(184, 92, 93, 94, 95, 96, 97, 98)
FM3_WGMMA(192, 96, 97, 98, 99, 100, 101, 102)
FM3_WGMMA(200, 100, 101, 102, 103, 104, 105, 106)
FM3_WGMMA(208, 104, 105, 106, 107, 108, 109, 110)
FM3_WGMMA(216, 108, 109, 110, 111, 112, 113, 114)
FM3_WGMMA(224, 112, 113, 114, 115, 116, 117, 118)
FM3_WGMMA(232, 116, 117, 118, 119, 120, 121, 122)
FM3_WGMMA(240, 120, 121, 122, 123, 124, 125, 126)
FM3_WGMMA(248, 124, 125, 126, 127, 128, 129, 130)
FM3_WGMMA(256, 128, 129, 130, 131, 132, 133, 134)
// clang-format on
#undef FM3_WGMMA
#undef FM3_WGMMA_TYPE

}  // namespace fm3::ptx
