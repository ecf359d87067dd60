// int4 and int8 weights times int8 activations, both in groups of 32 k: any number of rows, bit for bit the same for every number of rows, tiling and level.
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

constexpr float kNibbleScale = 1.0f / 16;  // u is 16 * nibble

#if HEADRACE_LEVEL >= 2

// A tile is kTileRows x 32 columns: 12 int32 and 12 fp32 accumulators, two weights, one broadcast, five to spare of 32 registers.
constexpr int kTileRows = 6;
// A row block's activations stay in L2 while the panels pass: 512 KiB of a 1 MiB L2, and at most 256 rows of gate tiles in scratch.
constexpr int64_t kBlockBytes = 512 * 1024, kBlockRows = 256;
// From here on a panel's nibbles are unpacked once into scratch instead of once for each tile. Measured, see docs/numerics.md... 
constexpr int64_t kUnpackRows = 24;

// How a panel's record lies in memory.
enum class Body { nibbles, bytes, unpacked };

template <Body body, bool has_min>
constexpr int64_t record_bytes() {
  return body == Body::nibbles ? (has_min ? 640 : 576) : body == Body::bytes ? 1088 : has_min ? 1280 : 1152;
}

template <Body body>
inline __m512 load_scale(const uint8_t* p, int half) {
  if (body == Body::unpacked) return _mm512_load_ps(reinterpret_cast<const float*>(p) + 16 * half);
  const __m512 scale = _mm512_cvtph_ps(_mm256_load_si256(reinterpret_cast<const __m256i*>(p) + half));
  return body == Body::nibbles ? _mm512_mul_ps(scale, _mm512_set1_ps(kNibbleScale)) : scale;
}
template <Body body>
inline __m512 load_min(const uint8_t* p, int half) {
  if (body == Body::unpacked) return _mm512_load_ps(reinterpret_cast<const float*>(p) + 32 + 16 * half);
  return _mm512_cvtph_ps(_mm256_load_si256(reinterpret_cast<const __m256i*>(p + 64) + half));
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

// out[rows][32] <- `rows` rows times one panel.
template <Body body, bool has_min, int rows>
void tile(const Linear& a, const uint8_t* panel, int64_t row, float* out) {
  const Activations& in = a.in;
  RowBase q(in.q + row * in.ldq, in.ldq), scale(in.scale + row * in.ldg, in.ldg * 4), corr(in.corr + row * in.ldg, in.ldg * 4),
      sum(in.sum + row * in.ldg, in.ldg * 4);
  __m512 acc[rows][2];
#pragma GCC unroll 6
  for (int r = 0; r < rows; r++) acc[r][0] = acc[r][1] = _mm512_setzero_ps();
  const uint8_t* const end = panel + a.k / kGroup * record_bytes<body, has_min>();
  for (; panel != end; panel += record_bytes<body, has_min>()) {
    __m512i i[rows][2];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
      if (has_min) {
        i[r][0] = i[r][1] = _mm512_setzero_si512();
      } else {
        i[r][0] = i[r][1] = _mm512_castps_si512(broadcast(corr.row(r)));
      }
    }
    if (body == Body::nibbles) {
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
      const uint8_t* w = panel + (body == Body::bytes ? 64 : has_min ? 256 : 128);
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
    const __m512 s0 = load_scale<body>(panel, 0), s1 = load_scale<body>(panel, 1);
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
      const __m512 x = broadcast(scale.row(r));
      acc[r][0] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(i[r][0]), _mm512_mul_ps(s0, x), acc[r][0]);
      acc[r][1] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(i[r][1]), _mm512_mul_ps(s1, x), acc[r][1]);
    }
    if (has_min) {
      const __m512 m0 = load_min<body>(panel, 0), m1 = load_min<body>(panel, 1);
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
    _mm512_store_ps(out + r * kPanel, acc[r][0]);
    _mm512_store_ps(out + r * kPanel + 16, acc[r][1]);
  }
}

using Tile = void (*)(const Linear& a, const uint8_t* panel, int64_t row, float* out);

template <Body body, bool has_min>
Tile tile_of(int rows) {
  static const Tile table[kTileRows] = {tile<body, has_min, 1>, tile<body, has_min, 2>, tile<body, has_min, 3>,
                                        tile<body, has_min, 4>, tile<body, has_min, 5>, tile<body, has_min, 6>};
  return table[rows - 1];
}

