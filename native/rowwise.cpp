// Kernels over one row at a time: quantize, RMSNorm and the embedding lookup. The same bits at every level.
#include "quantize.h"

namespace headrace {
namespace HEADRACE_ISA {
namespace {

// Sum of squares in 64 lanes (element i in lane i mod 64, fma ascending), then lane l + lane l+32, +16, +8, +4, +2, +1.
// Four vectors of 16, because one chain of fmas would wait four cycles for each 16 elements.
#if HEADRACE_LEVEL >= 2
inline float sum_of_squares(const float* x, int64_t k) {
  __m512 a[4] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps()};
  int64_t i = 0;
  for (; i + 64 <= k; i += 64)
    for (int j = 0; j < 4; j++) {
      const __m512 v = _mm512_loadu_ps(x + i + 16 * j);
      a[j] = _mm512_fmadd_ps(v, v, a[j]);
    }
  for (int j = 0; j < 4 && i < k; j++, i += 16) {
    const __m512 v = _mm512_maskz_loadu_ps(static_cast<__mmask16>(k - i >= 16 ? 0xffff : (1u << (k - i)) - 1), x + i);
    a[j] = _mm512_fmadd_ps(v, v, a[j]);
  }
  const __m512 s = _mm512_add_ps(_mm512_add_ps(a[0], a[2]), _mm512_add_ps(a[1], a[3]));
  const __m256 t = _mm256_add_ps(_mm512_castps512_ps256(s), _mm512_extractf32x8_ps(s, 1));
  __m128 u = _mm_add_ps(_mm256_castps256_ps128(t), _mm256_extractf128_ps(t, 1));
  u = _mm_add_ps(u, _mm_movehl_ps(u, u));
  return _mm_cvtss_f32(_mm_add_ss(u, _mm_movehdup_ps(u)));
}
#elif HEADRACE_LEVEL == 1
inline float sum_of_squares(const float* x, int64_t k) {
  __m256 a[8];
  for (__m256& v : a) v = _mm256_setzero_ps();
  int64_t i = 0;
  for (; i + 64 <= k; i += 64)
    for (int j = 0; j < 8; j++) {
      const __m256 v = _mm256_loadu_ps(x + i + 8 * j);
      a[j] = _mm256_fmadd_ps(v, v, a[j]);
    }
  if (i < k) {
    alignas(32) float rest[64] = {};
    std::memcpy(rest, x + i, sizeof(float) * static_cast<size_t>(k - i));
    for (int j = 0; j < 8; j++) {
      const __m256 v = _mm256_load_ps(rest + 8 * j);
      a[j] = _mm256_fmadd_ps(v, v, a[j]);
    }
  }
  for (int j = 0; j < 4; j++) a[j] = _mm256_add_ps(a[j], a[j + 4]);
  const __m256 t = _mm256_add_ps(_mm256_add_ps(a[0], a[2]), _mm256_add_ps(a[1], a[3]));
  __m128 u = _mm_add_ps(_mm256_castps256_ps128(t), _mm256_extractf128_ps(t, 1));
  u = _mm_add_ps(u, _mm_movehl_ps(u, u));
  return _mm_cvtss_f32(_mm_add_ss(u, _mm_movehdup_ps(u)));
}
#else
inline float sum_of_squares(const float* x, int64_t k) {
  float lane[64] = {};
  for (int64_t i = 0; i < k; i++) lane[i % 64] = __builtin_fmaf(x[i], x[i], lane[i % 64]);
  for (int half = 32; half > 0; half /= 2)
    for (int l = 0; l < half; l++) lane[l] += lane[l + half];
  return lane[0];
}
#endif

inline uint32_t load_u32(const uint8_t* p) {
  uint32_t u;
  std::memcpy(&u, p, 4);
  return u;
}

inline float load_fp16(const uint8_t* p) {
  uint16_t h;
  std::memcpy(&h, p, 2);
  return from_fp16(h);
}

// The 32 values of column `column` in one packed group.
template <Format F>
inline void decode(const uint8_t* record, int column, float* w) {
  if constexpr (F == Format::bf16) {
    for (int pair = 0; pair < 16; pair++) {
      const uint32_t u = load_u32(record + 128 * pair + 4 * column);
      w[2 * pair] = bits_to_float(u << 16);
      w[2 * pair + 1] = bits_to_float(u & 0xffff0000u);
    }
  } else {
    alignas(32) uint8_t u[32];
    const uint8_t* body = record + (F == Format::q4_1 ? 128 : 64) + 4 * column;
    if constexpr (F == Format::q8_0) {
      for (int j = 0; j < 8; j++) std::memcpy(u + 4 * j, body + 128 * j, 4);
    } else {
      for (int j = 0; j < 4; j++) {
        const uint32_t v = load_u32(body + 128 * j), lo = v & 0x0f0f0f0fu, hi = (v >> 4) & 0x0f0f0f0fu;
        std::memcpy(u + 8 * j, &lo, 4);
        std::memcpy(u + 8 * j + 4, &hi, 4);
      }
    }
    const float scale = load_fp16(record + 2 * column);
    if constexpr (F == Format::q4_1) {
      const float min = load_fp16(record + 64 + 2 * column);
      for (int i = 0; i < 32; i++) w[i] = scale * static_cast<float>(u[i]) + min;  // the product is exact: 11 + 4 bits
    } else {
      for (int i = 0; i < 32; i++) w[i] = scale * static_cast<float>(u[i] - (F == Format::q8_0 ? 128 : 8));
    }
  }
}

template <Format F>
void embed_row(const uint8_t* weight, int64_t k, int64_t id, float scale, float* out) {
  const int64_t groups = (k + kGroup - 1) / kGroup;
  const uint8_t* record = weight + static_cast<size_t>(id / kPanel) * static_cast<size_t>(groups) * group_bytes(F);
  const int column = static_cast<int>(id % kPanel);
  for (int64_t g = 0; g < groups; g++, record += group_bytes(F)) {
    alignas(64) float w[32];
    decode<F>(record, column, w);
    const int64_t count = k - kGroup * g < kGroup ? k - kGroup * g : kGroup;
    if (count == kGroup) {
      for (int i = 0; i < kGroup; i++) out[kGroup * g + i] = w[i] * scale;
    } else {
      for (int64_t i = 0; i < count; i++) out[kGroup * g + i] = w[i] * scale;
    }
  }
}

}  // namespace

void quantize(const float* x, int64_t ld, int64_t k, int64_t begin, int64_t end, const Activations& out) {
  const Activations act = out;  // a copy that no store can reach: its fields stay in registers
  const int64_t full = k / kGroup;
  const int rest = static_cast<int>(k % kGroup);
  for (int64_t row = begin; row < end; row++) {
    const float* p = x + row * ld;
    store_groups(act, row, full, [&](int64_t g) { return load_group(p + kGroup * g); });
    if (rest) store_group(act, row, full, load_group(p + kGroup * full, rest));
  }
}

void rms_norm(const float* x, int64_t ld, int64_t k, const float* weight, float eps, int64_t begin, int64_t end, const Activations& out) {
  const Activations act = out;
  const int64_t full = k / kGroup;
  const int rest = static_cast<int>(k % kGroup);
  for (int64_t row = begin; row < end; row++) {
    const float* p = x + row * ld;
    const float factor = 1.0f / __builtin_sqrtf(sum_of_squares(p, k) / static_cast<float>(k) + eps);
    store_groups(act, row, full, [&](int64_t g) { return normalize(load_group(p + kGroup * g), factor, load_group(weight + kGroup * g)); });
    if (rest) store_group(act, row, full, normalize(load_group(p + kGroup * full, rest), factor, load_group(weight + kGroup * full, rest)));
  }
}

void embed(Format format, const uint8_t* weight, int64_t k, int64_t id, float scale, float* out) {
  switch (format) {
    case Format::q4_0:
      return embed_row<Format::q4_0>(weight, k, id, scale, out);
    case Format::q4_1:
      return embed_row<Format::q4_1>(weight, k, id, scale, out);
    case Format::q8_0:
      return embed_row<Format::q8_0>(weight, k, id, scale, out);
    case Format::bf16:
      return embed_row<Format::bf16>(weight, k, id, scale, out);
  }
}

}  // namespace HEADRACE_ISA
}  // namespace headrace
