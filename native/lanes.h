// Sixteen floats as one value at every level: one zmm, two ymm or an array. Every operation is one rounding (or none) a lane, so that code
// written over lanes gives the same bits everywhere. Masks are 16 bits, lane 0 lowest.
#pragma once
#include "simd.h"

namespace headrace {
namespace HEADRACE_ISA {
namespace {

constexpr int kLanes = 16;

#if HEADRACE_LEVEL >= 2
struct Lanes {
  __m512 v;
};
[[maybe_unused]] inline Lanes spread(float x) { return {_mm512_set1_ps(x)}; }
[[maybe_unused]] inline Lanes load_lanes(const float* p) { return {_mm512_loadu_ps(p)}; }
[[maybe_unused]] inline void store_lanes(float* p, Lanes a) { _mm512_storeu_ps(p, a.v); }
[[maybe_unused]] inline Lanes add(Lanes a, Lanes b) { return {_mm512_add_ps(a.v, b.v)}; }
[[maybe_unused]] inline Lanes sub(Lanes a, Lanes b) { return {_mm512_sub_ps(a.v, b.v)}; }
[[maybe_unused]] inline Lanes mul(Lanes a, Lanes b) { return {_mm512_mul_ps(a.v, b.v)}; }
[[maybe_unused]] inline Lanes max(Lanes a, Lanes b) { return {_mm512_max_ps(a.v, b.v)}; }
[[maybe_unused]] inline Lanes exp(Lanes a) { return {exp_ps(a.v)}; }
// Lanes where a >= b; not where either is NaN.
[[maybe_unused]] inline uint32_t at_least(Lanes a, Lanes b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ); }
// a where the bit is set, else b.
[[maybe_unused]] inline Lanes select(uint32_t mask, Lanes a, Lanes b) { return {_mm512_mask_mov_ps(b.v, static_cast<__mmask16>(mask), a.v)}; }
// a where x >= y, else zero.
[[maybe_unused]] inline Lanes where_at_least(Lanes x, Lanes y, Lanes a) {
  return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.v, y.v, _CMP_GE_OQ), a.v)};
}
// Lane l + lane l+8, +4, +2, +1.
[[maybe_unused]] inline float sum(Lanes a) {
  const __m256 t = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  __m128 u = _mm_add_ps(_mm256_castps256_ps128(t), _mm256_extractf128_ps(t, 1));
  u = _mm_add_ps(u, _mm_movehl_ps(u, u));
  return _mm_cvtss_f32(_mm_add_ss(u, _mm_movehdup_ps(u)));
}
#elif HEADRACE_LEVEL == 1
struct Lanes {
  __m256 v[2];
};
[[maybe_unused]] inline Lanes spread(float x) { return {{_mm256_set1_ps(x), _mm256_set1_ps(x)}}; }
[[maybe_unused]] inline Lanes load_lanes(const float* p) { return {{_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}}; }
[[maybe_unused]] inline void store_lanes(float* p, Lanes a) {
  _mm256_storeu_ps(p, a.v[0]);
  _mm256_storeu_ps(p + 8, a.v[1]);
}
[[maybe_unused]] inline Lanes add(Lanes a, Lanes b) { return {{_mm256_add_ps(a.v[0], b.v[0]), _mm256_add_ps(a.v[1], b.v[1])}}; }
[[maybe_unused]] inline Lanes sub(Lanes a, Lanes b) { return {{_mm256_sub_ps(a.v[0], b.v[0]), _mm256_sub_ps(a.v[1], b.v[1])}}; }
[[maybe_unused]] inline Lanes mul(Lanes a, Lanes b) { return {{_mm256_mul_ps(a.v[0], b.v[0]), _mm256_mul_ps(a.v[1], b.v[1])}}; }
[[maybe_unused]] inline Lanes max(Lanes a, Lanes b) { return {{_mm256_max_ps(a.v[0], b.v[0]), _mm256_max_ps(a.v[1], b.v[1])}}; }
[[maybe_unused]] inline Lanes exp(Lanes a) { return {{exp_ps(a.v[0]), exp_ps(a.v[1])}}; }
[[maybe_unused]] inline uint32_t at_least(Lanes a, Lanes b) {
  return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(a.v[0], b.v[0], _CMP_GE_OQ))) |
         static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(a.v[1], b.v[1], _CMP_GE_OQ))) << 8;
}
[[maybe_unused]] inline Lanes select(uint32_t mask, Lanes a, Lanes b) {
  const __m256i bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  Lanes r;
  for (int i = 0; i < 2; i++) {
    const __m256i set = _mm256_and_si256(_mm256_set1_epi32(static_cast<int>(mask >> (8 * i))), bit);
    r.v[i] = _mm256_blendv_ps(b.v[i], a.v[i], _mm256_castsi256_ps(_mm256_cmpeq_epi32(set, bit)));
  }
  return r;
}
[[maybe_unused]] inline Lanes where_at_least(Lanes x, Lanes y, Lanes a) {
  return {{_mm256_and_ps(_mm256_cmp_ps(x.v[0], y.v[0], _CMP_GE_OQ), a.v[0]), _mm256_and_ps(_mm256_cmp_ps(x.v[1], y.v[1], _CMP_GE_OQ), a.v[1])}};
}
[[maybe_unused]] inline float sum(Lanes a) {
  const __m256 t = _mm256_add_ps(a.v[0], a.v[1]);
  __m128 u = _mm_add_ps(_mm256_castps256_ps128(t), _mm256_extractf128_ps(t, 1));
  u = _mm_add_ps(u, _mm_movehl_ps(u, u));
  return _mm_cvtss_f32(_mm_add_ss(u, _mm_movehdup_ps(u)));
}
#else
struct Lanes {
  float v[kLanes];
};
[[maybe_unused]] inline Lanes spread(float x) {
  Lanes r;
  for (float& f : r.v) f = x;
  return r;
}
[[maybe_unused]] inline Lanes load_lanes(const float* p) {
  Lanes r;
  std::memcpy(r.v, p, sizeof(r.v));
  return r;
}
[[maybe_unused]] inline void store_lanes(float* p, Lanes a) { std::memcpy(p, a.v, sizeof(a.v)); }
[[maybe_unused]] inline Lanes add(Lanes a, Lanes b) {
  for (int i = 0; i < kLanes; i++) a.v[i] += b.v[i];
  return a;
}
[[maybe_unused]] inline Lanes sub(Lanes a, Lanes b) {
  for (int i = 0; i < kLanes; i++) a.v[i] -= b.v[i];
  return a;
}
[[maybe_unused]] inline Lanes mul(Lanes a, Lanes b) {
  for (int i = 0; i < kLanes; i++) a.v[i] *= b.v[i];
  return a;
}
[[maybe_unused]] inline Lanes max(Lanes a, Lanes b) {
  for (int i = 0; i < kLanes; i++) a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i];
  return a;
}
[[maybe_unused]] inline Lanes exp(Lanes a) {
  for (float& f : a.v) f = exp_f32(f);
  return a;
}
[[maybe_unused]] inline uint32_t at_least(Lanes a, Lanes b) {
  uint32_t mask = 0;
  for (int i = 0; i < kLanes; i++) mask |= static_cast<uint32_t>(a.v[i] >= b.v[i]) << i;
  return mask;
}
[[maybe_unused]] inline Lanes select(uint32_t mask, Lanes a, Lanes b) {
  for (int i = 0; i < kLanes; i++) a.v[i] = mask >> i & 1 ? a.v[i] : b.v[i];
  return a;
}
[[maybe_unused]] inline Lanes where_at_least(Lanes x, Lanes y, Lanes a) {
  for (int i = 0; i < kLanes; i++) a.v[i] = x.v[i] >= y.v[i] ? a.v[i] : 0.0f;
  return a;
}
[[maybe_unused]] inline float sum(Lanes a) {
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int l = 0; l < half; l++) a.v[l] += a.v[l + half];
  return a.v[0];
}
#endif

// The first `count` floats at p, `rest` in the other lanes; nothing past them is read.
[[maybe_unused]] inline Lanes load_lanes(const float* p, int64_t count, float rest) {
  if (count >= kLanes) return load_lanes(p);
#if HEADRACE_LEVEL >= 2
  return {_mm512_mask_loadu_ps(_mm512_set1_ps(rest), static_cast<__mmask16>((1u << count) - 1), p)};
#else
  float padded[kLanes];
  for (float& f : padded) f = rest;
  std::memcpy(padded, p, sizeof(float) * static_cast<size_t>(count));
  return load_lanes(padded);
#endif
}

}  // namespace
}  // namespace HEADRACE_ISA
}  // namespace headrace
