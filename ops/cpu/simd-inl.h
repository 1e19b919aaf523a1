// SPDX-License-Identifier: Apache-2.0
// Vectors of the target's width, written with the compiler's vector types: the same text serves
// every target, and a product added to a sum becomes one FMA where the target has it.
constexpr int kLanes = FM3_VECTOR_BYTES / 4;
#define FM3_INLINE inline __attribute__((always_inline))

typedef float VecF __attribute__((vector_size(FM3_VECTOR_BYTES)));
typedef int32_t VecI __attribute__((vector_size(FM3_VECTOR_BYTES)));
typedef float VecFUnaligned __attribute__((vector_size(FM3_VECTOR_BYTES), aligned(4), may_alias));
typedef int32_t VecIUnaligned __attribute__((vector_size(FM3_VECTOR_BYTES), aligned(4), may_alias));

FM3_INLINE VecF load(const float* from) { return *reinterpret_cast<const VecFUnaligned*>(from); }
FM3_INLINE void store(float* to, VecF x) { *reinterpret_cast<VecFUnaligned*>(to) = x; }
FM3_INLINE VecI load(const int32_t* from) { return *reinterpret_cast<const VecIUnaligned*>(from); }
FM3_INLINE VecF splat(float x) { return x - VecF{}; }
FM3_INLINE VecI splat(int32_t x) { return x - VecI{}; }
FM3_INLINE VecF as_float(VecI x) { return reinterpret_cast<VecF>(x); }
FM3_INLINE VecI as_int(VecF x) { return reinterpret_cast<VecI>(x); }

// The larger of each lane; a NaN in `x` is ignored, so callers keep it elsewhere.
FM3_INLINE VecF max_ignoring_nan(VecF x, VecF best) { return x > best ? x : best; }
// The smaller of each lane; a NaN in `x` stays.
FM3_INLINE VecF min_keeping_nan(VecF x, VecF bound) { return bound < x ? bound : x; }

constexpr float kInfinity = __builtin_inff();
constexpr float kLog2e = 1.44269504088896340736f;
constexpr float kLn2 = 0.69314718055994530942f;

// 2^x for x <= 0, within 1.5 units in the last place down to -126, and 0 below -126.5; NaN stays
// NaN. 2^x = 2^n * 2^f with integer n and |f| <= 1/2; 2^f by a minimax polynomial whose relative
// error is 2e-9, constant term exactly 1 so that 2^0 = 1.
FM3_INLINE VecF exp2_nonpositive(VecF x) {
  const VecF kLow = splat(-127.0f);
  x = kLow > x ? kLow : x;
  const VecF kRound = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const VecF shifted = x + kRound;
  const VecF f = x - (shifted - kRound);
  VecF p = splat(0x1.41fbb8p-13f);
  p = p * f + splat(0x1.5f3e54p-10f);
  p = p * f + splat(0x1.3b2d4cp-7f);
  p = p * f + splat(0x1.c6aee8p-5f);
  p = p * f + splat(0x1.ebfbdcp-3f);
  p = p * f + splat(0x1.62e430p-1f);
  p = p * f + splat(1.0f);
  // The low bits of `shifted` hold n; 2^n is built in the exponent field (0 for n = -127).
  const VecI exponent = (as_int(shifted) + splat(int32_t{127 - 0x4B400000})) << 23;
  return p * as_float(exponent);
}
