// A linear layer: dispatch on the weight format, and the epilogues every GEMM family ends in.
//
// Arithmetic, the same bits at every level:
//   store  t = y + bias (without a bias: y); out = t
//   add    t = y + bias;                     out = out + t
//   silu   g = gate + bias; u = up + bias;   h = (g / (1 + exp(-g))) * u, every operation rounded to fp32
//   h in groups of 32: m = max |h|, scale = m / 127, q = rint(h * (127 / m)), corr = -128 * sum(q), sum = scale * float(sum(q)).
// m is taken over the bits of |h| as integers, an order in which NaN beats every number: a NaN reaches `scale` and so the output instead of
// vanishing in a comparison. Below kTiny the inverse would overflow; such a group is written as zeros.
#include "linear.h"

namespace headrace {
namespace HEADRACE_ISA {
namespace {

constexpr float kTiny = 1e-30f;

// NaN compares false, so it takes the division and stays NaN.
inline float inverse_of(float absmax) { return absmax < kTiny ? 0.0f : 127.0f / absmax; }
inline float scale_of(float absmax) { return absmax < kTiny ? 0.0f : absmax / 127.0f; }

inline void write_group(const Activations& act, int64_t row, int64_t group, float scale, int32_t sum) {
  const int64_t at = row * act.ldg + group;
  act.scale[at] = scale;
  act.corr[at] = -128 * sum;
  act.sum[at] = scale * static_cast<float>(sum);
}

#if HEADRACE_LEVEL >= 2

struct Pair {
  __m512 lo, hi;
};

inline Pair biased(const float* tile, const Pair& bias, bool has_bias) {
  Pair y = {_mm512_load_ps(tile), _mm512_load_ps(tile + 16)};
  if (has_bias) y = {_mm512_add_ps(y.lo, bias.lo), _mm512_add_ps(y.hi, bias.hi)};
  return y;
}

inline Pair load_bias(const float* bias, __mmask16 lo, __mmask16 hi) {
  if (!bias) return {_mm512_setzero_ps(), _mm512_setzero_ps()};
  return {_mm512_maskz_loadu_ps(lo, bias), _mm512_maskz_loadu_ps(hi, bias + 16)};
}

// Round to nearest even as to_bf16 does, at every level: vcvtneps2bf16 would flush subnormals.
inline __m256i narrow(__m512 x) {
  const __m512i u = _mm512_castps_si512(x), one = _mm512_set1_epi32(1), odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), one);
  const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), odd), 16);
  const __m512i quiet = _mm512_or_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(0x40));
  return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), quiet));
}

#elif HEADRACE_LEVEL == 1

struct Row {
  __m256 v[4];
};

inline Row biased(const float* tile, const float* bias) {
  Row y;
  for (int i = 0; i < 4; i++) {
    y.v[i] = _mm256_load_ps(tile + 8 * i);
    if (bias) y.v[i] = _mm256_add_ps(y.v[i], _mm256_loadu_ps(bias + 8 * i));
  }
  return y;
}

inline __m128i narrow(__m256 x) {
  const __m256i u = _mm256_castps_si256(x), odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7fff)), odd), 16);
  const __m256i quiet = _mm256_or_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(0x40));
  const __m256i chosen = _mm256_blendv_epi8(rounded, quiet, _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
  return _mm_packus_epi32(_mm256_castsi256_si128(chosen), _mm256_extracti128_si256(chosen, 1));
}

#endif

#if HEADRACE_LEVEL < 2

// One row of `columns` < 32 (or any, where there are no vectors).
void finish_row(const Linear& a, float* out, const float* bias, const float* y, int columns) {
  for (int c = 0; c < columns; c++) {
    const float t = bias ? y[c] + bias[c] : y[c];
    out[c] = a.epilogue == Epilogue::add ? out[c] + t : t;
  }
}

#endif

}  // namespace

void linear(const Linear& a, int64_t begin, int64_t end, uint8_t* scratch) {
  if (a.format == Format::bf16) {
    linear_bf16(a, begin, end, scratch);
  } else {
    linear_int(a, begin, end, scratch);
  }
}

