// Linear layers with bf16 weights and activations, fp32 sums.
//
// Every output is one accumulator from zero, k pairs ascending, whatever the number of rows: a row's bits do not depend on the batch.
//   avx512bf16  VDPBF16PS: both products of a pair in one instruction, subnormals taken as zero
//   the others  acc = fma(w[2p], x[2p], acc), then fma(w[2p+1], x[2p+1], acc). A product of two bf16 fits fp32, so multiply and add give the
//               same bits where no product underflows, and scalar does that.
//
// Shape of a tile: rows x 32 columns of one panel, the whole of k, accumulators in registers. Up to 6 rows two panels side by side, because a
// chain of VDPBF16PS waits 6 cycles for each of its steps and few rows make few chains.
#include "linear.h"

namespace headrace {
namespace HEADRACE_ISA {
namespace {

inline uint32_t load_u32(const void* p) {
  uint32_t u;
  std::memcpy(&u, p, 4);
  return u;
}

// Products of the rows at x (ldx apart) with the panel at w: tile[row][32]. Double tiles: with the panel at w2 as well, into tile2. Single
// ones fetch a cache line of w2 into the second level for each pair they do.
using Tile = void (*)(const bf16* x, int64_t ldx, const uint8_t* w, const uint8_t* w2, int64_t pairs, float* tile, float* tile2);

#if HEADRACE_LEVEL >= 3

constexpr int kTileRows = 12, kDoubleRows = 6;  // 24 accumulators either way

template <int R, int P>
void multiply(const bf16* x, int64_t ldx, const uint8_t* w, const uint8_t* w2, int64_t pairs, float* tile, float* tile2) {
  __m512 acc[R][2 * P];
#pragma GCC unroll 12
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int c = 0; c < 2 * P; c++) acc[r][c] = _mm512_setzero_ps();
  for (int64_t p = 0; p < pairs; p++, w += 128) {
    __m512i column[2 * P] = {_mm512_load_si512(w), _mm512_load_si512(w + 64)};
    if constexpr (P == 2) {
      column[2] = _mm512_load_si512(w2 + 128 * p);
      column[3] = _mm512_load_si512(w2 + 128 * p + 64);
    } else {
      _mm_prefetch(w2 + (p << 6), _MM_HINT_T1);
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
      __m512i pair = _mm512_set1_epi32(static_cast<int>(load_u32(x + r * ldx + 2 * p)));
      __asm__("" : "+v"(pair));  // one broadcast load a row; folded into the instruction it would be one a column vector
#pragma GCC unroll 4
      for (int c = 0; c < 2 * P; c++) acc[r][c] = _mm512_dpbf16_ps(acc[r][c], (__m512bh)pair, (__m512bh)column[c]);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; r++) {
    _mm512_store_ps(tile + 32 * r, acc[r][0]);
    _mm512_store_ps(tile + 32 * r + 16, acc[r][1]);
    if constexpr (P == 2) {
      _mm512_store_ps(tile2 + 32 * r, acc[r][2]);
      _mm512_store_ps(tile2 + 32 * r + 16, acc[r][3]);
    }
  }
}

const Tile kTiles[kTileRows] = {multiply<1, 1>, multiply<2, 1>, multiply<3, 1>, multiply<4, 1>,  multiply<5, 1>,  multiply<6, 1>,
                                multiply<7, 1>, multiply<8, 1>, multiply<9, 1>, multiply<10, 1>, multiply<11, 1>, multiply<12, 1>};
const Tile kDoubleTiles[kDoubleRows] = {multiply<1, 2>, multiply<2, 2>, multiply<3, 2>, multiply<4, 2>, multiply<5, 2>, multiply<6, 2>};

#elif HEADRACE_LEVEL >= 1

#if HEADRACE_LEVEL == 2
using Float = __m512;
constexpr int kTileRows = 12;
inline Float zero() { return _mm512_setzero_ps(); }
inline Float fma(Float a, Float b, Float c) { return _mm512_fmadd_ps(a, b, c); }
inline __m512i load(const uint8_t* p) { return _mm512_load_si512(p); }
inline __m512i broadcast(uint32_t u) { return _mm512_set1_epi32(static_cast<int>(u)); }
inline Float even(__m512i pair) { return _mm512_castsi512_ps(_mm512_slli_epi32(pair, 16)); }
inline Float odd(__m512i pair) { return _mm512_castsi512_ps(_mm512_and_si512(pair, _mm512_set1_epi32(static_cast<int>(0xffff0000u)))); }
inline void store(float* p, Float x) { _mm512_store_ps(p, x); }
#else
using Float = __m256;
constexpr int kTileRows = 4;
inline Float zero() { return _mm256_setzero_ps(); }
inline Float fma(Float a, Float b, Float c) { return _mm256_fmadd_ps(a, b, c); }
inline __m256i load(const uint8_t* p) { return _mm256_load_si256(reinterpret_cast<const __m256i*>(p)); }
inline __m256i broadcast(uint32_t u) { return _mm256_set1_epi32(static_cast<int>(u)); }
inline Float even(__m256i pair) { return _mm256_castsi256_ps(_mm256_slli_epi32(pair, 16)); }
inline Float odd(__m256i pair) { return _mm256_castsi256_ps(_mm256_and_si256(pair, _mm256_set1_epi32(static_cast<int>(0xffff0000u)))); }
inline void store(float* p, Float x) { _mm256_store_ps(p, x); }
#endif

// `C` vectors of columns at a time.
template <int R, int C>
void multiply(const bf16* x, int64_t ldx, const uint8_t* panel, const uint8_t* ahead, int64_t pairs, float* tile, float*) {
  constexpr int kWidth = sizeof(Float) / 4;
  for (int first = 0; first < 32; first += C * kWidth) {
    const uint8_t* w = panel + 4 * first;
    Float acc[R][C];
#pragma GCC unroll 12
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) acc[r][c] = zero();
    for (int64_t p = 0; p < pairs; p++, w += 128) {
      Float we[C], wo[C];
      if (first == 0) _mm_prefetch(ahead + (p << 6), _MM_HINT_T1);
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) {
        const auto pair = load(w + sizeof(Float) * c);
        we[c] = even(pair);
        wo[c] = odd(pair);
      }
#pragma GCC unroll 12
      for (int r = 0; r < R; r++) {
        const auto pair = broadcast(load_u32(x + r * ldx + 2 * p));
        const Float xe = even(pair), xo = odd(pair);
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) acc[r][c] = fma(wo[c], xo, fma(we[c], xe, acc[r][c]));
      }
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) store(tile + 32 * r + first + kWidth * c, acc[r][c]);
  }
}

