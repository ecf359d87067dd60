// One group of 32 activations in registers, and the two forms a linear layer reads them in: int8 with a scale, and bf16.
// The same bits at every level; kernels.h says which.
#pragma once
#include "kernels.h"
#include "simd.h"

namespace headrace {
namespace HEADRACE_ISA {
namespace {

// Groups whose largest magnitude is below 1e-30 are zeros: 127 / absmax could overflow, absmax / 127 be subnormal.
constexpr uint32_t kTinyBits = 0x0da24260u;
constexpr uint32_t kInfBits = 0x7f800000u;

#if HEADRACE_LEVEL >= 2
struct Group {
  __m512 v[2];
};
[[maybe_unused]] inline Group load_group(const float* x) { return {{_mm512_loadu_ps(x), _mm512_loadu_ps(x + 16)}}; }
// The first `count` values, zeros after them; nothing past them is read.
[[maybe_unused]] inline Group load_group(const float* x, int count) {
  const uint32_t mask = count >= 32 ? ~0u : (1u << count) - 1;
  return {{_mm512_maskz_loadu_ps(static_cast<__mmask16>(mask), x), _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask >> 16), x + 16)}};
}
// (x * factor) * weight
[[maybe_unused]] inline Group normalize(const Group& x, float factor, const Group& weight) {
  const __m512 f = _mm512_set1_ps(factor);
  return {{_mm512_mul_ps(_mm512_mul_ps(x.v[0], f), weight.v[0]), _mm512_mul_ps(_mm512_mul_ps(x.v[1], f), weight.v[1])}};
}
inline uint32_t absmax_bits(const Group& x) {
  const __m512i sign = _mm512_set1_epi32(0x7fffffff);
  const __m512i a = _mm512_max_epu32(_mm512_and_si512(_mm512_castps_si512(x.v[0]), sign), _mm512_and_si512(_mm512_castps_si512(x.v[1]), sign));
  const __m256i b = _mm256_max_epu32(_mm512_castsi512_si256(a), _mm512_extracti64x4_epi64(a, 1));
  __m128i c = _mm_max_epu32(_mm256_castsi256_si128(b), _mm256_extracti128_si256(b, 1));
  c = _mm_max_epu32(c, _mm_shuffle_epi32(c, 0x4e));
  c = _mm_max_epu32(c, _mm_shuffle_epi32(c, 0xb1));
  return static_cast<uint32_t>(_mm_cvtsi128_si32(c));
}
inline __m256i to_int8(const Group& x, float inverse) {
  const __m512 f = _mm512_set1_ps(inverse);
  const __m128i lo = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(x.v[0], f)));
  const __m128i hi = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(x.v[1], f)));
  return _mm256_inserti128_si256(_mm256_castsi128_si256(lo), hi, 1);
}
[[maybe_unused]] inline void store_bf16(const Group& x, bf16* out) {
  // Not VCVTNEPS2BF16: it flushes subnormals, and the other levels do not.
  const __m512i one = _mm512_set1_epi32(1), half = _mm512_set1_epi32(0x7fff), quiet = _mm512_set1_epi32(0x400000);
  __m256i h[2];
  for (int i = 0; i < 2; i++) {
    const __m512i u = _mm512_castps_si512(x.v[i]);
    const __mmask16 nan = _mm512_cmp_ps_mask(x.v[i], x.v[i], _CMP_UNORD_Q);
    const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(u, half), _mm512_and_si512(_mm512_srli_epi32(u, 16), one));
    h[i] = _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_or_epi32(rounded, nan, u, quiet), 16));
  }
  _mm512_storeu_si512(out, _mm512_inserti64x4(_mm512_castsi256_si512(h[0]), h[1], 1));
}
#elif HEADRACE_LEVEL == 1
struct Group {
  __m256 v[4];
};
[[maybe_unused]] inline Group load_group(const float* x) {
  return {{_mm256_loadu_ps(x), _mm256_loadu_ps(x + 8), _mm256_loadu_ps(x + 16), _mm256_loadu_ps(x + 24)}};
}
[[maybe_unused]] inline Group load_group(const float* x, int count) {
  alignas(32) float padded[32] = {};
  std::memcpy(padded, x, sizeof(float) * static_cast<size_t>(count < 32 ? count : 32));
  return load_group(padded);
}
[[maybe_unused]] inline Group normalize(const Group& x, float factor, const Group& weight) {
  const __m256 f = _mm256_set1_ps(factor);
  Group y;
  for (int i = 0; i < 4; i++) y.v[i] = _mm256_mul_ps(_mm256_mul_ps(x.v[i], f), weight.v[i]);
  return y;
}
inline uint32_t absmax_bits(const Group& x) {
  const __m256i sign = _mm256_set1_epi32(0x7fffffff);
  __m256i a = _mm256_and_si256(_mm256_castps_si256(x.v[0]), sign);
  for (int i = 1; i < 4; i++) a = _mm256_max_epu32(a, _mm256_and_si256(_mm256_castps_si256(x.v[i]), sign));
  __m128i c = _mm_max_epu32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  c = _mm_max_epu32(c, _mm_shuffle_epi32(c, 0x4e));
  c = _mm_max_epu32(c, _mm_shuffle_epi32(c, 0xb1));
  return static_cast<uint32_t>(_mm_cvtsi128_si32(c));
}
inline __m256i to_int8(const Group& x, float inverse) {
  const __m256 f = _mm256_set1_ps(inverse);
  __m256i i[4];
  for (int j = 0; j < 4; j++) i[j] = _mm256_cvtps_epi32(_mm256_mul_ps(x.v[j], f));
  const __m256i packed = _mm256_packs_epi16(_mm256_packs_epi32(i[0], i[1]), _mm256_packs_epi32(i[2], i[3]));
  return _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}