void finish_tile(const Linear& a, int64_t row, int rows, int64_t panel, const float* tile) {
  const int64_t first = panel * kPanel;
  const int columns = a.n - first < kPanel ? static_cast<int>(a.n - first) : kPanel;
  if (columns <= 0) return;
  float* out = a.out + row * a.ld_out + first;
  const float* bias = a.bias ? a.bias + first : nullptr;
#if HEADRACE_LEVEL >= 2
  const uint32_t mask = columns == kPanel ? 0xffffffffu : (1u << columns) - 1;
  const __mmask16 lo = static_cast<__mmask16>(mask), hi = static_cast<__mmask16>(mask >> 16);
  const Pair b = load_bias(bias, lo, hi);
  const bool add = a.epilogue == Epilogue::add;
  for (int r = 0; r < rows; r++, out += a.ld_out, tile += kPanel) {
    Pair y = biased(tile, b, bias != nullptr);
    if (add) y = {_mm512_add_ps(_mm512_maskz_loadu_ps(lo, out), y.lo), _mm512_add_ps(_mm512_maskz_loadu_ps(hi, out + 16), y.hi)};
    _mm512_mask_storeu_ps(out, lo, y.lo);
    _mm512_mask_storeu_ps(out + 16, hi, y.hi);
  }
#elif HEADRACE_LEVEL == 1
  for (int r = 0; r < rows; r++, out += a.ld_out, tile += kPanel) {
    if (columns < kPanel) {
      finish_row(a, out, bias, tile, columns);
      continue;
    }
    Row y = biased(tile, bias);
    for (int i = 0; i < 4; i++) {
      if (a.epilogue == Epilogue::add) y.v[i] = _mm256_add_ps(_mm256_loadu_ps(out + 8 * i), y.v[i]);
      _mm256_storeu_ps(out + 8 * i, y.v[i]);
    }
  }
#else
  for (int r = 0; r < rows; r++, out += a.ld_out, tile += kPanel) finish_row(a, out, bias, tile, columns);
#endif
}

void finish_pair(const Linear& a, int64_t row, int rows, int64_t pair, const float* gate, const float* up) {
  const Activations& act = a.act_out;
  const float* gate_bias = a.bias ? a.bias + pair * 2 * kPanel : nullptr;
  const float* up_bias = a.bias ? gate_bias + kPanel : nullptr;
#if HEADRACE_LEVEL >= 2
  const __mmask16 all = 0xffff;
  const Pair gb = load_bias(gate_bias, all, all), ub = load_bias(up_bias, all, all);
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
  for (int r = 0; r < rows; r++, row++, gate += kPanel, up += kPanel) {
    const Pair g = biased(gate, gb, a.bias != nullptr), u = biased(up, ub, a.bias != nullptr);
    const __m512 h0 = _mm512_mul_ps(silu_ps(g.lo), u.lo), h1 = _mm512_mul_ps(silu_ps(g.hi), u.hi);
    if (act.b) {
      bf16* out = act.b + row * act.ldb + pair * kPanel;
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), narrow(h0));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 16), narrow(h1));
    }
    if (act.q) {
      const __m512i m = _mm512_max_epu32(_mm512_and_si512(_mm512_castps_si512(h0), magnitude), _mm512_and_si512(_mm512_castps_si512(h1), magnitude));
      const float absmax = bits_to_float(_mm512_reduce_max_epu32(m));
      const __m512 inverse = _mm512_set1_ps(inverse_of(absmax));
      const __m512i q0 = _mm512_cvtps_epi32(_mm512_mul_ps(h0, inverse)), q1 = _mm512_cvtps_epi32(_mm512_mul_ps(h1, inverse));
      const __m128i n0 = _mm512_cvtsepi32_epi8(q0), n1 = _mm512_cvtsepi32_epi8(q1);
      __m128i* out = reinterpret_cast<__m128i*>(act.q + row * act.ldq + pair * kGroup);
      _mm_storeu_si128(out, n0);
      _mm_storeu_si128(out + 1, n1);
      const __m256i ones = _mm256_set1_epi8(1);  // sum the bytes as stored: they are saturated where h is not finite
      const __m256i quads = _mm256_dpbusd_epi32(_mm256_setzero_si256(), ones, _mm256_set_m128i(n1, n0));
      __m128i s = _mm_add_epi32(_mm256_castsi256_si128(quads), _mm256_extracti128_si256(quads, 1));
      s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
      s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1));
      write_group(act, row, pair, scale_of(absmax), _mm_cvtsi128_si32(s));
    }
  }
