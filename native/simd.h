// The vector vocabulary the families share. HEADRACE_LEVEL: 0 scalar (the specification), 1 avx2, 2 avx512vnni, 3 avx512bf16.
// exp_ps does the same operations in the same order at every level, so that its bits agree everywhere.
#pragma once
#include <cstdint>
#include <cstring>
#if HEADRACE_LEVEL > 0
#include <immintrin.h>
#endif

namespace headrace {
namespace HEADRACE_ISA {
namespace {

// exp(x) = 2^n * p(r), n = rint(x / ln 2), |r| <= ln 2 / 2. Relative error below 2e-7 on [-87, 88]; x is clamped to that range,
// so exp(-inf) is 1.6e-38, not 0: callers mask what must be zero.
constexpr float kExpLo = -87.0f, kExpHi = 88.0f, kLog2e = 1.44269504088896341f;
constexpr float kLn2Hi = 0.693359375f, kLn2Lo = -2.12194440e-4f;
constexpr float kExp[6] = {1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};

inline float bits_to_float(uint32_t u) {
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}
inline uint32_t float_to_bits(float f) {
  uint32_t u;
  std::memcpy(&u, &f, 4);
  return u;
}

[[maybe_unused]] inline float exp_f32(float x) {
  x = x < kExpHi ? x : kExpHi;
  x = x > kExpLo ? x : kExpLo;
  const float n = __builtin_rintf(x * kLog2e);
  float r = __builtin_fmaf(-n, kLn2Hi, x);
  r = __builtin_fmaf(-n, kLn2Lo, r);
  float p = kExp[0];
  for (int i = 1; i < 6; i++) p = __builtin_fmaf(p, r, kExp[i]);
  p = __builtin_fmaf(p, r * r, r) + 1.0f;
  return bits_to_float(float_to_bits(p) + (static_cast<uint32_t>(static_cast<int32_t>(n)) << 23));
}

// 2^t, t clamped from below at -125 and at most 126: n = rint(t) by adding and subtracting 1.5 * 2^23, whose sum also holds n in its low bits; 2^(t -
// n) by a polynomial of degree 5, relative error below 2e-7, exactly 1 at 0. NaN stays NaN. Half the operations of exp_ps.
constexpr float kExp2Lo = -125.0f, kExp2Hi = 126.0f, kExp2Magic = 12582912.0f;
constexpr float kExp2[5] = {1.326472731e-3f, 9.671512991e-3f, 5.550733581e-2f, 2.402224243e-1f, 6.931470037e-1f};

[[maybe_unused]] inline float exp2_f32(float t) {
  t = kExp2Lo > t ? kExp2Lo : t;
  const float shifted = t + kExp2Magic, f = t - (shifted - kExp2Magic);
  float p = kExp2[0];
  for (int i = 1; i < 5; i++) p = __builtin_fmaf(p, f, kExp2[i]);
  p = __builtin_fmaf(p, f, 1.0f);
  return bits_to_float(float_to_bits(p) + (float_to_bits(shifted) << 23));
}
[[maybe_unused]] inline float silu_f32(float x) {
  const float t = x * -kLog2e;
  return x / (1.0f + exp2_f32(kExp2Hi < t ? kExp2Hi : t));
}

// fp32 <-> bf16, round to nearest even; NaN stays NaN.
[[maybe_unused]] inline uint16_t to_bf16(float f) {
  const uint32_t u = float_to_bits(f);
  if ((u & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((u >> 16) | 0x40);
  return static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
}
[[maybe_unused]] inline float from_bf16(uint16_t h) { return bits_to_float(static_cast<uint32_t>(h) << 16); }

// fp16 -> fp32, exact, without F16C.
[[maybe_unused]] inline float from_fp16(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16, exponent = (h >> 10) & 31, mantissa = h & 1023;
  if (exponent == 31) return bits_to_float(sign | 0x7f800000u | mantissa << 13);
  if (exponent) return bits_to_float(sign | (exponent + 112) << 23 | mantissa << 13);
  const float value = static_cast<float>(mantissa) * 5.9604644775390625e-8f;  // 2^-24
  return sign ? -value : value;
}

#if HEADRACE_LEVEL >= 2
[[maybe_unused]] inline __m512 exp_ps(__m512 x) {
  x = _mm512_min_ps(x, _mm512_set1_ps(kExpHi));
  x = _mm512_max_ps(x, _mm512_set1_ps(kExpLo));
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(kLog2e)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(kLn2Hi), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(kLn2Lo), r);
  __m512 p = _mm512_set1_ps(kExp[0]);
  for (int i = 1; i < 6; i++) p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(kExp[i]));
  p = _mm512_add_ps(_mm512_fmadd_ps(p, _mm512_mul_ps(r, r), r), _mm512_set1_ps(1.0f));
  return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(p), _mm512_slli_epi32(_mm512_cvtps_epi32(n), 23)));
}
[[maybe_unused]] inline __m512 exp2_ps(__m512 t) {
  const __m512 magic = _mm512_set1_ps(kExp2Magic);
  t = _mm512_max_ps(_mm512_set1_ps(kExp2Lo), t);  // in this order NaN passes
  const __m512 shifted = _mm512_add_ps(t, magic), f = _mm512_sub_ps(t, _mm512_sub_ps(shifted, magic));
  __m512 p = _mm512_set1_ps(kExp2[0]);
#pragma GCC unroll 4
  for (int i = 1; i < 5; i++) p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(kExp2[i]));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
  return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(p), _mm512_slli_epi32(_mm512_castps_si512(shifted), 23)));
}
[[maybe_unused]] inline __m512 silu_ps(__m512 x) {
  const __m512 t = _mm512_min_ps(_mm512_set1_ps(kExp2Hi), _mm512_mul_ps(x, _mm512_set1_ps(-kLog2e)));
  return _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1.0f), exp2_ps(t)));
}
#elif HEADRACE_LEVEL == 1
[[maybe_unused]] inline __m256 exp_ps(__m256 x) {
  x = _mm256_min_ps(x, _mm256_set1_ps(kExpHi));
  x = _mm256_max_ps(x, _mm256_set1_ps(kExpLo));
  const __m256 n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(kLog2e)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(kLn2Hi), x);
  r = _mm256_fnmadd_ps(n, _mm256_set1_ps(kLn2Lo), r);
  __m256 p = _mm256_set1_ps(kExp[0]);
  for (int i = 1; i < 6; i++) p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(kExp[i]));
  p = _mm256_add_ps(_mm256_fmadd_ps(p, _mm256_mul_ps(r, r), r), _mm256_set1_ps(1.0f));
  return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23)));
}
[[maybe_unused]] inline __m256 exp2_ps(__m256 t) {
  const __m256 magic = _mm256_set1_ps(kExp2Magic);
  t = _mm256_max_ps(_mm256_set1_ps(kExp2Lo), t);  // in this order NaN passes
  const __m256 shifted = _mm256_add_ps(t, magic), f = _mm256_sub_ps(t, _mm256_sub_ps(shifted, magic));
  __m256 p = _mm256_set1_ps(kExp2[0]);
#pragma GCC unroll 4
  for (int i = 1; i < 5; i++) p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(kExp2[i]));
  p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(1.0f));
  return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), _mm256_slli_epi32(_mm256_castps_si256(shifted), 23)));
}
[[maybe_unused]] inline __m256 silu_ps(__m256 x) {
  const __m256 t = _mm256_min_ps(_mm256_set1_ps(kExp2Hi), _mm256_mul_ps(x, _mm256_set1_ps(-kLog2e)));
  return _mm256_div_ps(x, _mm256_add_ps(_mm256_set1_ps(1.0f), exp2_ps(t)));
}
#endif

}  // namespace
}  // namespace HEADRACE_ISA
}  // namespace headrace