[[maybe_unused]] inline void store_bf16(const Group& x, bf16* out) {
  const __m256i one = _mm256_set1_epi32(1), half = _mm256_set1_epi32(0x7fff), quiet = _mm256_set1_epi32(0x400000);
  __m256i h[4];
  for (int i = 0; i < 4; i++) {
    const __m256i u = _mm256_castps_si256(x.v[i]);
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x.v[i], x.v[i], _CMP_UNORD_Q));
    const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(u, half), _mm256_and_si256(_mm256_srli_epi32(u, 16), one));
    h[i] = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, _mm256_or_si256(u, quiet), nan), 16);
  }
  for (int i = 0; i < 2; i++) {
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(h[2 * i], h[2 * i + 1]), 0xd8);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 16 * i), packed);
  }
}
#else
struct Group {
  float v[32];
};
[[maybe_unused]] inline Group load_group(const float* x, int count = 32) {
  Group g = {};
  for (int i = 0; i < count && i < 32; i++) g.v[i] = x[i];
  return g;
}
[[maybe_unused]] inline Group normalize(const Group& x, float factor, const Group& weight) {
  Group y;
  for (int i = 0; i < 32; i++) y.v[i] = (x.v[i] * factor) * weight.v[i];
  return y;
}
inline uint32_t absmax_bits(const Group& x) {
  uint32_t most = 0;
  for (float f : x.v) {
    const uint32_t a = float_to_bits(f) & 0x7fffffffu;
    if (a > most) most = a;
  }
  return most;
}
[[maybe_unused]] inline void store_bf16(const Group& x, bf16* out) {
  for (int i = 0; i < 32; i++) out[i] = to_bf16(x.v[i]);
}
#endif

