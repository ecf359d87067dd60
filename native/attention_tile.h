// The arithmetic of attention on one tile: up to 6 (query, head) rows against one KV chunk of 64 tokens. Included by attention.cpp, once per level.
//
// Canonical, per (row, chunk), whatever the tile, the split of the prompt or the thread:
//   S[t]  = q . k[t]                 one accumulator, d ascending (level 3: VDPBF16PS on pairs of d; else fma, fp32)
//   m     = max S                    over the visible tokens [lo, hi) of the chunk
//   p[t]  = exp((S[t] - m) * scale)  exactly 0 where invisible
//   l     = sum p                    lane j: (p[j] + p[16+j]) + (p[32+j] + p[48+j]); then lanes j + (j+8), j + (j+4), j + (j+2), j + (j+1)
//   P[t]  = bf16(p[t])
//   O[d]  = sum P[t] v[t][d]         from zero, token pairs [lo/2, ceil(hi/2)) ascending, the invisible half of a pair zeroed
// Nothing of an invisible token enters, so what lies beyond the tokens written may be anything. Levels 0, 1 and 2 give the same bits.
#pragma once
#include "kernels.h"
#include "simd.h"

namespace headrace {
namespace HEADRACE_ISA {
namespace {

constexpr int kTileRows = 6;  // 6 rows x 64 columns are 24 of the 32 zmm registers
constexpr float kMinusInf = -__builtin_inff();

// One KV chunk of one head: K and V of its two blocks. A block without a visible token is never read: its pointers are the other's.
struct ChunkView {
  const bf16* k[2];
  const bf16* v[2];
  const bf16* next_k[2];  // of the chunk to prefetch, or null
  const bf16* next_v[2];
};

// Token ranges [lo, hi) each row sees of the chunk, and what they have in common.
struct Visible {
  int lo[kTileRows], hi[kTileRows];
  int lo_min, lo_max, hi_min, hi_max;  // over all rows
  bool empty(int r) const { return lo[r] >= hi[r]; }
};

// Where O goes. merge: o = fma(O_c, beta, o * alpha). Else o = O_c.
struct Output {
  float* o;
  int64_t stride;  // floats from row to row
  const float *alpha, *beta;
  bool merge;
};

// What a tile works in, in the L1 cache.
#if HEADRACE_LEVEL == 3
using Word = uint32_t;       // two bf16: operand A of VDPBF16PS
constexpr int kPerPair = 1;  // words an operand has for a pair
#else
using Word = float;
constexpr int kPerPair = 2;
#endif
struct alignas(64) TileScratch {
  float s[kTileRows][kKvChunk];
  Word p[kTileRows][kKvChunk / 2 * kPerPair];
  float m[16], l[16];  // of the chunk, by row
  float exponent[16];  // rows' alpha, then (from 8) beta
};

inline const uint32_t* words(const bf16* p) { return reinterpret_cast<const uint32_t*>(p); }

// Query words of a tile, [pair][row] (levels 0 to 2: [d][row], widened), so that a row is at a constant offset.
template <int R>
void pack_queries(Word* out, const bf16* const* rows, int head_dim) {
  for (int d = 0; d < head_dim; d += 2)
    for (int r = 0; r < R; r++) {
#if HEADRACE_LEVEL == 3
      uint32_t w;
      std::memcpy(&w, rows[r] + d, 4);
      out[d / 2 * R + r] = w;
#else
      out[d * R + r] = from_bf16(rows[r][d]);
      out[(d + 1) * R + r] = from_bf16(rows[r][d + 1]);
#endif
    }
}

#if HEADRACE_LEVEL == 0

template <int R>
void scores(TileScratch& w, const Word* q, const ChunkView& c, int head_dim, float scale, const Visible& see) {
  for (int r = 0; r < R; r++) {
    float* s = w.s[r];
    w.m[r] = kMinusInf;
    for (int t = see.lo[r]; t < see.hi[r]; t++) {
      const bf16* k = c.k[t / kBlock] + t % kBlock * 2;
      float sum = 0;
      for (int d = 0; d < head_dim; d++) sum = __builtin_fmaf(q[d * R + r], from_bf16(k[d / 2 * 2 * kBlock + d % 2]), sum);
      s[t] = sum;
      if (sum > w.m[r]) w.m[r] = sum;
    }
    float lane[16];
    for (int t = 0; t < kKvChunk; t++) {
      s[t] = t >= see.lo[r] && t < see.hi[r] ? exp_f32((s[t] - w.m[r]) * scale) : 0.0f;
      w.p[r][t] = from_bf16(to_bf16(s[t]));
    }
    for (int j = 0; j < 16; j++) lane[j] = (s[j] + s[16 + j]) + (s[32 + j] + s[48 + j]);
    for (int half = 8; half; half /= 2)
      for (int j = 0; j < half; j++) lane[j] += lane[j + half];
    w.l[r] = lane[0];
  }
}

template <int R>
void values(const TileScratch& w, const ChunkView& c, int head_dim, const Visible& see, const Output& out) {
  for (int r = 0; r < R; r++) {
    if (see.empty(r)) continue;
    for (int d = 0; d < head_dim; d++) {
      float sum = 0;
      for (int t = see.lo[r] & ~1; t < ((see.hi[r] + 1) & ~1); t++) {
        const bf16* v = c.v[t / kBlock] + (t % kBlock / 2 * head_dim + d) * 2 + t % 2;
        sum = __builtin_fmaf(w.p[r][t], t >= see.lo[r] && t < see.hi[r] ? from_bf16(*v) : 0.0f, sum);
      }
      float& o = out.o[r * out.stride + d];
      o = out.merge ? __builtin_fmaf(sum, out.beta[r], o * out.alpha[r]) : sum;
    }
  }
}

inline void exp16(float* x) {
  for (int i = 0; i < 16; i++) x[i] = exp_f32(x[i]);
}

#else

#if HEADRACE_LEVEL >= 2
using Vec = __m512;
using Ints = __m512i;
constexpr int kLanes = 16, kCols = 4;  // register tile: 6 rows x 4 vectors
inline Vec zero() { return _mm512_setzero_ps(); }
inline Vec broadcast(float x) { return _mm512_set1_ps(x); }
inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Vec x) { _mm512_storeu_ps(p, x); }
inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline Ints load_words(const uint32_t* p) { return _mm512_loadu_si512(p); }
inline Ints and_words(Ints x, uint32_t mask) { return _mm512_and_si512(x, _mm512_set1_epi32(static_cast<int>(mask))); }
// `x` where the token (lane + first) is in [lo, hi), else `other`.
inline Vec select(Vec x, Vec other, int first, int lo, int hi) {
  const uint64_t bits = (hi >= 64 ? ~uint64_t{0} : (uint64_t{1} << hi) - 1) & ~((uint64_t{1} << lo) - 1);
  return _mm512_mask_blend_ps(static_cast<__mmask16>(lo < hi ? bits >> first : 0), other, x);
}
inline float hmax(Vec x) { return _mm512_reduce_max_ps(x); }
// The fixed tree over 16 lanes.
inline float hsum(Vec x) {
  const __m256 a = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
  const __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  const __m128 c = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(c, _mm_movehdup_ps(c)));
}
#else
using Vec = __m256;
using Ints = __m256i;
constexpr int kLanes = 8, kCols = 2;  // 6 rows x 2 vectors: 12 of 16 ymm
inline Vec zero() { return _mm256_setzero_ps(); }
inline Vec broadcast(float x) { return _mm256_set1_ps(x); }
inline Vec load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, Vec x) { _mm256_storeu_ps(p, x); }
inline Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
inline Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
inline Ints load_words(const uint32_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline Ints and_words(Ints x, uint32_t mask) { return _mm256_and_si256(x, _mm256_set1_epi32(static_cast<int>(mask))); }
inline Vec select(Vec x, Vec other, int first, int lo, int hi) {
  const __m256i token = _mm256_add_epi32(_mm256_set1_epi32(first), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  const __m256i in = _mm256_and_si256(_mm256_cmpgt_epi32(token, _mm256_set1_epi32(lo - 1)), _mm256_cmpgt_epi32(_mm256_set1_epi32(hi), token));
  return _mm256_blendv_ps(other, x, _mm256_castsi256_ps(in));
}
inline float hsum8(Vec x) {
  const __m128 b = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  const __m128 c = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(c, _mm_movehdup_ps(c)));
}
inline float hmax(Vec x) {
  const __m128 b = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  const __m128 c = _mm_max_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_max_ss(c, _mm_movehdup_ps(c)));
}
#endif

