// SPDX-License-Identifier: Apache-2.0
// The parts that an attention test reaches only through averages: exp2 to its last bit, conversions
// for every value, products of every small size.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "test/cpp/parts.h"

namespace {

int num_failures = 0;

#define EXPECT(condition, ...)                                   \
  do {                                                           \
    if (!(condition)) {                                          \
      ++num_failures;                                            \
      std::printf("%s:%d %s: ", __FILE__, __LINE__, parts.name); \
      std::printf(__VA_ARGS__);                                  \
      std::printf("\n");                                         \
      if (num_failures > 20) std::exit(1);                       \
    }                                                            \
  } while (0)

float as_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
uint32_t as_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

// Every 37th float in [-126, -0] and the special values.
void test_exp2(const KernelParts& parts) {
  std::vector<float> x, y;
  double worst = 0;
  const auto flush = [&] {
    while (x.size() % parts.lanes != 0) x.push_back(0.0f);
    y.resize(x.size());
    parts.exp2_nonpositive(x.data(), static_cast<int>(x.size()), y.data());
    for (size_t i = 0; i < x.size(); ++i) {
      const double exact = std::exp2(static_cast<double>(x[i]));
      const double ulp = std::ldexp(1.0, std::ilogb(exact) - 23);
      const double error = std::fabs(y[i] - exact) / ulp;
      if (error > worst) worst = error;
      EXPECT(error <= 1.5, "exp2(%.9g) = %.9g is %.2f ulp from %.9g", x[i], y[i], error, exact);
    }
    x.clear();
  };
  for (uint32_t bits = as_bits(-0.0f); bits <= as_bits(-126.0f); bits += 37) {
    x.push_back(as_float(bits));
    if (x.size() == 65536) flush();
  }
  flush();
  std::printf("%s: exp2 worst error %.3f ulp\n", parts.name, worst);
  std::vector<float> special = {0.0f, -0.0f, -INFINITY, NAN,  -1e30f, -126.6f, -127.0f, -1000.0f,
                                0.0f, 0.0f,  0.0f,      0.0f, 0.0f,   0.0f,    0.0f,    0.0f};
  std::vector<float> result(special.size());
  parts.exp2_nonpositive(special.data(), static_cast<int>(special.size()), result.data());
  EXPECT(result[0] == 1.0f && result[1] == 1.0f, "exp2(0) = %.9g, %.9g", result[0], result[1]);
  EXPECT(std::isnan(result[3]), "exp2(NaN) = %g", result[3]);
  for (int i : {2, 4, 5, 6, 7}) EXPECT(result[i] == 0.0f, "exp2(%g) = %g", special[i], result[i]);
}

void test_half_precision(const KernelParts& parts) {
  for (uint32_t half = 0; half < 65536; ++half) {
    const uint16_t bits = static_cast<uint16_t>(half);
    const float wide = parts.f16_to_f32(bits);
    const int exponent = (bits >> 10) & 31, fraction = bits & 1023;
    const double magnitude = exponent == 31 ? (fraction ? NAN : INFINITY)
                             : exponent     ? std::ldexp(1024 + fraction, exponent - 25)
                                            : std::ldexp(fraction, -24);
    const double exact = bits & 0x8000 ? -magnitude : magnitude;
    EXPECT(std::isnan(exact) ? std::isnan(wide) : wide == exact, "f16 %04x widens to %g", half,
           wide);
    const uint16_t back = parts.f32_to_f16(wide);
    EXPECT(std::isnan(exact) ? std::isnan(parts.f16_to_f32(back)) : back == bits,
           "f16 %04x comes back %04x", half, back);
    const float brain = parts.bf16_to_f32(bits);
    EXPECT(as_bits(brain) == half << 16, "bf16 %04x widens to %g", half, brain);
    const uint16_t brain_back = parts.f32_to_bf16(brain);
    EXPECT(std::isnan(brain) ? std::isnan(parts.bf16_to_f32(brain_back)) : brain_back == bits,
           "bf16 %04x comes back %04x", half, brain_back);
  }
  // Neighbours `low` < `high` of one format: below the middle goes down, above goes up, the middle
  // to even.
  const auto check_rounding = [&](float low, float high, uint16_t low_bits,
                                  uint16_t (*narrow)(float), const char* name) {
    const double middle = (static_cast<double>(low) + high) / 2;
    const float at = static_cast<float>(middle);  // exact: fp32 has at least 12 more bits
    const uint16_t even = low_bits % 2 == 0 ? low_bits : low_bits + 1;
    EXPECT(narrow(at) == even, "%s: middle %.9g above %04x rounds to %04x", name, at, low_bits,
           narrow(at));
    EXPECT(narrow(std::nextafterf(at, 0.0f)) == low_bits, "%s: below the middle of %04x", name,
           low_bits);
    EXPECT(narrow(std::nextafterf(at, INFINITY)) == low_bits + 1, "%s: above the middle of %04x",
           name, low_bits);
    EXPECT(narrow(-at) == (even | 0x8000), "%s: negative middle of %04x", name, low_bits);
  };
  for (uint16_t bits = 0; bits < 0x7BFF; ++bits) {
    check_rounding(parts.f16_to_f32(bits), parts.f16_to_f32(bits + 1), bits, parts.f32_to_f16,
                   "f16");
  }
  for (uint16_t bits = 0x0080; bits < 0x7F7F; ++bits) {
    check_rounding(parts.bf16_to_f32(bits), parts.bf16_to_f32(bits + 1), bits, parts.f32_to_bf16,
                   "bf16");
  }
  EXPECT(parts.f32_to_f16(65519.0f) == 0x7BFF && parts.f32_to_f16(65520.0f) == 0x7C00,
         "f16 overflow");
  EXPECT(parts.f32_to_f16(INFINITY) == 0x7C00 && parts.f32_to_f16(-INFINITY) == 0xFC00,
         "f16 infinity");
}

void test_gemm(const KernelParts& parts) {
  std::mt19937 random(1);
  std::uniform_int_distribution<int> side(1, 130), value(-8, 8);
  for (int round = 0; round < 60; ++round) {
    const int rows = side(random), cols = side(random), depth = side(random);
    std::vector<float> a(rows * depth), b(depth * cols), c(rows * cols), exact(rows * cols, 0.0f);
    for (float& x : a) x = static_cast<float>(value(random));
    for (float& x : b) x = static_cast<float>(value(random));
    for (int row = 0; row < rows; ++row) {  // small integers: every order of additions is exact
      for (int k = 0; k < depth; ++k) {
        for (int col = 0; col < cols; ++col)
          exact[row * cols + col] += a[row * depth + k] * b[k * cols + col];
      }
    }
    parts.gemm_row_major(rows, cols, depth, a.data(), b.data(), c.data());
    EXPECT(c == exact, "row-major product %d x %d x %d", rows, cols, depth);
    parts.gemm_k_major(rows, cols, depth, a.data(), b.data(), c.data());
    EXPECT(c == exact, "k-major product %d x %d x %d", rows, cols, depth);
  }
}

}  // namespace

int main() {
  const KernelParts* all[] = {&kBaselineParts,
#if defined(__x86_64__)
                              &kAvx2Parts, &kAvx512Parts
#endif
  };
  for (const KernelParts* parts : all) {
    if (!parts->is_supported()) {
      std::printf("%s: not served by this processor\n", parts->name);
      continue;
    }
    test_exp2(*parts);
    test_half_precision(*parts);
    test_gemm(*parts);
  }
  std::printf("%d failures\n", num_failures);
  return num_failures == 0 ? 0 : 1;
}
