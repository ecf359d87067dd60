// int4 and int8 weights times int8 activations, in groups of 32 k: the same bits for every number of rows, tiling and level.
//
// Canonical arithmetic of one output (row, column):
//   acc = 0
//   for each group, ascending:
//     i   = corr + sum over its 32 k of u * a            int32, exact; u is the unsigned weight, 16 * nibble for q4; corr is absent for q4_1
//     w   = float(fp16 scale), for q4 divided by 16      exact
//     acc = fma(float(i), w * a_scale, acc)              the product w * a_scale is rounded to fp32 first; |i| < 2^24, so float(i) is exact
//     acc = fma(float(fp16 min), a_sum, acc)             q4_1 only
// corr = -128 * sum(a) turns u into u - 128 (q8_0) and 16 * nibble into 16 * (nibble - 8) (q4_0) at no cost in the loop.
#include "linear.h"

namespace headrace {
namespace HEADRACE_ISA {
namespace {

#if HEADRACE_LEVEL >= 1

// What a tile multiplies, and the weights it asks for while it does: lines [ahead, ahead_stop) bytes past the start of each of its records.
struct TileArgs {
  const Linear& a;
  const uint8_t* panel;
  int64_t row;
  float* out;  // [rows][32], 64 B aligned
  int64_t ahead, ahead_stop;
};
using Tile = void (*)(const TileArgs& t);

// How many lines a record asks for is a template parameter up to 2, and kManyLines a loop: the loop costs 4 % where it is not needed, so
// it is left to the few rows that wait for memory.
constexpr int kManyLines = 3;

template <int lines>
inline void prefetch(const uint8_t* record, const TileArgs& t) {
  const auto line = [record](int64_t at) { _mm_prefetch(reinterpret_cast<const char*>(record + at), _MM_HINT_T1); };
  if (lines == kManyLines) {
    for (int64_t at = t.ahead; at < t.ahead_stop; at += 64) line(at);
  } else {
    if (lines >= 1) line(t.ahead);
    if (lines >= 2) line(t.ahead + 64);
  }
}

// Rows of a matrix with `stride` bytes between them, addressed from two pointers so that six rows cost three registers.
struct RowBase {
  const uint8_t *low, *high;
  int64_t stride;
  RowBase(const void* p, int64_t stride_bytes)
      : low(static_cast<const uint8_t*>(p)), high(static_cast<const uint8_t*>(p) + 3 * stride_bytes), stride(stride_bytes) {}
  const uint8_t* row(int r) const { return r < 3 ? low + r * stride : high + (r - 3) * stride; }
  void advance(int64_t bytes) { low += bytes, high += bytes; }
};

#endif

#if HEADRACE_LEVEL >= 2

// A tile is kTileRows x 32 columns: 12 int32 and 12 fp32 accumulators, four weights, one broadcast and a mask of 32 registers.
// Nibbles are unpacked in registers, whatever the number of rows: on a machine with four vector pipes the shifts and ands fill slots the two
// multipliers leave, and half the bytes come from L2. Measured at 48-252 rows: 92-95 % of the port bound, 88-91 % with the panel unpacked once into
// scratch.
constexpr int kTileRows = 6;

// Half 0 or 1 of the 32 columns' scales, as they multiply the integers, and minima.
template <Format format>
inline __m512 load_scale(const uint8_t* record, int half) {
  const __m512 scale = _mm512_cvtph_ps(_mm256_load_si256(reinterpret_cast<const __m256i*>(record) + half));
  return format == Format::q8_0 ? scale : _mm512_mul_ps(scale, _mm512_set1_ps(kNibbleScale));
}
inline __m512 load_min(const uint8_t* record, int half) {
  return _mm512_cvtph_ps(_mm256_load_si256(reinterpret_cast<const __m256i*>(record + 64) + half));
}

inline __m512i quad(const uint8_t* p) {
  int32_t v;
  std::memcpy(&v, p, 4);
  __m512i a = _mm512_set1_epi32(v);
  __asm__("" : "+v"(a));  // one broadcast load for two products, not an embedded broadcast in each
  return a;
}
inline __m512 broadcast(const uint8_t* p) {
  float v;
  std::memcpy(&v, p, 4);
  return _mm512_set1_ps(v);
}

template <Format format, int lines, int rows>
void tile(const TileArgs& t) {
  constexpr bool has_min = format == Format::q4_1;
  constexpr int64_t record = static_cast<int64_t>(group_bytes(format));
  const Activations& in = t.a.in;
  const int64_t at = t.row * in.ldg, stride = in.ldg * 4;
  RowBase q(in.q + t.row * in.ldq, in.ldq), scale(in.scale + at, stride), corr(in.corr + at, stride), sum(in.sum + at, stride);
  __m512 acc[rows][2];
#pragma GCC unroll 6
  for (int r = 0; r < rows; r++) acc[r][0] = acc[r][1] = _mm512_setzero_ps();
  const uint8_t* panel = t.panel;
  const uint8_t* const end = panel + t.a.k / kGroup * record;
  for (; panel != end; panel += record) {
    prefetch<lines>(panel, t);
    __m512i i[rows][2];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
      if (has_min) {
        i[r][0] = i[r][1] = _mm512_setzero_si512();
      } else {
        i[r][0] = i[r][1] = _mm512_castps_si512(broadcast(corr.row(r)));
      }
    }
    if (format != Format::q8_0) {
      const __m512i high = _mm512_set1_epi8(static_cast<char>(0xF0));
      const uint8_t* w = panel + (has_min ? 128 : 64);
#pragma GCC unroll 4
      for (int j = 0; j < 4; j++, w += 128) {
        const __m512i v0 = _mm512_load_si512(w), v1 = _mm512_load_si512(w + 64);
        const __m512i lo0 = _mm512_and_si512(_mm512_slli_epi16(v0, 4), high), lo1 = _mm512_and_si512(_mm512_slli_epi16(v1, 4), high);
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
          const __m512i x = quad(q.row(r) + 8 * j);
          i[r][0] = _mm512_dpbusd_epi32(i[r][0], lo0, x);
          i[r][1] = _mm512_dpbusd_epi32(i[r][1], lo1, x);
        }
        const __m512i hi0 = _mm512_and_si512(v0, high), hi1 = _mm512_and_si512(v1, high);
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
          const __m512i x = quad(q.row(r) + 8 * j + 4);
          i[r][0] = _mm512_dpbusd_epi32(i[r][0], hi0, x);
          i[r][1] = _mm512_dpbusd_epi32(i[r][1], hi1, x);
        }
      }
    } else {
      const uint8_t* w = panel + 64;
#pragma GCC unroll 8
      for (int j = 0; j < 8; j++, w += 128) {
        const __m512i v0 = _mm512_load_si512(w), v1 = _mm512_load_si512(w + 64);
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
          const __m512i x = quad(q.row(r) + 4 * j);
          i[r][0] = _mm512_dpbusd_epi32(i[r][0], v0, x);
          i[r][1] = _mm512_dpbusd_epi32(i[r][1], v1, x);
        }
      }
    }
    const __m512 s0 = load_scale<format>(panel, 0), s1 = load_scale<format>(panel, 1);
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
      const __m512 x = broadcast(scale.row(r));
      acc[r][0] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(i[r][0]), _mm512_mul_ps(s0, x), acc[r][0]);
      acc[r][1] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(i[r][1]), _mm512_mul_ps(s1, x), acc[r][1]);
    }
    if (has_min) {
      const __m512 m0 = load_min(panel, 0), m1 = load_min(panel, 1);
#pragma GCC unroll 6
      for (int r = 0; r < rows; r++) {
        const __m512 x = broadcast(sum.row(r));
        acc[r][0] = _mm512_fmadd_ps(m0, x, acc[r][0]);
        acc[r][1] = _mm512_fmadd_ps(m1, x, acc[r][1]);
      }
      sum.advance(4);
    }
    q.advance(kGroup), scale.advance(4), corr.advance(4);
  }
