// The arithmetic of attention on one tile: up to 6 (query, head) rows against one KV chunk of 64 tokens. Included by attention.cpp, once per level.
//
// Canonical, per (row, chunk), whatever the tile, the split of the prompt or the thread:
//   S[t]  = q . k[t]               one accumulator, d ascending (level 3: VDPBF16PS on pairs of d; else fma, fp32)
//   m     = c * max S              over the visible tokens [lo, hi) of the chunk; c = scale * log2(e), a product of fp32
//   p[t]  = 2^(fma(S[t], c, -m))   exactly 0 where invisible
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
};

// Places (K, then V, of two blocks each) of the next KV chunk and of the one after it, to be prefetched where a chunk is read; all null: none.
// Into L2, because L1's miss buffers are few and a full one drops the request; twice, because L2's drop some too.
struct Ahead {
  const bf16* near[2];
  const bf16* far[2];
};

// Token ranges [lo, hi) each row sees of the chunk, and what they have in common.
struct Visible {
  int lo[kTileRows], hi[kTileRows];
  int lo_min, lo_max, hi_min, hi_max;  // over all rows
  bool empty(int r) const { return lo[r] >= hi[r]; }
  bool all() const { return lo_max == 0 && hi_min == kKvChunk; }
};
constexpr Visible kSeesAll = {{0, 0, 0, 0, 0, 0}, {64, 64, 64, 64, 64, 64}, 0, 0, 64, 64};