#if HEADRACE_LEVEL == 2
const Tile kTiles[kTileRows] = {multiply<1, 2>, multiply<2, 2>, multiply<3, 2>, multiply<4, 2>,  multiply<5, 2>,  multiply<6, 2>,
                                multiply<7, 2>, multiply<8, 2>, multiply<9, 2>, multiply<10, 2>, multiply<11, 2>, multiply<12, 2>};
#else
const Tile kTiles[kTileRows] = {multiply<1, 4>, multiply<2, 2>, multiply<3, 2>, multiply<4, 2>};
#endif

#else

constexpr int kTileRows = 1;

void multiply(const bf16* x, int64_t, const uint8_t* w, const uint8_t*, int64_t pairs, float* tile, float*) {
  for (int c = 0; c < 32; c++) tile[c] = 0;
  for (int64_t p = 0; p < pairs; p++, w += 128) {
    const float xe = from_bf16(x[2 * p]), xo = from_bf16(x[2 * p + 1]);
    for (int c = 0; c < 32; c++) {
      const uint32_t pair = load_u32(w + 4 * c);
      tile[c] = (tile[c] + bits_to_float(pair << 16) * xe) + bits_to_float(pair & 0xffff0000u) * xo;
    }
  }
}

const Tile kTiles[kTileRows] = {multiply};

#endif