// acc += one pair of the inner dimension: a holds the pair's words of each row (AR words from row to row, AK from word to word).
template <int R, int C, int AR, int AK>
inline __attribute__((always_inline)) void step(Vec (&acc)[R][C], const Word* a, const Ints (&b)[C]) {
#if HEADRACE_LEVEL == 3
#pragma GCC unroll 6
  for (int r = 0; r < R; r++) {
    const __m512bh pair = reinterpret_cast<__m512bh>(_mm512_set1_epi32(static_cast<int>(a[r * AR])));
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) acc[r][c] = _mm512_dpbf16_ps(acc[r][c], pair, reinterpret_cast<__m512bh>(b[c]));
  }
#else
  Vec wide[C];
#pragma GCC unroll 4
  for (int c = 0; c < C; c++)
#if HEADRACE_LEVEL == 2
    wide[c] = _mm512_castsi512_ps(_mm512_slli_epi32(b[c], 16));
#else
    wide[c] = _mm256_castsi256_ps(_mm256_slli_epi32(b[c], 16));
#endif
#pragma GCC unroll 6
  for (int r = 0; r < R; r++) {
    const Vec even = broadcast(a[r * AR]);
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) acc[r][c] = fma(even, wide[c], acc[r][c]);
  }
#pragma GCC unroll 4
  for (int c = 0; c < C; c++)