// Where O goes: o = fma(O_c, beta, o * alpha), or, where alpha is null, o = O_c.
struct Output {
  float* o;
  int64_t stride;  // floats from row to row
  const float *alpha, *beta;
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

// The queries of a tile. Level 3 reads their words where they are; the others want them widened once: [d][row], so that a row is at a constant
// offset.
#if HEADRACE_LEVEL == 3
struct Queries {
  const uint32_t* row[kTileRows];
};
#else
struct Queries {
  const float* packed;
};
template <int R>
void widen_queries(float* out, const bf16* const* rows, int head_dim) {
  for (int r = 0; r < R; r++)
    for (int d = 0; d < head_dim; d++) out[d * R + r] = from_bf16(rows[r][d]);
}
#endif

#if HEADRACE_LEVEL == 0

template <int R>
void scores(TileScratch& w, const Queries& q, const ChunkView& c, int head_dim, float c2, const Visible& see, const Ahead*) {
  for (int r = 0; r < R; r++) {
    float* s = w.s[r];
    w.m[r] = kMinusInf;
    for (int t = see.lo[r]; t < see.hi[r]; t++) {
      const bf16* k = c.k[t / kBlock] + t % kBlock * 2;
      float sum = 0;
      for (int d = 0; d < head_dim; d++) sum = __builtin_fmaf(q.packed[d * R + r], from_bf16(k[d / 2 * 2 * kBlock + d % 2]), sum);
      s[t] = sum;
      if (sum > w.m[r]) w.m[r] = sum;
    }
    w.m[r] *= c2;
    float lane[16];
    for (int t = 0; t < kKvChunk; t++) {
      s[t] = t >= see.lo[r] && t < see.hi[r] ? exp2_f32(__builtin_fmaf(s[t], c2, -w.m[r])) : 0.0f;
      w.p[r][t] = from_bf16(to_bf16(s[t]));
    }
    for (int j = 0; j < 16; j++) lane[j] = (s[j] + s[16 + j]) + (s[32 + j] + s[48 + j]);
    for (int half = 8; half; half /= 2)
      for (int j = 0; j < half; j++) lane[j] += lane[j + half];
    w.l[r] = lane[0];
  }
}

template <int R>
void values(TileScratch& w, const ChunkView& c, int head_dim, const Visible& see, const Output& out, const Ahead*) {
  for (int r = 0; r < R; r++) {
    if (see.empty(r)) continue;
    for (int d = 0; d < head_dim; d++) {
      float sum = 0;
      for (int t = see.lo[r] & ~1; t < ((see.hi[r] + 1) & ~1); t++) {
        const bf16* v = c.v[t / kBlock] + (t % kBlock / 2 * head_dim + d) * 2 + t % 2;
        sum = __builtin_fmaf(w.p[r][t], t >= see.lo[r] && t < see.hi[r] ? from_bf16(*v) : 0.0f, sum);
      }
      float& o = out.o[r * out.stride + d];
      o = out.alpha ? __builtin_fmaf(sum, out.beta[r], o * out.alpha[r]) : sum;
    }
  }
}

// m, l of 8 rows <- merged with the chunk's; alpha and beta into w.exponent.
inline void merge_rows(TileScratch& w, const float* m, const float* l, float* top, float* sum) {
  for (int r = 0; r < 8; r++) {
    const float t = w.m[r] > m[r] ? w.m[r] : m[r];
    const float alpha = exp2_f32(m[r] - t), beta = exp2_f32(w.m[r] - t);
    sum[r] = __builtin_fmaf(w.l[r], beta, l[r] * alpha);
    top[r] = t;
    w.exponent[r] = alpha;
    w.exponent[8 + r] = beta;
  }
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
inline Vec fmsub(Vec a, Vec b, Vec c) { return _mm512_fmsub_ps(a, b, c); }
inline Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline Ints load_words(const uint32_t* p) { return _mm512_loadu_si512(p); }
inline Ints and_words(Ints x, uint32_t mask) { return _mm512_and_si512(x, _mm512_set1_epi32(static_cast<int>(mask))); }
inline bool finite(Ints x) { return !_mm512_cmpge_epu16_mask(and_words(x, 0x7fff7fffu), _mm512_set1_epi16(0x7f80)); }  // of bf16
// `x` where the token (lane + first) is in [lo, hi), else `other`.
inline Vec select(Vec x, Vec other, int first, int lo, int hi) {
  if (lo >= hi) return other;  // also keeps both shifts below 64
  const uint64_t bits = (~uint64_t{0} >> (kKvChunk - hi)) & (~uint64_t{0} << lo);
  return _mm512_mask_blend_ps(static_cast<__mmask16>(bits >> first), other, x);
}
inline float hmax(Vec x) {
  const __m256 a = _mm256_max_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
  const __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  const __m128 c = _mm_max_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_max_ss(c, _mm_movehdup_ps(c)));
}
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
inline Vec fmsub(Vec a, Vec b, Vec c) { return _mm256_fmsub_ps(a, b, c); }
inline Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
inline Ints load_words(const uint32_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline Ints and_words(Ints x, uint32_t mask) { return _mm256_and_si256(x, _mm256_set1_epi32(static_cast<int>(mask))); }
inline bool finite(Ints x) {  // of bf16
  return !_mm256_movemask_epi8(_mm256_cmpgt_epi16(and_words(x, 0x7fff7fffu), _mm256_set1_epi16(0x7f7f)));
}
inline Vec select(Vec x, Vec other, int first, int lo, int hi) {
  const __m256i token = _mm256_add_epi32(_mm256_set1_epi32(first), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  const __m256i in = _mm256_and_si256(_mm256_cmpgt_epi32(token, _mm256_set1_epi32(lo - 1)), _mm256_cmpgt_epi32(_mm256_set1_epi32(hi), token));
  return _mm256_blendv_ps(other, x, _mm256_castsi256_ps(in));
}
inline float hsum(Vec x) {
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

#if HEADRACE_LEVEL == 2
inline Vec even_words(Ints x) { return _mm512_castsi512_ps(_mm512_slli_epi32(x, 16)); }
inline Vec odd_words(Ints x) { return _mm512_castsi512_ps(and_words(x, 0xffff0000u)); }
#elif HEADRACE_LEVEL == 1
inline Vec even_words(Ints x) { return _mm256_castsi256_ps(_mm256_slli_epi32(x, 16)); }
inline Vec odd_words(Ints x) { return _mm256_castsi256_ps(and_words(x, 0xffff0000u)); }
#endif

inline Vec round_bf16(Vec x) {  // of a number, to nearest even, still as fp32
#if HEADRACE_LEVEL >= 2
  const __m512i u = _mm512_castps_si512(x), odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  return _mm512_castsi512_ps(and_words(_mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 0xffff0000u));
#else
  const __m256i u = _mm256_castps_si256(x), odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  return _mm256_castsi256_ps(and_words(_mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 0xffff0000u));
#endif
}

// Operand A of a product: words of row r by index.
template <int R>
struct QueryWords {
#if HEADRACE_LEVEL == 3
  const uint32_t* row[R];
  explicit QueryWords(const Queries& q) {
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) row[r] = q.row[r];
  }
  Word at(int r, int64_t i) const { return row[r][i]; }
#else
  const float* packed;
  explicit QueryWords(const Queries& q) : packed(q.packed) {}
  Word at(int r, int64_t i) const { return packed[i * R + r]; }
#endif
};
struct ProbabilityWords {
  const Word* p;
  Word at(int r, int64_t i) const { return p[r * (kKvChunk / 2 * kPerPair) + i]; }
};

// acc += pair i of the inner dimension.
template <int R, int C, typename A>
inline __attribute__((always_inline)) void step(Vec (&acc)[R][C], const A& a, int64_t i, const Ints (&b)[C]) {
#if HEADRACE_LEVEL == 3
#pragma GCC unroll 6
  for (int r = 0; r < R; r++) {
    const __m512bh pair = reinterpret_cast<__m512bh>(_mm512_set1_epi32(static_cast<int>(a.at(r, i))));
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) acc[r][c] = _mm512_dpbf16_ps(acc[r][c], pair, reinterpret_cast<__m512bh>(b[c]));
  }
#else
  Vec wide[C];
#pragma GCC unroll 4
  for (int c = 0; c < C; c++) wide[c] = even_words(b[c]);
#pragma GCC unroll 6
  for (int r = 0; r < R; r++) {
    const Vec even = broadcast(a.at(r, 2 * i));
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) acc[r][c] = fma(even, wide[c], acc[r][c]);
  }
#pragma GCC unroll 4
  for (int c = 0; c < C; c++) wide[c] = odd_words(b[c]);
#pragma GCC unroll 6
  for (int r = 0; r < R; r++) {
    const Vec odd = broadcast(a.at(r, 2 * i + 1));
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) acc[r][c] = fma(odd, wide[c], acc[r][c]);
  }
#endif
}