#pragma GCC unroll 6
  for (int r = 0; r < rows; r++) {
    _mm512_store_ps(t.out + r * kPanel, acc[r][0]);
    _mm512_store_ps(t.out + r * kPanel + 16, acc[r][1]);
  }
}

#elif HEADRACE_LEVEL == 1

// A tile is up to 4 rows x 32 columns. Products of nibbles fit 16 bits: maddubs gives |2 * 15 * 128| at most and the eight of a group sum to
// 30,720 < 2^15, so a group is summed in int16 and widened once; madd by 16 gives the integer of 16 * u. A byte is 16 * high + low: two such sums.
// The fp32 accumulators stay in the tile (L1): there are 16 registers.
constexpr int kTileRows = 4;

// Pinned, or the compiler keeps sixteen products alive to add them as a tree, and spills them.
inline void accumulate(__m256i& sum, __m256i x) {
  sum = _mm256_add_epi16(sum, x);
  __asm__("" : "+x"(sum));
}

inline __m256i quad(const uint8_t* p) {
  int32_t v;
  std::memcpy(&v, p, 4);
  return _mm256_set1_epi32(v);
}
inline __m256 broadcast(const uint8_t* p) {
  float v;
  std::memcpy(&v, p, 4);
  return _mm256_set1_ps(v);
}
inline __m256i load(const uint8_t* p) { return _mm256_load_si256(reinterpret_cast<const __m256i*>(p)); }