#if HEADRACE_LEVEL == 2
    wide[c] = _mm512_castsi512_ps(and_words(b[c], 0xffff0000u));
#else
    wide[c] = _mm256_castsi256_ps(and_words(b[c], 0xffff0000u));
#endif
#pragma GCC unroll 6
  for (int r = 0; r < R; r++) {
    const Vec odd = broadcast(a[r * AR + AK]);
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) acc[r][c] = fma(odd, wide[c], acc[r][c]);
  }
#endif
}

// acc += `pairs` pairs ascending. Columns lie at b0 and, from the 33rd, at b1; ldb words from pair to pair. The same places of n0, n1 are prefetched.
template <int R, int C, int AR, int AK>
inline __attribute__((always_inline)) void multiply(Vec (&acc)[R][C], const Word* a, const uint32_t* b0, const uint32_t* b1, int64_t ldb, int pairs,
                                                    const uint32_t* n0, const uint32_t* n1) {
  constexpr int kSplit = 32 / kLanes;
  for (int i = 0; i < pairs; i++) {
    Ints b[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) b[c] = load_words(c < kSplit ? b0 + c * kLanes : b1 + (c - kSplit) * kLanes);
    step<R, C, AR, AK>(acc, a, b);
    if (n0) {
#pragma GCC unroll 4
      for (int c = 0; c < C; c += 16 / kLanes) __builtin_prefetch(c < kSplit ? n0 + c * kLanes : n1 + (c - kSplit) * kLanes);
      n0 += ldb;
      n1 += ldb;
    }
    a += AK * kPerPair;
    b0 += ldb;
    b1 += ldb;
  }
}

template <int R, int C>
void score_columns(TileScratch& w, int first, const Word* q, const uint32_t* k0, const uint32_t* k1, int head_dim, const uint32_t* n0,
                   const uint32_t* n1) {
  Vec acc[R][C];
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) acc[r][c] = zero();
  multiply<R, C, 1, R>(acc, q, k0, k1, kBlock, head_dim / 2, n0, n1);
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) store(w.s[r] + first + c * kLanes, acc[r][c]);
}