// A group with an Inf or a NaN gets q = 0 and that scale, so that every product with it is NaN and nothing hides it.
[[maybe_unused]] inline void store_quantized(const Group& x, int8_t* q, float* scale, int32_t* corr, float* sum) {
  const uint32_t bits = absmax_bits(x);
  if (bits - kTinyBits >= kInfBits - kTinyBits) {  // tiny (wraps around), Inf or NaN
    std::memset(q, 0, 32);
    const float s = bits < kTinyBits ? 0.0f : bits_to_float(bits);
    *scale = s;
    *corr = 0;
    *sum = s * 0.0f;
    return;
  }
  const float absmax = bits_to_float(bits), inverse = 127.0f / absmax, s = absmax / 127.0f;
#if HEADRACE_LEVEL >= 1
  const __m256i i = to_int8(x, inverse);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(q), i);
  // The bytes as unsigned q + 128, summed eight at a time.
  const __m256i eights = _mm256_sad_epu8(_mm256_xor_si256(i, _mm256_set1_epi8(-128)), _mm256_setzero_si256());
  const __m128i pairs = _mm_add_epi64(_mm256_castsi256_si128(eights), _mm256_extracti128_si256(eights, 1));
  const int32_t total = _mm_cvtsi128_si32(_mm_add_epi64(pairs, _mm_unpackhi_epi64(pairs, pairs))) - 32 * 128;
#else
  int32_t total = 0;
  for (int i = 0; i < 32; i++) {
    q[i] = static_cast<int8_t>(__builtin_rintf(x.v[i] * inverse));
    total += q[i];
  }
#endif
  *scale = s;
  *corr = -128 * total;
  *sum = s * static_cast<float>(total);
}

#if HEADRACE_LEVEL >= 1
inline __m128i max_quarters(const Group& x) {
#if HEADRACE_LEVEL >= 2
  const __m512i sign = _mm512_set1_epi32(0x7fffffff);
  const __m512i a = _mm512_max_epu32(_mm512_and_si512(_mm512_castps_si512(x.v[0]), sign), _mm512_and_si512(_mm512_castps_si512(x.v[1]), sign));
  const __m256i b = _mm256_max_epu32(_mm512_castsi512_si256(a), _mm512_extracti64x4_epi64(a, 1));
#else
  const __m256i sign = _mm256_set1_epi32(0x7fffffff);
  __m256i b = _mm256_and_si256(_mm256_castps_si256(x.v[0]), sign);
  for (int i = 1; i < 4; i++) b = _mm256_max_epu32(b, _mm256_and_si256(_mm256_castps_si256(x.v[i]), sign));
#endif
  return _mm_max_epu32(_mm256_castsi256_si128(b), _mm256_extracti128_si256(b, 1));
}

// Up to four groups, as store_quantized does one: a lane each for the divisions and the sums, which is what a single group waits for. Group j goes
// q_step * j and step * j elements further.
template <int n>
inline void store_quantized_lanes(const Group (&x)[n], int8_t* q, int64_t q_step, float* scale, int32_t* corr, float* sum, int64_t step) {
  __m128i m[4];
#pragma GCC unroll 4
  for (int j = 0; j < 4; j++) m[j] = j < n ? max_quarters(x[j < n ? j : 0]) : m[0];
  const __m128i a = _mm_max_epu32(_mm_unpacklo_epi32(m[0], m[1]), _mm_unpackhi_epi32(m[0], m[1]));
  const __m128i b = _mm_max_epu32(_mm_unpacklo_epi32(m[2], m[3]), _mm_unpackhi_epi32(m[2], m[3]));
  const __m128i bits = _mm_max_epu32(_mm_unpacklo_epi64(a, b), _mm_unpackhi_epi64(a, b));
  const __m128i above = _mm_sub_epi32(bits, _mm_set1_epi32(kTinyBits)), most = _mm_set1_epi32(kInfBits - kTinyBits - 1);
  if (_mm_movemask_epi8(_mm_cmpeq_epi32(_mm_min_epu32(above, most), above)) != 0xffff) {  // a group that is tiny, Inf or NaN
    for (int j = 0; j < n; j++) store_quantized(x[j], q + j * q_step, scale + j * step, corr + j * step, sum + j * step);
    return;
  }
  const __m128 absmax = _mm_castsi128_ps(bits), s = _mm_div_ps(absmax, _mm_set1_ps(127.0f));
  alignas(16) float inverse[4];
  _mm_store_ps(inverse, _mm_div_ps(_mm_set1_ps(127.0f), absmax));
  __m128i pairs[4];
#pragma GCC unroll 4
  for (int j = 0; j < n; j++) {
    const __m256i i = to_int8(x[j], inverse[j]);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(q + j * q_step), i);
    const __m256i eights = _mm256_sad_epu8(_mm256_xor_si256(i, _mm256_set1_epi8(-128)), _mm256_setzero_si256());
    pairs[j] = _mm_add_epi32(_mm256_castsi256_si128(eights), _mm256_extracti128_si256(eights, 1));
  }