// Words to fetch along with a product's operand B: the same places of other blocks.
struct Fetch {
  const uint32_t* p[4];
  // `offset` elements into the blocks; second: the two later places lie in the chunk's second block (QK), else 32 words on (PV, of one block).
  static Fetch keys(const Ahead& a) { return {{words(a.near[0]), words(a.near[1]), words(a.far[0]), words(a.far[1])}}; }
  static Fetch values(const Ahead& a, int block, int64_t offset) {
    return {{words(a.near[block]) + offset, words(a.near[block]) + offset + 32, words(a.far[block]) + offset, words(a.far[block]) + offset + 32}};
  }
};

// acc += pairs [0, pairs) ascending. Columns lie at b0 and, from the 33rd, at b1; ldb words from pair to pair.
template <bool Fetching, int R, int C, typename A>
inline __attribute__((always_inline)) void multiply(Vec (&acc)[R][C], const A& a, const uint32_t* b0, const uint32_t* b1, int64_t ldb, int pairs,
                                                    Fetch fetch) {
  constexpr int kSplit = 32 / kLanes;
  for (int64_t i = 0; i < pairs; i++) {
    Ints b[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) b[c] = load_words(c < kSplit ? b0 + c * kLanes : b1 + (c - kSplit) * kLanes);
    step(acc, a, i, b);
    if constexpr (Fetching) {
#pragma GCC unroll 4
      for (int c = 0; c < C; c += 16 / kLanes)
#pragma GCC unroll 2
        for (int j = 0; j < 2; j++) __builtin_prefetch(fetch.p[2 * j + (c >= kSplit)] + c % kSplit * kLanes, 0, 2);
#pragma GCC unroll 4
      for (int j = 0; j < 4; j++) fetch.p[j] += ldb;
    }
    b0 += ldb;
    b1 += ldb;
  }
}