template <Format format, int lines, int rows>
void tile(const TileArgs& t) {
  constexpr bool bytes = format == Format::q8_0, has_min = format == Format::q4_1;
  constexpr int64_t record = static_cast<int64_t>(group_bytes(format));
  constexpr int sums = bytes ? 2 : 1, width = rows * sums <= 2 ? 4 : rows * sums <= 4 ? 2 : 1;  // at most 8 int16 accumulators
  const Activations& in = t.a.in;
  const int64_t at = t.row * in.ldg, stride = in.ldg * 4;
  RowBase q(in.q + t.row * in.ldq, in.ldq), scale(in.scale + at, stride), corr(in.corr + at, stride), sum(in.sum + at, stride);
  const __m256i digit = _mm256_set1_epi8(15);
  for (int i = 0; i < rows * kPanel; i += 8) _mm256_store_ps(t.out + i, _mm256_setzero_ps());
  const uint8_t* panel = t.panel;
  const uint8_t* const end = panel + t.a.k / kGroup * record;
  for (; panel != end; panel += record) {
    prefetch<lines>(panel, t);
    for (int first = 0; first < 4; first += width) {  // vectors of 8 columns
      __m256i part[rows][width][sums];
#pragma GCC unroll 4
      for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < width; v++)
#pragma GCC unroll 2
          for (int s = 0; s < sums; s++) part[r][v][s] = _mm256_setzero_si256();
      const uint8_t* w = panel + (has_min ? 128 : 64) + 32 * first;
      // One broadcast of four k serves `width` vectors: of nibbles low and then high digits are eight k, of bytes two digits of the same four.
#pragma GCC unroll 8
      for (int j = 0; j < 8; j++) {
        __m256i u[width][sums];
#pragma GCC unroll 4
        for (int v = 0; v < width; v++) {
          const __m256i both = load(w + 128 * (bytes ? j : j / 2) + 32 * v);
          u[v][0] = _mm256_and_si256(bytes || j % 2 == 0 ? both : _mm256_srli_epi16(both, 4), digit);
          if (bytes) u[v][sums - 1] = _mm256_and_si256(_mm256_srli_epi16(both, 4), digit);
        }
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
          const __m256i x = quad(q.row(r) + 4 * j);
#pragma GCC unroll 4
          for (int v = 0; v < width; v++)
#pragma GCC unroll 2
            for (int s = 0; s < sums; s++) accumulate(part[r][v][s], _mm256_maddubs_epi16(u[v][s], x));
        }
      }
#pragma GCC unroll 4
      for (int v = 0; v < width; v++) {
        const int column = 8 * (first + v);
        __m256 s = _mm256_cvtph_ps(_mm_load_si128(reinterpret_cast<const __m128i*>(panel + 2 * column))), m = s;
        if (!bytes) s = _mm256_mul_ps(s, _mm256_set1_ps(kNibbleScale));
        if (has_min) m = _mm256_cvtph_ps(_mm_load_si128(reinterpret_cast<const __m128i*>(panel + 64 + 2 * column)));
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
          __m256i i = _mm256_madd_epi16(part[r][v][sums - 1], _mm256_set1_epi16(16));
          if (bytes) i = _mm256_add_epi32(i, _mm256_madd_epi16(part[r][v][0], _mm256_set1_epi16(1)));
          if (!has_min) i = _mm256_add_epi32(i, quad(corr.row(r)));
          float* out = t.out + r * kPanel + column;
          __m256 acc = _mm256_fmadd_ps(_mm256_cvtepi32_ps(i), _mm256_mul_ps(s, broadcast(scale.row(r))), _mm256_load_ps(out));
          if (has_min) acc = _mm256_fmadd_ps(m, broadcast(sum.row(r)), acc);
          _mm256_store_ps(out, acc);
        }
      }
    }
    q.advance(kGroup), scale.advance(4), corr.advance(4), sum.advance(4);
  }
}