// Rows whose activations stay in the second-level cache beside one panel. Fewer rows would read the weights from memory too often.
inline int64_t block_rows(int64_t k) {
  constexpr int64_t kBytes = 520 * 1024, kLeast = 96;  // of 1 MB: 768 lost 1 to 2 % at k = 2048
  const int64_t rows = kBytes / (2 * k) - kPanel;
  return rows < kLeast ? kLeast : rows;
}

}  // namespace

void linear_bf16(const Linear& a, int64_t begin, int64_t end) {
  const int64_t groups = (a.k + kGroup - 1) / kGroup, pairs = groups * (kGroup / 2);
  const size_t panel_bytes = static_cast<size_t>(groups) * group_bytes(Format::bf16);
  const bool gated = a.epilogue == Epilogue::silu_mul;
  const size_t unit_bytes = gated ? 2 * panel_bytes : panel_bytes;
  alignas(64) float tile[kTileRows * kPanel], tile2[kTileRows * kPanel];

#if HEADRACE_LEVEL >= 3
  if (a.rows <= kDoubleRows) {
    if (a.rows <= 0) return;
    const Tile both = kDoubleTiles[a.rows - 1];
    const int rows = static_cast<int>(a.rows);
    const int64_t last = gated ? 2 * end : end;
    int64_t panel = gated ? 2 * begin : begin;
    for (; panel + 2 <= last; panel += 2) {
      const uint8_t* w = a.weight + static_cast<size_t>(panel) * panel_bytes;
      both(a.in.b, a.in.ldb, w, w + panel_bytes, pairs, tile, tile2);
      if (gated) {
        finish_pair(a, 0, rows, panel / 2, tile, tile2);
      } else {
        finish_tile(a, 0, rows, panel, tile);
        finish_tile(a, 0, rows, panel + 1, tile2);
      }
    }
    if (panel < last) {
      kTiles[a.rows - 1](a.in.b, a.in.ldb, a.weight + static_cast<size_t>(panel) * panel_bytes, a.weight, pairs, tile, nullptr);
      finish_tile(a, 0, rows, panel, tile);
    }
    return;
  }
#endif

  const int64_t blocks = (a.rows + block_rows(32 * groups) - 1) / block_rows(32 * groups);
  for (int64_t b = 0; b < blocks; b++) {
    // Near-equal blocks of near-equal tiles: a last tile of one row would take as long as one of six.
    const int64_t first = a.rows * b / blocks, rows = a.rows * (b + 1) / blocks - first, tiles = (rows + kTileRows - 1) / kTileRows;
    for (int64_t unit = begin; unit < end; unit++) {
      const uint8_t* w = a.weight + static_cast<size_t>(unit) * unit_bytes;
      for (int64_t t = 0; t < tiles; t++) {
        const int64_t row = first + rows * t / tiles;
        const int count = static_cast<int>(first + rows * (t + 1) / tiles - row);
        const bf16* x = a.in.b + row * a.in.ldb;
        // What the tile will be stored or added to.
        for (int r = 0; !gated && r < count; r++) {
          const float* out = a.out + (row + r) * a.ld_out + unit * kPanel;
          __builtin_prefetch(out, 1);
          __builtin_prefetch(out + 16, 1);
        }
        // The first tile of a unit takes its weights as fast as memory gives them; the second and third (each 64 B a pair, half of what
        // they read themselves) fetch the next unit's, which they leave time for.
        const uint8_t* ahead = (t == 1 || t == 2) && unit + 1 < end ? w + unit_bytes + (t == 1 ? 0 : panel_bytes / 2) : w;
        kTiles[count - 1](x, a.in.ldb, w, ahead, pairs, tile, nullptr);
        if (gated) {
          kTiles[count - 1](x, a.in.ldb, w + panel_bytes, ahead == w ? w : ahead + panel_bytes, pairs, tile2, nullptr);
          finish_pair(a, row, count, unit, tile, tile2);
        } else {
          finish_tile(a, row, count, unit, tile);
        }
      }
    }
  }
}

}  // namespace HEADRACE_ISA
}  // namespace headrace