#elif HEADRACE_LEVEL == 1
  const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
  for (int r = 0; r < rows; r++, row++, gate += kPanel, up += kPanel) {
    const Row g = biased(gate, gate_bias), u = biased(up, up_bias);
    Row h;
    for (int i = 0; i < 4; i++) h.v[i] = _mm256_mul_ps(silu_ps(g.v[i]), u.v[i]);
    if (act.b) {
      __m128i* out = reinterpret_cast<__m128i*>(act.b + row * act.ldb + pair * kPanel);
      for (int i = 0; i < 4; i++) _mm_storeu_si128(out + i, narrow(h.v[i]));
    }
    if (act.q) {
      __m256i m = _mm256_setzero_si256();
      for (int i = 0; i < 4; i++) m = _mm256_max_epu32(m, _mm256_and_si256(_mm256_castps_si256(h.v[i]), magnitude));
      __m128i top = _mm_max_epu32(_mm256_castsi256_si128(m), _mm256_extracti128_si256(m, 1));
      top = _mm_max_epu32(top, _mm_shuffle_epi32(top, 0x4e));
      top = _mm_max_epu32(top, _mm_shuffle_epi32(top, 0xb1));
      const float absmax = bits_to_float(static_cast<uint32_t>(_mm_cvtsi128_si32(top)));
      const __m256 inverse = _mm256_set1_ps(inverse_of(absmax));
      __m128i words[4];  // eight columns as int16 each
      for (int i = 0; i < 4; i++) {
        const __m256i q = _mm256_cvtps_epi32(_mm256_mul_ps(h.v[i], inverse));
        words[i] = _mm_packs_epi32(_mm256_castsi256_si128(q), _mm256_extracti128_si256(q, 1));
      }
      const __m128i n0 = _mm_packs_epi16(words[0], words[1]), n1 = _mm_packs_epi16(words[2], words[3]);
      __m128i* out = reinterpret_cast<__m128i*>(act.q + row * act.ldq + pair * kGroup);
      _mm_storeu_si128(out, n0);
      _mm_storeu_si128(out + 1, n1);
      const __m128i ones = _mm_set1_epi8(1), pairs = _mm_add_epi16(_mm_maddubs_epi16(ones, n0), _mm_maddubs_epi16(ones, n1));
      __m128i s = _mm_madd_epi16(pairs, _mm_set1_epi16(1));
      s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
      s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1));
      write_group(act, row, pair, scale_of(absmax), _mm_cvtsi128_si32(s));
    }
  }
#else
  for (int r = 0; r < rows; r++, row++, gate += kPanel, up += kPanel) {
    float h[kGroup];
    uint32_t m = 0;
    for (int c = 0; c < kGroup; c++) {
      const float g = gate_bias ? gate[c] + gate_bias[c] : gate[c], u = up_bias ? up[c] + up_bias[c] : up[c];
      h[c] = silu_f32(g) * u;
      const uint32_t bits = float_to_bits(h[c]) & 0x7fffffffu;
      m = bits > m ? bits : m;
    }
    if (act.b)
      for (int c = 0; c < kGroup; c++) act.b[row * act.ldb + pair * kPanel + c] = to_bf16(h[c]);
    if (act.q) {
      const float absmax = bits_to_float(m), inverse = inverse_of(absmax);
      int32_t sum = 0;
      for (int c = 0; c < kGroup; c++) {
        const float x = __builtin_rintf(h[c] * inverse);
        const int32_t q = x >= -128.0f && x <= 127.0f ? static_cast<int32_t>(x) : -128;  // not finite: as the vector conversions give it
        act.q[row * act.ldq + pair * kGroup + c] = static_cast<int8_t>(q);
        sum += q;
      }
      write_group(act, row, pair, scale_of(absmax), sum);
    }
  }
#endif
}

}  // namespace HEADRACE_ISA
}  // namespace headrace