#endif

#if HEADRACE_LEVEL >= 1

// Part `i` of `count` into `parts` near-equal ones: its first element.
inline int64_t part(int64_t count, int64_t parts, int64_t i) { return count / parts * i + (i < count % parts ? i : count % parts); }

// The tiles of one format that ask for `lines` lines a record, by number of rows less one.
template <Format format, int lines>
const Tile* heights() {
#if HEADRACE_LEVEL >= 2
  static const Tile table[kTileRows] = {tile<format, lines, 1>, tile<format, lines, 2>, tile<format, lines, 3>,
                                        tile<format, lines, 4>, tile<format, lines, 5>, tile<format, lines, 6>};
#else
  static const Tile table[kTileRows] = {tile<format, lines, 1>, tile<format, lines, 2>, tile<format, lines, 3>, tile<format, lines, 4>};
#endif
  return table;
}

// Over each panel (or pair) the tiles of rows, near-equal in height; each tile asks for its share of the panel that follows, which after the last one
// is a.next. One row computes so little that the hardware's own prefetching keeps up, and is better left alone (31 -> 28 GB/s). Over cold weights of
// K = 576 and 2048: 8 rows 1.6 times as fast, 16 rows 1.4, 32 rows 1.1.
template <Format format>
void run(const Linear& a, int64_t begin, int64_t end) {
  static const Tile* const tables[] = {heights<format, 0>(), heights<format, 1>(), heights<format, 2>(), heights<format, kManyLines>()};
  const bool pairs = a.epilogue == Epilogue::silu_mul;
  constexpr int64_t lines = static_cast<int64_t>(group_bytes(format)) / 64;
  const int64_t panel = a.k / kGroup * lines * 64, unit = pairs ? 2 * panel : panel, tiles = (a.rows + kTileRows - 1) / kTileRows;
  alignas(64) float out[2][kTileRows * kPanel];
  const uint8_t* at = a.weight + begin * unit;
  for (int64_t p = begin; p < end; p++, at += unit) {
    const uint8_t* const next = p + 1 < end ? at + unit : a.next;
    for (int64_t t = 0; t < tiles; t++) {
      const int64_t row = part(a.rows, tiles, t), from = part(lines, tiles, t), count = part(lines, tiles, t + 1) - from;
      const int rows = static_cast<int>(part(a.rows, tiles, t + 1) - row);
      const int64_t ahead = next - at + from * 64;
      const Tile tile_of = tables[!next || a.rows == 1 ? 0 : count < kManyLines ? count : kManyLines][rows - 1];
      const auto multiply = [&](const uint8_t* weights, float* to) { tile_of({a, weights, row, to, ahead, ahead + count * 64}); };
      if (pairs) {
        want_pair(a.act_out, row, rows, p);
        multiply(at, out[0]);
        multiply(at + panel, out[1]);
        finish_pair(a, row, rows, p, out[0], out[1]);
      } else {
        want_tile(a, row, rows, p);
        multiply(at, out[0]);
        finish_tile(a, row, rows, p, out[0]);
      }
    }
  }
}