// p, m, l of R rows from their scores, of which only the first V vectors can be visible. In passes over the rows, because one row alone is a chain of
// latencies.
template <int R, int V, bool Edge>
inline __attribute__((always_inline)) void softmax(TileScratch& w, int first, Vec (&p)[R][V], float c2, const Visible& see) {
#pragma GCC unroll 6
  for (int r = 0; r < R; r++) {
    Vec top = broadcast(kMinusInf);
#pragma GCC unroll 8
    for (int i = 0; i < V; i++) {
      if (Edge) p[r][i] = select(p[r][i], broadcast(kMinusInf), i * kLanes, see.lo[first + r], see.hi[first + r]);
      top = max(top, p[r][i]);
    }
    w.m[first + r] = hmax(top) * c2;
  }
  const Vec c = broadcast(c2);
#pragma GCC unroll 6
  for (int r = 0; r < R; r++) {
#pragma GCC unroll 8
    for (int i = 0; i < V; i++) {
      p[r][i] = exp2_ps(fmsub(p[r][i], c, broadcast(w.m[first + r])));
      if (Edge) p[r][i] = select(p[r][i], zero(), i * kLanes, see.lo[first + r], see.hi[first + r]);
    }
#if HEADRACE_LEVEL == 3  // p is 0 or normal: nothing is flushed
#pragma GCC unroll 2
    for (int i = 0; i < V; i += 2)
      _mm512_store_si512(w.p[first + r] + i * 8, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(i + 1 < V ? p[r][(i + 1) % V] : zero(), p[r][i])));
#else
#pragma GCC unroll 8
    for (int i = 0; i < V; i++) store(w.p[first + r] + i * kLanes, round_bf16(p[r][i]));
#endif
#if HEADRACE_LEVEL >= 2  // vectors that are not there are zeros, which change nothing
    if constexpr (V == 4) p[r][2] = add(p[r][2], p[r][3]);
    if constexpr (V >= 2) p[r][0] = add(p[r][0], p[r][1]);
    if constexpr (V >= 3) p[r][0] = add(p[r][0], p[r][2]);
#else
    p[r][0] = add(add(add(p[r][0], p[r][2]), add(p[r][4], p[r][6])), add(add(p[r][1], p[r][3]), add(p[r][5], p[r][7])));
#endif
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; r++) w.l[first + r] = hsum(p[r][0]);
}

template <int R, int C>
inline __attribute__((always_inline)) void clear(Vec (&acc)[R][C]) {
#pragma GCC unroll 6
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) acc[r][c] = zero();
}

#if HEADRACE_LEVEL >= 2
template <int R, int C, bool Edge>
void score_columns(TileScratch& w, const Queries& q, const ChunkView& chunk, int head_dim, float c2, const Visible& see, const Ahead* ahead) {
  Vec acc[R][C];
  clear(acc);
  const uint32_t *k0 = words(chunk.k[0]), *k1 = words(chunk.k[1]);
  if (ahead)
    multiply<true>(acc, QueryWords<R>(q), k0, k1, kBlock, head_dim / 2, Fetch::keys(*ahead));
  else
    multiply<false>(acc, QueryWords<R>(q), k0, k1, kBlock, head_dim / 2, {});
  softmax<R, C, Edge>(w, 0, acc, c2, see);
}