#pragma GCC unroll 4
  for (int j = n; j < 4; j++) pairs[j] = pairs[0];
  const auto low_halves = [](__m128i u, __m128i v) { return _mm_castps_si128(_mm_shuffle_ps(_mm_castsi128_ps(u), _mm_castsi128_ps(v), 0x88)); };
  const __m128i both = _mm_hadd_epi32(low_halves(pairs[0], pairs[1]), low_halves(pairs[2], pairs[3]));
  const __m128i total = _mm_sub_epi32(both, _mm_set1_epi32(32 * 128));
  const __m128i c = _mm_sub_epi32(_mm_setzero_si128(), _mm_slli_epi32(total, 7));
  const __m128 t = _mm_mul_ps(s, _mm_cvtepi32_ps(total));
  if (n == 4 && step == 1) {
    _mm_storeu_ps(scale, s);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(corr), c);
    _mm_storeu_ps(sum, t);
    return;
  }
  alignas(16) float lanes[3][4];
  _mm_store_ps(lanes[0], s);
  _mm_store_si128(reinterpret_cast<__m128i*>(lanes[1]), c);
  _mm_store_ps(lanes[2], t);
  for (int j = 0; j < n; j++) {
    scale[j * step] = lanes[0][j];
    std::memcpy(corr + j * step, &lanes[1][j], 4);
    sum[j * step] = lanes[2][j];
  }
}
#endif

// Group `group` of row `row` of `act`: whichever of q and b is not null.
[[maybe_unused]] inline void store_group(const Activations& act, int64_t row, int64_t group, const Group& x) {
  if (act.q) {
    const int64_t at = row * act.ldg + group;
    store_quantized(x, act.q + row * act.ldq + 32 * group, act.scale + at, act.corr + at, act.sum + at);
  }
  if (act.b) store_bf16(x, act.b + row * act.ldb + 32 * group);
}

// Group `group` of rows [row, row + n).
template <int n>
[[maybe_unused]] inline void store_rows(const Activations& act, int64_t row, int64_t group, const Group (&x)[n]) {
#if HEADRACE_LEVEL >= 1
  const int64_t at = row * act.ldg + group;
  if (act.q) store_quantized_lanes(x, act.q + row * act.ldq + 32 * group, act.ldq, act.scale + at, act.corr + at, act.sum + at, act.ldg);
  for (int j = 0; act.b && j < n; j++) store_bf16(x[j], act.b + (row + j) * act.ldb + 32 * group);
#else
  for (int j = 0; j < n; j++) store_group(act, row + j, group, x[j]);
#endif
}

// Groups [0, groups) of a row, made by group(g).
template <typename Make>
inline void store_groups(const Activations& act, int64_t row, int64_t groups, const Make& group) {
  int64_t g = 0;
#if HEADRACE_LEVEL >= 1
  for (; act.q && g + 4 <= groups; g += 4) {
    const int64_t at = row * act.ldg + g;
    const Group x[4] = {group(g), group(g + 1), group(g + 2), group(g + 3)};
    store_quantized_lanes(x, act.q + row * act.ldq + 32 * g, 32, act.scale + at, act.corr + at, act.sum + at, 1);
    for (int j = 0; act.b && j < 4; j++) store_bf16(x[j], act.b + row * act.ldb + 32 * (g + j));
  }
#endif
  for (; g < groups; g++) store_group(act, row, g, group(g));
}

}  // namespace
}  // namespace HEADRACE_ISA
}  // namespace headrace