// Nibbles to bytes 16 * u, scales and minima to fp32: the integers and the scales are those `tile` makes itself from nibbles.
template <bool has_min>
void unpack(const uint8_t* from, int64_t groups, uint8_t* to) {
  const __m512i high = _mm512_set1_epi8(static_cast<char>(0xF0));
  for (int64_t g = 0; g < groups; g++, from += record_bytes<Body::nibbles, has_min>(), to += record_bytes<Body::unpacked, has_min>()) {
    for (int half = 0; half < 2; half++) {
      _mm512_store_ps(reinterpret_cast<float*>(to) + 16 * half, load_scale<Body::nibbles>(from, half));
      if (has_min) _mm512_store_ps(reinterpret_cast<float*>(to) + 32 + 16 * half, load_min<Body::nibbles>(from, half));
    }
    const uint8_t* in = from + (has_min ? 128 : 64);
    uint8_t* out = to + (has_min ? 256 : 128);
    for (int j = 0; j < 4; j++, in += 128, out += 256) {
      const __m512i v0 = _mm512_load_si512(in), v1 = _mm512_load_si512(in + 64);
      _mm512_store_si512(out, _mm512_and_si512(_mm512_slli_epi16(v0, 4), high));
      _mm512_store_si512(out + 64, _mm512_and_si512(_mm512_slli_epi16(v1, 4), high));
      _mm512_store_si512(out + 128, _mm512_and_si512(v0, high));
      _mm512_store_si512(out + 192, _mm512_and_si512(v1, high));
    }
  }
}

// Part `i` of `count` into `parts` near-equal ones: its first element.
inline int64_t part(int64_t count, int64_t parts, int64_t i) { return count / parts * i + (i < count % parts ? i : count % parts); }

// All row tiles of [row, stop) times one panel: out[stop - row][32].
template <Body body, bool has_min, typename Then>
inline void panel_tiles(const uint8_t* panel, int64_t row, int64_t stop, Then then) {
  const int64_t tiles = (stop - row + kTileRows - 1) / kTileRows;
  for (int64_t t = 0; t < tiles; t++) {
    const int64_t first = row + part(stop - row, tiles, t);
    const int rows = static_cast<int>(row + part(stop - row, tiles, t + 1) - first);
    then(tile_of<body, has_min>(rows), panel, first, rows);
  }
}

template <Body body, bool has_min>
void rows_by_panels(const Linear& a, int64_t row, int64_t stop, int64_t begin, int64_t end, uint8_t* scratch) {
  const int64_t groups = a.k / kGroup;
  const size_t stride = static_cast<size_t>(groups) * group_bytes(a.format);
  constexpr bool packed = body != Body::unpacked;
  float* gate = reinterpret_cast<float*>(scratch);  // [stop - row][32]
  uint8_t* wide = scratch + kBlockRows * kPanel * 4;
  alignas(64) float out[kTileRows * kPanel];
  const auto ready = [&](int64_t p) {
    const uint8_t* panel = a.weight + static_cast<size_t>(p) * stride;
    if (packed) return panel;
    unpack<has_min>(panel, groups, wide);
    return static_cast<const uint8_t*>(wide);
  };
  for (int64_t p = begin; p < end; p++) {
    if (a.epilogue == Epilogue::silu_mul) {
      panel_tiles<body, has_min>(ready(2 * p), row, stop,
                                 [&](Tile f, const uint8_t* panel, int64_t first, int) { f(a, panel, first, gate + (first - row) * kPanel); });
      panel_tiles<body, has_min>(ready(2 * p + 1), row, stop, [&](Tile f, const uint8_t* panel, int64_t first, int rows) {
        f(a, panel, first, out);
        finish_pair(a, first, rows, p, gate + (first - row) * kPanel, out);
      });
    } else {
      panel_tiles<body, has_min>(ready(p), row, stop, [&](Tile f, const uint8_t* panel, int64_t first, int rows) {
        f(a, panel, first, out);
        finish_tile(a, first, rows, p, out);
      });
    }
  }
}

template <Body body, bool has_min>
void run(const Linear& a, int64_t begin, int64_t end, uint8_t* scratch) {
  int64_t most = kBlockBytes / a.k;
  most = most > kBlockRows ? kBlockRows : most < 48 ? 48 : most;
  const int64_t blocks = (a.rows + most - 1) / most;
  for (int64_t b = 0; b < blocks; b++) {
    const int64_t row = part(a.rows, blocks, b), stop = part(a.rows, blocks, b + 1);
    if (body == Body::nibbles && stop - row >= kUnpackRows) {
      rows_by_panels<Body::unpacked, has_min>(a, row, stop, begin, end, scratch);
    } else {
      rows_by_panels<body, has_min>(a, row, stop, begin, end, scratch);
    }
  }
}

#endif

#if HEADRACE_LEVEL < 2

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

void linear_int(const Linear& a, int64_t begin, int64_t end, uint8_t* scratch) {
#if HEADRACE_LEVEL >= 2
  switch (a.format) {
    case Format::q4_0: return run<Body::nibbles, false>(a, begin, end, scratch);
    case Format::q4_1: return run<Body::nibbles, true>(a, begin, end, scratch);
    default: return run<Body::bytes, false>(a, begin, end, scratch);
  }
#else
  (void)scratch;
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