#endif

#if HEADRACE_LEVEL == 0

// The specification, as plain as it can be: one group of one panel is decoded, then every row meets it.
void columns(const Linear& a, int64_t p, int64_t row, float* out) {
  const Activations& in = a.in;
  const int64_t groups = a.k / kGroup;
  const bool nibbles = a.format != Format::q8_0, has_min = a.format == Format::q4_1;
  const uint8_t* record = a.weight + static_cast<size_t>(p) * static_cast<size_t>(groups) * group_bytes(a.format);
  for (int c = 0; c < kPanel; c++) out[c] = 0;
  for (int64_t g = 0; g < groups; g++, record += group_bytes(a.format)) {
    const int8_t* q = in.q + row * in.ldq + g * kGroup;
    const int64_t at = row * in.ldg + g;
    const uint8_t* body = record + (has_min ? 128 : 64);
    for (int c = 0; c < kPanel; c++) {
      int32_t i = has_min ? 0 : in.corr[at];
      for (int k = 0; k < kGroup; k++) {
        int32_t u;
        if (nibbles) {
          const uint8_t byte = body[k / 8 * 128 + c * 4 + k % 4];
          u = k % 8 < 4 ? (byte << 4) & 0xF0 : byte & 0xF0;
        } else {
          u = body[k / 4 * 128 + c * 4 + k % 4];
        }
        i += u * q[k];
      }
      uint16_t half[2];
      std::memcpy(&half[0], record + 2 * c, 2);
      std::memcpy(&half[1], record + (has_min ? 64 : 0) + 2 * c, 2);
      const float w = nibbles ? from_fp16(half[0]) * kNibbleScale : from_fp16(half[0]);
      const float product = w * in.scale[at];
      out[c] = __builtin_fmaf(static_cast<float>(i), product, out[c]);
      if (has_min) out[c] = __builtin_fmaf(from_fp16(half[1]), in.sum[at], out[c]);
    }
  }
}

#endif

}  // namespace

void linear_int(const Linear& a, int64_t begin, int64_t end) {
#if HEADRACE_LEVEL >= 1
  switch (a.format) {
    case Format::q4_0:
      return run<Format::q4_0>(a, begin, end);
    case Format::q4_1:
      return run<Format::q4_1>(a, begin, end);
    default:
      return run<Format::q8_0>(a, begin, end);
  }
#else
  alignas(64) float gate[kPanel], out[kPanel];
  for (int64_t p = begin; p < end; p++)
    for (int64_t row = 0; row < a.rows; row++) {
      if (a.epilogue == Epilogue::silu_mul) {
        columns(a, 2 * p, row, gate);
        columns(a, 2 * p + 1, row, out);
        finish_pair(a, row, 1, p, gate, out);
      } else {
        columns(a, p, row, out);
        finish_tile(a, row, 1, p, out);
      }
    }
#endif
}

}  // namespace HEADRACE_ISA
}  // namespace headrace
