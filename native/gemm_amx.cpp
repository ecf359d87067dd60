// int4 and int8 weights times int8 activations on the tile unit (AMX): the arithmetic of gemm_int.cpp to the bit. The tiles add exact integers, and
// what follows a group is the same conversion, product and multiply-add in the same order.
#if HEADRACE_AMX
#include <immintrin.h>

#include "linear.h"

namespace headrace {
namespace HEADRACE_ISA {
namespace {

constexpr int kTileRows = 16;   // of activations in a tile, at most
constexpr int kBlockTiles = 8;  // tiles of rows whose accumulators wait in L1 and L2 between blocks of groups
constexpr int kGroups = 8;      // groups multiplied before their integers are scaled: then an accumulator is loaded and stored once in eight
constexpr int kGroupBytes = kGroup * kPanel;

// Tiles 0 to 2 hold rows of activations and their products with the left and right 16 columns, 3 to 5 the same with one row more; 6 and 7 weights.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
  explicit TileConfig(int short_rows) {
    for (int t = 0; t < 8; t++) {
      bytes[t] = t == 0 || t == 3 ? kGroup : 64;
      const int height = t < 3 || short_rows == kTileRows ? short_rows : short_rows + 1;  // full ones have no taller beside them
      rows[t] = static_cast<uint8_t>(t < 6 ? height : kGroup / 4);
    }
  }
};

// The weights of `groups` records as the tile unit reads them, [group][8][32 columns][4 k], signed (u - 128) except of q4_1, and their scales, as
// they multiply the integers, and minima: [group][scale | min][32]. Asks for the lines `ahead` bytes further on.
template <Format format>
void unpack(const uint8_t* record, int64_t groups, int64_t ahead, uint8_t* out, float* scales) {
  constexpr int64_t bytes = static_cast<int64_t>(group_bytes(format));
  constexpr bool has_min = format == Format::q4_1;
  const __m512i sign = _mm512_set1_epi8(static_cast<char>(has_min ? 0 : 0x80)), high = _mm512_set1_epi8(static_cast<char>(0xF0));
  const auto halves = [](const uint8_t* p, int half) { return _mm512_cvtph_ps(_mm256_load_si256(reinterpret_cast<const __m256i*>(p) + half)); };
  for (int64_t g = 0; g < groups; g++, record += bytes, out += kGroupBytes, scales += 2 * kPanel) {
    if (ahead)
      for (int64_t line = 0; line < bytes; line += 64) _mm_prefetch(reinterpret_cast<const char*>(record + ahead + line), _MM_HINT_T1);
    for (int half = 0; half < 2; half++) {
      const __m512 scale = halves(record, half);
      _mm512_store_ps(scales + 16 * half, format == Format::q8_0 ? scale : _mm512_mul_ps(scale, _mm512_set1_ps(kNibbleScale)));
      if (has_min) _mm512_store_ps(scales + kPanel + 16 * half, halves(record + 64, half));
    }
    const uint8_t* w = record + (has_min ? 128 : 64);
    if (format == Format::q8_0) {
      for (int i = 0; i < kGroupBytes; i += 64) _mm512_store_si512(out + i, _mm512_xor_si512(_mm512_load_si512(w + i), sign));
      continue;
    }
    for (int i = 0; i < kGroupBytes / 2; i += 64) {
      const __m512i v = _mm512_load_si512(w + i);
      uint8_t* to = out + i / 128 * 256 + i % 128;
      _mm512_store_si512(to, _mm512_xor_si512(_mm512_and_si512(_mm512_slli_epi16(v, 4), high), sign));
      _mm512_store_si512(to + 128, _mm512_xor_si512(_mm512_and_si512(v, high), sign));
    }
  }
}

// gcc's intrinsics name their tiles in assembly text, so a number is a macro's, and do not say that they read memory, hence the fences.
inline void fence() { __asm__ volatile("" : : : "memory"); }

// One group: activations [rows][32] times weights [32][32], as integers [2][16][16], left columns and right. The products of q4_1's unsigned weights
// need another instruction.
#define HEADRACE_MULTIPLY(name, Q, LEFT, RIGHT)                                          \
  template <Format format>                                                               \
  inline void name(const int8_t* q, int64_t ldq, const uint8_t* weights, int32_t* out) { \
    _tile_loadd(Q, q, ldq);                                                              \
    _tile_loadd(6, weights, 4 * kPanel);                                                 \
    _tile_loadd(7, weights + 64, 4 * kPanel);                                            \
    _tile_zero(LEFT);                                                                    \
    _tile_zero(RIGHT);                                                                   \
    if (format == Format::q4_1) {                                                        \
      _tile_dpbsud(LEFT, Q, 6);                                                          \
      _tile_dpbsud(RIGHT, Q, 7);                                                         \
    } else {                                                                             \
      _tile_dpbssd(LEFT, Q, 6);                                                          \
      _tile_dpbssd(RIGHT, Q, 7);                                                         \
    }                                                                                    \
    _tile_stored(LEFT, out, 64);                                                         \
    _tile_stored(RIGHT, out + kTileRows * 16, 64);                                       \
  }
HEADRACE_MULTIPLY(multiply_short, 0, 1, 2)
HEADRACE_MULTIPLY(multiply_tall, 3, 4, 5)
#undef HEADRACE_MULTIPLY

// acc[rows][32] of up to 8 rows, `groups` groups further. `scales`: [group][scale | min][32]; `integers`: of the first row, [group][2][16][16].
template <Format format, int rows>
void accumulate(const Activations& in, int64_t row, int64_t group, int64_t groups, const float* scales, const int32_t* integers, float* out) {
  constexpr bool has_min = format == Format::q4_1;
  __m512 acc[rows][2];
#pragma GCC unroll 8
  for (int r = 0; r < rows; r++) acc[r][0] = _mm512_load_ps(out + r * kPanel), acc[r][1] = _mm512_load_ps(out + r * kPanel + 16);
  const float *x = in.scale + row * in.ldg + group, *sum = in.sum + row * in.ldg + group;
  for (int64_t g = 0; g < groups; g++, scales += 2 * kPanel, integers += kPanel * kTileRows, x++, sum++) {
    const __m512 s0 = _mm512_load_ps(scales), s1 = _mm512_load_ps(scales + 16);
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
      const __m512 a = _mm512_set1_ps(x[r * in.ldg]);
      acc[r][0] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_load_si512(integers + r * 16)), _mm512_mul_ps(s0, a), acc[r][0]);
      acc[r][1] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_load_si512(integers + (kTileRows + r) * 16)), _mm512_mul_ps(s1, a), acc[r][1]);
    }
    if (has_min) {
      const __m512 m0 = _mm512_load_ps(scales + kPanel), m1 = _mm512_load_ps(scales + kPanel + 16);
#pragma GCC unroll 8
      for (int r = 0; r < rows; r++) {
        const __m512 a = _mm512_set1_ps(sum[r * in.ldg]);
        acc[r][0] = _mm512_fmadd_ps(m0, a, acc[r][0]);
        acc[r][1] = _mm512_fmadd_ps(m1, a, acc[r][1]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < rows; r++) _mm512_store_ps(out + r * kPanel, acc[r][0]), _mm512_store_ps(out + r * kPanel + 16, acc[r][1]);
}

template <Format format>
void accumulate_rows(int64_t rows, const Activations& in, int64_t row, int64_t group, int64_t groups, const float* scales, const int32_t* integers,
                     float* out) {
  for (; rows >= 8; rows -= 8, row += 8, integers += 8 * 16, out += 8 * kPanel) accumulate<format, 8>(in, row, group, groups, scales, integers, out);
  if (rows >= 4) {
    accumulate<format, 4>(in, row, group, groups, scales, integers, out);
    rows -= 4, row += 4, integers += 4 * 16, out += 4 * kPanel;
  }
  for (; rows > 0; rows--, row++, integers += 16, out += kPanel) accumulate<format, 1>(in, row, group, groups, scales, integers, out);
}

// The rows of a layer in tiles of `height` rows, the first `tall` of which have one more.
struct Heights {
  int64_t tiles, height, tall;
  explicit Heights(int64_t rows) : tiles((rows + kTileRows - 1) / kTileRows), height(rows / tiles), tall(rows % tiles) {}
  int64_t row(int64_t tile) const { return tile * height + (tile < tall ? tile : tall); }
};

// out[.][32]: one panel for the rows of tiles [first, last).
template <Format format>
void multiply_panel(const Linear& a, const uint8_t* panel, const Heights& heights, int64_t first, int64_t last, int64_t ahead, float* out) {
  constexpr int64_t record = static_cast<int64_t>(group_bytes(format));
  alignas(64) uint8_t weights[kGroups * kGroupBytes];
  alignas(64) int32_t integers[kGroups * kPanel * kTileRows];
  alignas(64) float scales[kGroups * 2 * kPanel];
  const int64_t all = a.k / kGroup, ldq = a.in.ldq, begin = heights.row(first);
  for (float* zero = out; zero < out + (heights.row(last) - begin) * kPanel; zero += 16) _mm512_store_ps(zero, _mm512_setzero_ps());
  for (int64_t group = 0; group < all; group += kGroups, panel += kGroups * record) {
    const int64_t groups = all - group < kGroups ? all - group : kGroups;
    unpack<format>(panel, groups, ahead, weights, scales);
    fence();
    for (int64_t t = first; t < last; t++) {
      const int64_t row = heights.row(t);
      const int8_t* q = a.in.q + row * ldq + group * kGroup;
      if (t < heights.tall) {
        for (int64_t g = 0; g < groups; g++) multiply_tall<format>(q + g * kGroup, ldq, weights + g * kGroupBytes, integers + g * kPanel * kTileRows);
      } else {
        for (int64_t g = 0; g < groups; g++)
          multiply_short<format>(q + g * kGroup, ldq, weights + g * kGroupBytes, integers + g * kPanel * kTileRows);
      }
      accumulate_rows<format>(heights.row(t + 1) - row, a.in, row, group, groups, scales, integers, out + (row - begin) * kPanel);
    }
  }
}

template <Format format>
void run(const Linear& a, int64_t begin, int64_t end) {
  const bool pairs = a.epilogue == Epilogue::silu_mul;
  const int64_t panel = a.k / kGroup * static_cast<int64_t>(group_bytes(format)), unit = pairs ? 2 * panel : panel;
  const Heights heights(a.rows);
  const TileConfig config(static_cast<int>(heights.height));
  alignas(64) float out[2][kBlockTiles * kTileRows * kPanel];
  fence();
  _tile_loadconfig(&config);
  const uint8_t* at = a.weight + begin * unit;
  for (int64_t p = begin; p < end; p++, at += unit) {
    const uint8_t* const next = p + 1 < end ? at + unit : a.next;
    for (int64_t first = 0; first < heights.tiles; first += kBlockTiles) {
      const int64_t last = first + kBlockTiles < heights.tiles ? first + kBlockTiles : heights.tiles, row = heights.row(first);
      const int rows = static_cast<int>(heights.row(last) - row);
      const int64_t ahead = first == 0 && next ? next - at : 0;
      if (pairs) {
        multiply_panel<format>(a, at, heights, first, last, ahead, out[0]);
        multiply_panel<format>(a, at + panel, heights, first, last, ahead, out[1]);
        finish_pair(a, row, rows, p, out[0], out[1]);
      } else {
        want_tile(a, row, rows, p);
        multiply_panel<format>(a, at, heights, first, last, ahead, out[0]);
        finish_tile(a, row, rows, p, out[0]);
      }
    }
  }
  _tile_release();
}

}  // namespace

void linear_amx(const Linear& a, int64_t begin, int64_t end) {
  switch (a.format) {
    case Format::q4_0:
      return run<Format::q4_0>(a, begin, end);
    case Format::q4_1:
      return run<Format::q4_1>(a, begin, end);
    default:
      return run<Format::q8_0>(a, begin, end);
  }
}

}  // namespace HEADRACE_ISA
}  // namespace headrace
#endif