// p, m, l of one row from its scores; only the first `cols` 16-token columns can be visible.
template <bool Edge>
inline void softmax_row(TileScratch& w, int r, int cols, float scale, int lo, int hi) {
  constexpr int kVecs = kKvChunk / kLanes;
  Vec p[kVecs];
  Vec top = broadcast(kMinusInf);
  const int vecs = Edge ? cols * (16 / kLanes) : kVecs;
#pragma GCC unroll 8
  for (int i = 0; i < kVecs; i++) {
    p[i] = i < vecs ? load(w.s[r] + i * kLanes) : zero();
    if (Edge) p[i] = select(p[i], broadcast(kMinusInf), i * kLanes, lo, hi);
    top = max(top, p[i]);
  }
  const float m = hmax(top);
  const Vec vm = broadcast(m), vscale = broadcast(scale);
#pragma GCC unroll 8
  for (int i = 0; i < kVecs; i++) {
    if (Edge && i >= vecs) {
      p[i] = zero();
      continue;
    }
    p[i] = exp_ps(mul(sub(p[i], vm), vscale));
    if (Edge) p[i] = select(p[i], zero(), i * kLanes, lo, hi);
  }
  w.m[r] = m;
#if HEADRACE_LEVEL >= 2
  w.l[r] = hsum(add(add(p[0], p[1]), add(p[2], p[3])));
#else
  const Vec low = add(add(p[0], p[2]), add(p[4], p[6])), high = add(add(p[1], p[3]), add(p[5], p[7]));
  w.l[r] = hsum8(add(low, high));
#endif
#if HEADRACE_LEVEL == 3
#pragma GCC unroll 2
  for (int i = 0; i < 2; i++)
    _mm512_storeu_si512(w.p[r] + i * 16,
                        reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(p[2 * i + 1], p[2 * i])));  // p is 0 or normal: nothing is flushed
#elif HEADRACE_LEVEL == 2
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    const __m512i u = _mm512_castps_si512(p[i]);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    store(w.p[r] + i * 16, _mm512_castsi512_ps(and_words(_mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 0xffff0000u)));
  }
#else
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) {
    const __m256i u = _mm256_castps_si256(p[i]);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    store(w.p[r] + i * 8, _mm256_castsi256_ps(and_words(_mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 0xffff0000u)));
  }
#endif
}

template <int R>
void scores(TileScratch& w, const Word* q, const ChunkView& c, int head_dim, float scale, const Visible& see) {
  const uint32_t *k0 = words(c.k[0]), *k1 = words(c.k[1]), *n0 = words(c.next_k[0]), *n1 = words(c.next_k[1]);
  const int cols = (see.hi_max + 15) / 16;
#if HEADRACE_LEVEL >= 2
  switch (cols) {
    case 1:
      score_columns<R, 1>(w, 0, q, k0, k1, head_dim, n0, n1);
      break;
    case 2:
      score_columns<R, 2>(w, 0, q, k0, k1, head_dim, n0, n1);
      break;
    case 3:
      score_columns<R, 3>(w, 0, q, k0, k1, head_dim, n0, n1);
      break;
    default:
      score_columns<R, 4>(w, 0, q, k0, k1, head_dim, n0, n1);
  }
#else
  for (int i = 0; i < cols; i++) {
    const uint32_t* n = i < 2 ? n0 : n1;
    score_columns<R, 2>(w, i * 16, q, (i < 2 ? k0 : k1) + i % 2 * 16, nullptr, head_dim, n ? n + i % 2 * 16 : nullptr, nullptr);
  }
#endif
  if (see.lo_max == 0 && see.hi_min == kKvChunk)
    for (int r = 0; r < R; r++) softmax_row<false>(w, r, 4, scale, 0, kKvChunk);
  else
    for (int r = 0; r < R; r++) softmax_row<true>(w, r, cols, scale, see.lo[r], see.hi[r]);
}