template <int R>
void scores(TileScratch& w, const Queries& q, const ChunkView& chunk, int head_dim, float c2, const Visible& see, const Ahead* ahead) {
  if (see.all()) return score_columns<R, 4, false>(w, q, chunk, head_dim, c2, see, ahead);
  switch ((see.hi_max + 15) / 16) {
    case 1:
      return score_columns<R, 1, true>(w, q, chunk, head_dim, c2, see, ahead);
    case 2:
      return score_columns<R, 2, true>(w, q, chunk, head_dim, c2, see, ahead);
    case 3:
      return score_columns<R, 3, true>(w, q, chunk, head_dim, c2, see, ahead);
    default:
      return score_columns<R, 4, true>(w, q, chunk, head_dim, c2, see, ahead);
  }
}
#else
template <bool Edge>
void softmax_rows(TileScratch& w, int rows, float c2, const Visible& see) {
  for (int r = 0; r < rows; r++) {
    Vec p[1][kKvChunk / kLanes];
#pragma GCC unroll 8
    for (int i = 0; i < kKvChunk / kLanes; i++) p[0][i] = load(w.s[r] + i * kLanes);
    softmax<1, kKvChunk / kLanes, Edge>(w, r, p, c2, see);
  }
}

template <int R>
void scores(TileScratch& w, const Queries& q, const ChunkView& chunk, int head_dim, float c2, const Visible& see, const Ahead* ahead) {
  for (int i = 0; i < (see.hi_max + 15) / 16; i++) {  // 16 tokens at a time: 12 accumulators
    Vec acc[R][kCols];
    clear(acc);
    const uint32_t* k = words(chunk.k[i / 2]) + i % 2 * 16;
    if (ahead)
      multiply<true>(acc, QueryWords<R>(q), k, k, kBlock, head_dim / 2, Fetch::values(*ahead, i / 2, i % 2 * 16));
    else
      multiply<false>(acc, QueryWords<R>(q), k, k, kBlock, head_dim / 2, {});
    for (int r = 0; r < R; r++)
      for (int c = 0; c < kCols; c++) store(w.s[r] + i * 16 + c * kLanes, acc[r][c]);
  }
  see.all() ? softmax_rows<false>(w, R, c2, see) : softmax_rows<true>(w, R, c2, see);
}
#endif

// Columns d and on of pair i of a chunk's values.
inline const uint32_t* value_words(const ChunkView& chunk, int head_dim, int d, int i) {
  return words(chunk.v[i / 16]) + static_cast<int64_t>(i % 16) * head_dim + d;
}

// The same sum of one row, over the tokens [lo, hi) and no other: what it does not see may be no number.
template <int C>
__attribute__((noinline)) void careful_row(float* out, const Word* p, const ChunkView& chunk, int head_dim, int d, int lo, int hi) {
  Vec row[1][C];
  clear(row);
  for (int i = lo / 2; i < (hi + 1) / 2; i++) {
    const uint32_t mask = (2 * i >= lo ? 0xffffu : 0u) | (2 * i + 1 < hi ? 0xffff0000u : 0u);
    Ints b[C];
    for (int c = 0; c < C; c++) b[c] = and_words(load_words(value_words(chunk, head_dim, d, i) + c * kLanes), mask);
    step(row, ProbabilityWords{p}, i, b);
  }
  for (int c = 0; c < C; c++) store(out + c * kLanes, row[0][c]);
}