// Columns [d, d + C * kLanes) of O.
template <int R, int C>
void value_columns(const TileScratch& w, const ChunkView& chunk, int head_dim, int d, const Visible& see, const Output& out) {
  constexpr int kRow = kKvChunk / 2 * kPerPair;
  Vec acc[R][C];
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) acc[r][c] = zero();
  // Pairs [begin, full) and [full_end, end) are at the edge of some row: each row takes its own, masked. Between them all rows see all.
  const int begin = see.lo_min / 2, end = (see.hi_max + 1) / 2;
  int full = (see.lo_max + 1) / 2, full_end = see.hi_min / 2;
  if (full > full_end) full = full_end = end;
  const auto edge = [&](int from, int to) __attribute__((always_inline)) {
    for (int i = from; i < to; i++) {
      const uint32_t* v = words(chunk.v[i / 16]) + static_cast<int64_t>(i % 16) * head_dim + d;
#pragma GCC unroll 6
      for (int r = 0; r < R; r++) {
        const bool even = 2 * i >= see.lo[r] && 2 * i < see.hi[r], odd = 2 * i + 1 >= see.lo[r] && 2 * i + 1 < see.hi[r];
        if (!even && !odd) continue;
        const uint32_t mask = (even ? 0xffffu : 0u) | (odd ? 0xffff0000u : 0u);
        Ints b[C];
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) b[c] = and_words(load_words(v + c * kLanes), mask);
        Vec(&row)[1][C] = reinterpret_cast<Vec(&)[1][C]>(acc[r]);
        step<1, C, kRow, 1>(row, w.p[r] + i * kPerPair, b);
      }
    }
  };
  edge(begin, full);
  for (int block = 0; block < 2; block++) {
    const int from = full > block * 16 ? full - block * 16 : 0, to = full_end < block * 16 + 16 ? full_end - block * 16 : 16;
    if (from >= to) continue;
    const int64_t at = static_cast<int64_t>(from) * head_dim + d;
    const uint32_t* v = words(chunk.v[block]) + at;
    const uint32_t* n = chunk.next_v[block] ? words(chunk.next_v[block]) + at : nullptr;
    multiply<R, C, kRow, 1>(acc, w.p[0] + (block * 16 + from) * kPerPair, v, v + 32, head_dim, to - from, n, n + 32);
  }
  edge(full_end, end);
  for (int r = 0; r < R; r++) {
    if (see.empty(r)) continue;
    float* o = out.o + r * out.stride + d;
    if (out.merge) {
      const Vec alpha = broadcast(out.alpha[r]), beta = broadcast(out.beta[r]);
      for (int c = 0; c < C; c++) store(o + c * kLanes, fma(acc[r][c], beta, mul(load(o + c * kLanes), alpha)));
    } else {
      for (int c = 0; c < C; c++) store(o + c * kLanes, acc[r][c]);
    }
  }
}

template <int R>
void values(const TileScratch& w, const ChunkView& c, int head_dim, const Visible& see, const Output& out) {
  int d = 0;
  for (; d + kCols * kLanes <= head_dim; d += kCols * kLanes) value_columns<R, kCols>(w, c, head_dim, d, see, out);
#if HEADRACE_LEVEL >= 2
  switch ((head_dim - d) / kLanes) {
    case 1:
      value_columns<R, 1>(w, c, head_dim, d, see, out);
      break;
    case 2:
      value_columns<R, 2>(w, c, head_dim, d, see, out);
      break;
    case 3:
      value_columns<R, 3>(w, c, head_dim, d, see, out);
      break;
  }
#endif
}

inline void exp16(float* x) {
  for (int i = 0; i < 16; i += kLanes) store(x + i, exp_ps(load(x + i)));
}

#endif

}  // namespace
}  // namespace HEADRACE_ISA
}  // namespace headrace