// Columns [d, d + C * kLanes) of O. Edge: some row does not see all 64 tokens. Its probabilities of those are 0, which change nothing where the
// values are finite; where they are not, the rows go through memory (w.s, whose scores are used up).
template <int R, int C, bool Edge>
void value_columns(TileScratch& w, const ChunkView& chunk, int head_dim, int d, const Visible& see, const Output& out, const Ahead* ahead) {
  const int first = Edge ? see.lo_min / 2 : 0, last = Edge ? (see.hi_max + 1) / 2 : kKvChunk / 2;
  Vec acc[R][C];
  clear(acc);
  bool harmless = true;
  if (Edge)  // all rows see all of pairs [(lo_max + 1) / 2, hi_min / 2)
    for (int i = first; i < last; i++)
      if (i < (see.lo_max + 1) / 2 || i >= see.hi_min / 2)
        for (int c = 0; c < C; c++) harmless &= finite(load_words(value_words(chunk, head_dim, d, i) + c * kLanes));
  if (harmless) {
    for (int block = 0; block < 2; block++) {
      const int from = Edge && first > block * 16 ? first - block * 16 : 0, to = Edge && last < block * 16 + 16 ? last - block * 16 : 16;
      if (Edge && from >= to) continue;
      const int64_t at = static_cast<int64_t>(from) * head_dim + d;
      const uint32_t* v = words(chunk.v[block]) + at;
      const ProbabilityWords p{w.p[0] + (block * 16 + from) * kPerPair};
      if (ahead)
        multiply<true>(acc, p, v, v + 32, head_dim, to - from, Fetch::values(*ahead, block, static_cast<int64_t>(kBlock) / 2 * head_dim + at));
      else
        multiply<false>(acc, p, v, v + 32, head_dim, to - from, {});
    }
  } else {
    for (int r = 0; r < R; r++) careful_row<C>(w.s[r], w.p[r], chunk, head_dim, d, see.lo[r], see.hi[r]);
    for (int r = 0; r < R; r++)
      for (int c = 0; c < C; c++) acc[r][c] = load(w.s[r] + c * kLanes);
  }
  for (int r = 0; r < R; r++) {
    if (Edge && see.empty(r)) continue;
    float* o = out.o + r * out.stride + d;
    if (out.alpha) {
      const Vec alpha = broadcast(out.alpha[r]), beta = broadcast(out.beta[r]);
      for (int c = 0; c < C; c++) store(o + c * kLanes, fma(acc[r][c], beta, mul(load(o + c * kLanes), alpha)));
    } else {
      for (int c = 0; c < C; c++) store(o + c * kLanes, acc[r][c]);
    }
  }
}

template <int R, bool Edge>
void value_slices(TileScratch& w, const ChunkView& c, int head_dim, const Visible& see, const Output& out, const Ahead* ahead) {
  int d = 0;
  for (; d + kCols * kLanes <= head_dim; d += kCols * kLanes) value_columns<R, kCols, Edge>(w, c, head_dim, d, see, out, ahead);
#if HEADRACE_LEVEL >= 2
  switch ((head_dim - d) / kLanes) {
    case 1:
      value_columns<R, 1, Edge>(w, c, head_dim, d, see, out, ahead);
      break;
    case 2:
      value_columns<R, 2, Edge>(w, c, head_dim, d, see, out, ahead);
      break;
    case 3:
      value_columns<R, 3, Edge>(w, c, head_dim, d, see, out, ahead);
      break;
  }
#endif
}

template <int R>
void values(TileScratch& w, const ChunkView& c, int head_dim, const Visible& see, const Output& out, const Ahead* ahead) {
  see.all() ? value_slices<R, false>(w, c, head_dim, see, out, ahead) : value_slices<R, true>(w, c, head_dim, see, out, ahead);
}

inline void merge_rows(TileScratch& w, const float* m, const float* l, float* top, float* sum) {
  const __m256 a = _mm256_loadu_ps(m), b = _mm256_loadu_ps(w.m), t = _mm256_max_ps(b, a);
#if HEADRACE_LEVEL >= 2
  const __m512 e = exp2_ps(_mm512_insertf32x8(_mm512_castps256_ps512(_mm256_sub_ps(a, t)), _mm256_sub_ps(b, t), 1));
  const __m256 alpha = _mm512_castps512_ps256(e), beta = _mm512_extractf32x8_ps(e, 1);
#else
  const __m256 alpha = exp2_ps(_mm256_sub_ps(a, t)), beta = exp2_ps(_mm256_sub_ps(b, t));
#endif
  _mm256_store_ps(w.exponent, alpha);
  _mm256_store_ps(w.exponent + 8, beta);
  _mm256_storeu_ps(top, t);
  _mm256_storeu_ps(sum, _mm256_fmadd_ps(_mm256_loadu_ps(w.l), beta, _mm256_mul_ps(_mm256_loadu_ps(l), alpha)));
}

#endif

}  // namespace
}  // namespace HEADRACE_ISA
}  // namespace headrace
